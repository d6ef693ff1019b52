"""A Lightning strategy that trains on all ranks, with the result of one machine.

Lightning sees one device, and the batch size of a DataLoader is that of all ranks together::

    lab = motley.join()
    trainer = lightning.Trainer(strategy=MotleyStrategy(), devices=1, max_epochs=3)

Automatic and manual optimization, gradient clipping, ``accumulate_grad_batches``, validation,
prediction and checkpoints work as usual. The hook ``on_before_optimizer_step`` and the optimizer
get the gradient of the global batch. ``self.log`` of a mean over rows gives the mean over the
global batch. For a mean over tokens, ``training_step`` returns ``{"loss": loss, "weight": tokens}``
or calls ``self.manual_backward(loss, weight=tokens)``, and logs with ``batch_size=tokens``.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from motley.errors import MotleyError
from motley.library.integrations.framework_loader import get_lab
from motley.library.integrations.lightning_collectives import (
    LightningCollectives,
    LightningLoader,
    clip_over_ranks,
    kept_metrics,
    run_closure_before,
    weigh_log,
)
from motley.registry import import_extra

lightning = import_extra("lightning.pytorch", "MotleyStrategy", "lightning")
_utilities = import_extra("lightning_utilities.core.apply_func", "MotleyStrategy", "lightning")
_Strategy: Any = lightning.strategies.SingleDeviceStrategy


class MotleyStrategy(LightningCollectives, _Strategy):  # type: ignore[misc]
    """The strategy of a ``lightning.Trainer`` on all ranks of ``motley.join()``.

    The Trainer needs ``devices=1``.
    """

    strategy_name = "motley"

    def __init__(self) -> None:
        self.lab = get_lab("MotleyStrategy")
        super().__init__(self.lab.device)
        self._weight: Any = None
        self.loop = self.lab._loop
        self.global_rank = self.local_rank = self.lab.rank
        lightning.utilities.rank_zero_only.rank = self.lab.rank
        if self.loop is None:
            return
        if self.loop.schedule.most_rows:
            raise MotleyError(
                "Lightning counts the passes of an epoch, and micro_batch makes their number "
                "differ between ranks: leave out micro_batch in motley.join(), and write a "
                "smaller batch_size with accumulate_grad_batches=2"
            )
        self.loop.end_without("trainer.fit(..., ckpt_path='last') continues")

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0, which writes checkpoints and logs."""
        return self.lab.is_main

    def connect(self, model: Any) -> None:
        """Connect the LightningModule, and weight the values that it logs by rows."""
        super().connect(model)
        if self.loop is not None and "log" not in vars(model):
            weigh_log(model)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of this rank's rows of each global batch."""
        return dataloader if self.loop is None else LightningLoader(self, dataloader)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, and let them step with the gradient of the global batch."""
        super().setup_optimizers(trainer)
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.lab.prepare(self.lightning_module, *self.optimizers, *([scaler] if scaler else []))
        if self.loop is not None:
            clip_over_ranks(self.lab, self.loop, self.precision_plugin)
            for optimizer in self.optimizers:
                run_closure_before(optimizer)

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **options: Any) -> Any:
        """Run the closure, add up the gradients of all ranks, clip, and step."""

        def closure_of_all() -> Any:
            result = closure()
            if self.loop is not None:
                self.loop.gate.add_up(optimizer)
            return result

        return super().optimizer_step(optimizer, closure_of_all, *args, **options)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **options: Any) -> Tensor:
        """Compute this rank's part of the gradient of the global batch."""
        if self.loop is None:
            options.pop("weight", None)
            result: Tensor = super().backward(closure_loss, optimizer, *args, **options)
            return result
        weight = options.pop("weight", self._weight)
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.lab.backward(loss, weight, *args, **options)
        result = self.precision_plugin.post_backward(loss, self.lightning_module)
        return result

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        self.piece = self.next_piece
        is_dummy = self.piece is not None and not self.piece.rows
        with kept_metrics(self.lightning_module) if is_dummy else contextlib.nullcontext():
            yield
        self.piece = None

    def training_step(self, *args: Any, **options: Any) -> Any:
        """Return the loss of this rank's rows, and store the weight that comes with the loss."""
        with self._in_step():
            output = super().training_step(*args, **options)
        if output is None and self.lightning_module.automatic_optimization and self.loop:
            raise MotleyError(
                "training_step() returned None, and the other ranks need this rank's gradient: "
                'return {"loss": loss, "weight": 0.0} for rows that do not count'
            )
        if isinstance(output, dict):
            self._weight = output.pop("weight", None)
        return output

    def validation_step(self, *args: Any, **options: Any) -> Any:
        """Evaluate this rank's rows."""
        with self._in_step():
            return super().validation_step(*args, **options)

    def test_step(self, *args: Any, **options: Any) -> Any:
        """Evaluate this rank's rows."""
        with self._in_step():
            return super().test_step(*args, **options)

    def predict_step(self, *args: Any, **options: Any) -> Any:
        """Return the predictions of all rows of the global batch, on every rank."""
        with self._in_step():
            output = super().predict_step(*args, **options)
            return _utilities.apply_to_collection(output, Tensor, self.all_gather)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Return the checkpoint, which rank 0 reads and broadcasts to all ranks."""
        content = None
        if self.lab.is_main:
            content = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        return self.broadcast(content)
