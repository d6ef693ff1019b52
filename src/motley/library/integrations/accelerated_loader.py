"""The loader that an Accelerator of the lab yields rows from."""

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from motley.library.integrations.framework_loader import FrameworkLoader
from motley.library.lab import Lab
from motley.library.sample_order import RandomState
from motley.registry import import_extra

accelerate = import_extra("accelerate", "lab.accelerate()")
_PROGRESS = "motley_progress.json"  # in a folder of accelerator.save_state()


class AcceleratedLoader(FrameworkLoader):
    """A DataLoader that an Accelerator has prepared. Further attributes are the DataLoader's."""

    def __init__(self, lab: Lab, accelerator: Any, loader: "DataLoader[Any]", shard: Any) -> None:
        batches = DataLoader(
            loader.dataset, batch_sampler=shard.batch_sampler, num_workers=loader.num_workers,
            collate_fn=loader.collate_fn, pin_memory=loader.pin_memory, timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn, generator=loader.generator,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
        )  # fmt: skip
        super().__init__(lab, batches)
        self._shard, self._state = shard, accelerator.gradient_state
        self.end_of_dataloader, self.remainder = False, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_shard":  # while the object is copied
            raise AttributeError(name)
        return getattr(self._shard, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, from which a seeded sampler draws its order."""
        self.iteration = epoch

    def __iter__(self) -> Iterator[Any]:
        self._shard.set_epoch(self.iteration)
        self._state._add_dataloader(self)
        try:
            for piece, rows in self.read():
                self.end_of_dataloader = piece.last and piece.batch == len(self) - 1
                if self.reads_ahead:
                    yield piece, rows
                else:
                    yield accelerate.utils.send_to_device(rows, self._lab.device)
        finally:
            self.end_of_dataloader = False
            self._state._remove_dataloader(self)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a loader whose next pass starts with a later global batch; see Accelerate."""
    if not isinstance(loader, AcceleratedLoader):
        return accelerate.skip_first_batches(loader, num_batches)
    later = copy.copy(loader)
    later.first = num_batches
    return later


def save_progress(lab: Lab, folder: str, mid_epoch: bool) -> None:
    """Write the step and the state of sample orders on rank 0, for :func:`load_progress`.

    Args:
        lab: the lab.
        folder: folder of a checkpoint.
        mid_epoch: True if the next training pass continues the present one.
    """
    order = lab._order
    if lab.is_main and order.before is not None and order._state is not None:
        before = order.before.as_json() if mid_epoch else None
        content = {"step": lab._step, "before": before, "order": order._state.as_json()}
        Path(folder, _PROGRESS).write_text(json.dumps(content))


def load_progress(lab: Lab, folder: str, loaders: Iterable[FrameworkLoader]) -> None:
    """Continue the step and the sample orders of a checkpoint, if a lab has written it.

    Args:
        lab: the lab.
        folder: folder of the checkpoint.
        loaders: all loaders, of which one continues a pass.
    """
    path = Path(folder, _PROGRESS)
    if not path.exists():
        return
    content = json.loads(path.read_text())
    lab._step = content["step"]
    order = RandomState.from_json(content["order"])
    lab._order.continue_from(order)
    if content["before"]:
        lab._order.continue_from(RandomState.from_json(content["before"]))
        for loader in loaders:
            loader.order_after[:] = [order]
