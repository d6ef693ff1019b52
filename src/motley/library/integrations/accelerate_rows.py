"""A loader and collectives for an Accelerator whose ranks have unequal parts of a global batch."""

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from motley.errors import MotleyError
from motley.library.integrations.framework_loader import FrameworkLoader
from motley.library.lab import Lab
from motley.library.loop_shares import Piece
from motley.library.loop_state import put_together, take_apart
from motley.library.rank_loop import RankLoop
from motley.library.sample_order import RandomState
from motley.registry import import_extra

accelerate = import_extra("accelerate", "lab.accelerate()")
_apply = accelerate.utils.recursively_apply
_PROGRESS = "motley_progress.safetensors"  # name of a file that save_state() adds to its folder


class AcceleratedLoader(FrameworkLoader):
    """A DataLoader that an Accelerator has prepared, with all attributes of the DataLoader."""

    def __init__(
        self, lab: Lab, loop: RankLoop, accelerator: Any, loader: "DataLoader[Any]", shard: Any
    ) -> None:
        batches = DataLoader(
            loader.dataset, batch_sampler=shard.batch_sampler, num_workers=loader.num_workers,
            collate_fn=loader.collate_fn, pin_memory=loader.pin_memory, timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn, generator=loader.generator,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
        )  # fmt: skip
        super().__init__(lab, loop, batches)
        self._shard, self._accelerator = shard, accelerator
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
        state, size = self._accelerator.gradient_state, self.loop.size
        state._add_dataloader(self)
        try:
            for piece, rows in self.read():
                if size != self.loop.size:  # the accumulation starts again
                    self._accelerator.step, size = 0, self.loop.size
                self.end_of_dataloader = piece.last and piece.batch == len(self) - 1
                if piece is self.loop.piece:
                    self._position.mark_rows()
                if self.reads_ahead:
                    yield piece, rows
                else:
                    yield accelerate.utils.send_to_device(rows, self.loop.device)
        finally:
            self.end_of_dataloader = False
            state._remove_dataloader(self)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a loader whose next pass skips ``num_batches`` global batches; see Accelerate."""
    if not isinstance(loader, AcceleratedLoader):
        return accelerate.skip_first_batches(loader, num_batches)
    later = copy.copy(loader)
    later.first = num_batches
    return later


def save_progress(lab: Lab, folder: str, mid_epoch: bool) -> None:
    """Write the step number and the state of the sample order, for :func:`load_progress`.

    Only rank 0 writes.

    Args:
        lab: the result of ``motley.join()``.
        folder: folder of a checkpoint.
        mid_epoch: True if the present pass over the training data has not ended.
    """
    position, loop = lab._position, lab._loop
    if not lab.is_main or loop is None or position.order is None or loop.order.state is None:
        return
    tensors: dict[str, Tensor] = {}
    before = position.order.state_dict() if mid_epoch else None
    content = {"step": position.step, "before": before, "order": loop.order.state.state_dict()}
    text = json.dumps(take_apart(content, "loop", tensors))
    save_file(
        {name: each.clone() for name, each in tensors.items()}, Path(folder, _PROGRESS),
        {"loop": text},
    )  # fmt: skip


def load_progress(lab: Lab, folder: str, loaders: Iterable[FrameworkLoader]) -> None:
    """Continue at the step and in the sample order that :func:`save_progress` has written.

    If the folder lacks the file of :func:`save_progress`, this function changes nothing.

    Args:
        lab: the result of ``motley.join()``.
        folder: folder of the checkpoint.
        loaders: all training loaders. One of them continues an unfinished pass of the checkpoint.
    """
    path = Path(folder, _PROGRESS)
    if lab._loop is None or not path.exists():
        return
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        content = put_together(json.loads(file.metadata()["loop"]), tensors)
    lab._position.step = content["step"]
    after = lab._loop.order.state = RandomState.from_state_dict(content["order"])
    if content["before"]:
        lab._loop.order.state = RandomState.from_state_dict(content["before"])
        for loader in loaders:
            loader.order_after[:] = [after]


class RowCollectives:
    """Accelerate's collectives, for tensors whose rows are unequal parts of a global batch.

    ``data`` is a tensor, or a list, tuple or dictionary of tensors. All ranks call each method.
    """

    lab: Lab
    loop: RankLoop
    gradient_state: Any

    @property
    def piece(self) -> Piece | None:
        """This rank's part of the present global batch; None outside of a loop over a loader."""
        loader = self.gradient_state.active_dataloader
        in_training = loader is None or getattr(loader, "reads_ahead", False)
        return self.loop.piece if in_training else getattr(loader, "piece", None)

    def _check_piece(self) -> Piece | None:
        """Return this rank's part of the present batch; None outside of a loop over a loader.

        Raise MotleyError if the rank computes the batch in several parts and this part is not the
        last.
        """
        if self.piece and not self.piece.last:
            raise MotleyError(
                "Accelerate's collectives were called after a piece of a batch that is not the "
                "last, and other ranks have other numbers of pieces: call them `if "
                "accelerator.sync_gradients:`, or leave out micro_batch in motley.join()"
            )
        return self.piece

    def gather(self, data: Any) -> Any:
        """Return the rows of all ranks in the order of the global batch.

        A tensor without dimensions becomes one row of its rank. A tensor with at least as many rows
        as the global batch, such as ``loss.repeat(batch_size)``, is cut to this rank's number of
        rows. The mean of the result is then the mean over the global batch.
        """
        piece = self._check_piece()

        def join(tensor: Tensor) -> Tensor:
            own = tensor.detach()[None] if tensor.dim() == 0 else tensor.detach()
            if piece and (not piece.rows or len(own) >= piece.global_rows):
                own = own[: piece.rows]
            return torch.cat(self.loop.gather_objects(own.cpu())).to(self.lab.device)

        return _apply(join, data, error_on_other_type=True)

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all ranks like :meth:`gather`, or a list of all ranks' objects."""
        try:
            if not use_gather_object:
                return self.gather(data)
        except TypeError:  # the data has other objects than tensors, on all ranks
            pass
        rows = list(data) if self.piece is None else list(data)[: self.piece.rows]
        return [each for part in self.loop.gather_objects(rows) for each in part]

    def reduce(self, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum over all ranks, or the mean over the rows of the global batch.

        Outside of a loop, the mean is the mean over ranks.
        """
        piece = self._check_piece()
        rows = piece.rows if piece else 1
        factor = rows if reduction == "mean" else min(rows, 1)

        def add(tensor: Tensor) -> Tensor:
            own = tensor.double() * factor if rows else torch.zeros_like(tensor).double()
            total, count = self.lab.reduce((own, factor))
            return (total / count if reduction == "mean" else total).to(tensor) * scale

        return data if reduction == "none" else _apply(add, data, error_on_other_type=True)

    def pad_across_processes(
        self, data: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Extend a dimension of a tensor to its largest size on any rank.

        The number of rows, dimension 0, needs no padding for :meth:`gather`.
        """

        def pad(tensor: Tensor) -> Tensor:
            if dim == 0 or dim >= tensor.dim():
                return tensor
            missing = max(self.loop.gather_objects(tensor.shape[dim])) - tensor.shape[dim]
            widths = [0, 0] * (tensor.dim() - dim - 1)
            widths += [missing, 0] if pad_first else [0, missing]
            return nn.functional.pad(tensor, widths, value=pad_index)

        return _apply(pad, data, error_on_other_type=True)
