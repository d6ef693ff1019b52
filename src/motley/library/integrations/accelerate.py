"""Support for scripts of Accelerate: all ranks train as one machine with the whole global batch.

The Accelerator sees one process, whose batch is the global batch. Its samplers therefore neither
pad nor drop rows, and its schedulers step once per optimizer step, not once per process. The batch
size of a DataLoader counts the rows of all ranks together, and ``accelerator.num_processes`` is 1.
A script therefore computes batch sizes, warm-up and steps as on one machine::

    lab = motley.join()
    accelerator = lab.accelerate(Accelerator(gradient_accumulation_steps=2))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

A pass over a loader is a training pass if a prepared model is in training mode at its start. The
mean of a loss over rows is exact. A mean over tokens needs ``accelerator.backward(loss,
weight=tokens)``.
"""

from typing import Any

from torch import Tensor, nn

from motley.errors import MotleyError
from motley.library.integrations.accelerate_rows import (
    AcceleratedLoader,
    RowCollectives,
    load_progress,
    save_progress,
    skip_first_batches,
)
from motley.library.integrations.framework_loader import check_folder
from motley.library.lab import Lab
from motley.library.lab_loader import check_loader
from motley.registry import import_extra

accelerate = import_extra("accelerate", "lab.accelerate()")
_Accelerator: Any = accelerate.Accelerator


class LabAccelerator(RowCollectives, _Accelerator):  # type: ignore[misc]
    """An Accelerator whose methods act on all ranks. The arguments are those of Accelerate."""

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepare all models before other objects, whatever the order of the arguments."""
        for each in objects:
            if isinstance(each, nn.Module) and all(each is not m for m in self.lab._state.models):
                self.lab.prepare(each)
        return super().prepare(*objects, **options)

    def prepare_optimizer(self, optimizer: Any, *args: Any, **options: Any) -> Any:
        """Let an optimizer step once per global batch."""
        if not isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer):
            self.lab.prepare(optimizer)
        return super().prepare_optimizer(optimizer, *args, **options)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Let a learning-rate scheduler step once per global batch."""
        if not isinstance(scheduler, accelerate.scheduler.AcceleratedScheduler):
            self.lab.prepare(scheduler)
        return super().prepare_scheduler(scheduler)

    def prepare_data_loader(self, loader: Any, *args: Any, **options: Any) -> Any:
        """Return a loader of this rank's rows of each global batch, in the order of one process."""
        if isinstance(loader, AcceleratedLoader):
            return loader
        check_loader(loader)
        shard = super().prepare_data_loader(loader, *args, **options)
        self._dataloaders[-1] = AcceleratedLoader(self.lab, self.loop, self, loader, shard)
        return self._dataloaders[-1]

    def skip_first_batches(self, loader: Any, num_batches: int = 0) -> Any:
        """Return a loader whose next pass skips ``num_batches`` global batches."""
        return skip_first_batches(loader, num_batches)

    def _do_sync(self) -> None:
        if self.piece is None or self.piece.last:
            super()._do_sync()
        else:  # the next piece belongs to this global batch
            self.gradient_state._set_sync_gradients(False)

    def backward(
        self, loss: Tensor, weight: Any = None, reduction: str = "mean", **options: Any
    ) -> None:
        """Compute this rank's part of the gradient. For the arguments see ``Lab.backward``."""
        loss = loss / self.gradient_accumulation_steps
        loss = loss if self.scaler is None else self.scaler.scale(loss)
        self.lab.backward(loss, weight, reduction, **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the global batch's gradient by its norm; return the norm before clipping."""
        self.unscale_gradients()
        return self.lab.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each entry of the gradient of the global batch to ``clip_value``."""
        self.unscale_gradients()
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.loop.gate.add_up_for(chosen):
            nn.utils.clip_grad_value_(chosen, clip_value)

    def save_state(self, *args: Any, **options: Any) -> Any:
        """Save the state on rank 0, with the position of the loop in the data."""
        folder = super().save_state(*args, **options)
        mid_epoch = self.piece is not None and not self.gradient_state.end_of_dataloader
        save_progress(self.lab, folder, mid_epoch)
        return folder

    def load_state(self, input_dir: Any = None, **options: Any) -> None:
        """Load the state on all ranks, and continue at the saved position in the data."""
        if input_dir is not None:
            check_folder(self.loop, input_dir)
        super().load_state(input_dir, **options)
        if input_dir is not None:
            load_progress(self.lab, input_dir, self._dataloaders)


def connect_accelerator(lab: Lab, accelerator: Any) -> Any:
    """Let an Accelerator train on all ranks, and return the Accelerator; see ``Lab.accelerate``."""
    loop = lab._loop
    if loop is None:
        return accelerator
    loop.require_whole_models()
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise MotleyError(
            f"Accelerate is configured for {kind}, which divides the model itself: run "
            "`accelerate config default`, and remove the plugin from Accelerator(...)"
        )
    if accelerator._models or accelerator._dataloaders:
        raise MotleyError(
            "accelerator.prepare() was called before lab.accelerate(): write "
            "`accelerator = lab.accelerate(Accelerator())`, and call prepare() below it"
        )
    facts = {
        "distributed_type": accelerate.DistributedType.NO, "num_processes": 1, "backend": None,
        "device": lab.device,
    }  # fmt: skip
    state = accelerate.PartialState
    for kind in (state, accelerate.state.AcceleratorState):
        kind._shared_state.update(facts)
        # A lost rank changes the numbers, and Accelerate's own are of no use.
        kind.process_index = property(lambda _: loop.rank, lambda _, number: None)
        kind.local_process_index = property(lambda _: loop.local_rank, lambda _, number: None)
    state.wait_for_everyone = lambda state: loop.gather_objects(None)
    state.destroy_process_group = lambda state, group=None: None  # the group is the lab's
    accelerator.lab, accelerator.loop = lab, loop
    accelerator.__class__ = type("LabAccelerator", (LabAccelerator, type(accelerator)), {})
    if accelerator.scaler is not None:
        lab.prepare(accelerator.scaler)
    return accelerator
