"""The Trainer of transformers on all ranks, with the result of one process.

A script imports this Trainer in place of the Trainer of transformers, and calls ``motley.join()``
before it makes the arguments. The global batch is ``per_device_train_batch_size`` times the number
of ranks, as with torchrun, so the arguments need no change. Each rank computes its share of the
global batch::

    lab = motley.join()
    trainer = Trainer(model=model, args=TrainingArguments(...), train_dataset=rows)

For trl: ``class MotleySFT(MotleyTrainerMixin, SFTTrainer): pass``.

Accelerate sees one process (``Lab.accelerate``), and Motley computes the gradient.
DistributedDataParallel is not used, because it averages over ranks, and requires the same number of
backward passes on every rank. Labels are counted over the whole step on all ranks, for any value of
``average_tokens_across_devices``, and losses are added up. The result is exact for any shares, for
gradient accumulation, and for a smaller last batch.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from motley.errors import MotleyError
from motley.library.integrations.accelerate_rows import skip_first_batches
from motley.library.integrations.framework_loader import get_lab
from motley.library.integrations.trainer_parts import TrainerParts, check_trainer
from motley.library.loop_shares import Piece
from motley.library.sample_order import kept_random_state
from motley.registry import import_extra

transformers = import_extra("transformers", "motley's Trainer", "transformers[torch]")
transformers.trainer.skip_first_batches = skip_first_batches  # this one supports the lab's loaders
_Trainer: Any = transformers.Trainer
_TOLERANCE = 0.1  # in the ratio of two losses, because bf16 rounds them


class GlobalBatch(dict[str, Any]):
    """This rank's rows of a global batch. The rank computes the rows in one or more parts, pieces.

    The dictionary has the rows of the first piece. ``pieces`` lists every piece with its rows.
    """

    def __init__(self, pieces: list[tuple[Piece, Any]]) -> None:
        super().__init__(pieces[0][1])
        self.pieces = pieces


class MotleyTrainerMixin(TrainerParts):
    """The methods that let a Trainer, or a subclass of Trainer, train on all ranks."""

    _counted = False  # True if the labels of the present batch were counted
    # True if the loss is a sum divided by the number of labels that the Trainer passes to the
    # model; False if the loss ignores this number, and is a mean over labels; None: not known yet.
    _divides: bool | None = None
    _label_parts: Mapping[Piece, float] = {}  # each piece's fraction of its global batch's labels

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        self.lab = get_lab(type(self).__name__)
        super().__init__(*args, **options)
        self._train_batch_size *= self.lab.size
        if self.lab._loop is not None:
            check_trainer(self)
            self.lab._loop.end_without("trainer.train(resume_from_checkpoint=True) continues")

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Make the Accelerator, and let it train on all ranks; see ``Lab.accelerate``."""
        super().create_accelerator_and_postprocess()
        if self.lab._loop is not None:
            self.lab.accelerate(self.accelerator)
            self.args.__dict__["_setup_devices"] = self.lab.device
            self.args._n_gpu = int(self.lab.device.type == "cuda")

    def _prepare_for_training(self: Any, max_steps: int, loader: Any, resumed: Any) -> Any:
        if self.lab._loop is not None:
            loader = self.accelerator.prepare_data_loader(
                loader
            )  # the user may have overridden the method that made it
            loader.train = loader.reads_ahead = True
        return super()._prepare_for_training(max_steps, loader, resumed)

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Read this rank's rows of the global batches of one step, and count the labels."""
        if self.lab._loop is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches: list[GlobalBatch] = []
        while len(batches) < num_batches:
            pieces = []
            for piece, rows in epoch_iterator:
                pieces.append((piece, rows))
                if piece.last:
                    break
            if not pieces:
                break
            batches.append(GlobalBatch(pieces))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self: Any, batches: list[Any], device: Any) -> Any:
        """Return the number of labels on all ranks, or None if the loss is a mean over rows."""
        if self.lab._loop is None or not batches:
            return super()._get_num_items_in_batch(batches, device)
        pairs = [
            pair for batch in batches
            for pair in getattr(batch, "pieces", [(self.accelerator.piece, batch)])
        ]  # fmt: skip
        own = [rows for piece, rows in pairs if piece.rows]
        count_labels = super()._get_num_items_in_batch
        count = count_labels(own or [pairs[0][1]], device)
        self._counted = count is not None
        if not self._counted:
            return None
        total = self.lab.reduce(count if own else count * 0)
        scales = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if scales and self.loss_is_scaled_for_ga is None:
            if self._divides is None:
                self._divides = self._try_loss(pairs[0][1], total)
            if self._divides is False:
                counts = {piece: int(count_labels([rows], device)) for piece, rows in pairs}
                self._label_parts = self._divide_labels(counts)
        return total

    def _divide_labels(self: Any, counts: Mapping[Piece, int]) -> dict[Piece, float]:
        """Return, for each piece (part of a batch), its fraction of the labels of the global batch.

        All ranks call this method.
        """
        steps = sorted({piece.step for piece in counts})
        own = [
            sum(count for piece, count in counts.items() if piece.step == step and piece.rows)
            for step in steps
        ]
        totals = dict(zip(steps, self.lab.reduce(own), strict=True))
        return {piece: count / max(1, totals[piece.step]) for piece, count in counts.items()}

    def _try_loss(self: Any, rows: Any, count: Any) -> bool | None:
        """Return True if the model divides its loss by the number of labels; all ranks call it.

        Many models accept ``num_items_in_batch`` and ignore it, such as models that classify
        sequences. This method therefore computes the loss with ``count`` and with twice ``count``,
        and compares the two. None: the losses are 0 or not finite on all ranks.
        """
        inputs = self._prepare_inputs(dict(rows))
        losses = []
        for number in (count, count * 2):
            gpus = [self.lab.device.index or 0] if self.lab.device.type == "cuda" else []
            with (
                torch.no_grad(), kept_random_state(), torch.random.fork_rng(gpus),
                self.compute_loss_context_manager(),
            ):  # fmt: skip
                loss = _Trainer.compute_loss(
                    self, self.model, dict(inputs), num_items_in_batch=number
                )
            losses.append(float(loss))
        ratio = losses[0] / losses[1] if losses[1] else math.nan
        found = next((each for each in self.lab._loop.gather_objects(ratio) if each == each), None)
        if found is None:
            return None
        if min(abs(found - 1), abs(found - 2)) > _TOLERANCE:
            raise MotleyError(
                f"the loss of {type(self.model).__name__} is neither a mean over labels nor a sum "
                "divided by num_items_in_batch, so Motley cannot add up the losses of the ranks: "
                "write a compute_loss that returns a mean over rows, and `loss_is_scaled_for_ga = "
                "False` in its class"
            )
        return bool(abs(found - 2) < _TOLERANCE)

    def _is_sum(self: Any) -> bool:
        """Return True if the loss of the global batch is the sum of the losses of all ranks."""
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return bool(scaled and self._counted)

    def _get_part(self: Any, loss: Tensor, piece: Piece) -> Tensor:
        """Return the number that this rank adds to the loss of the global batch."""
        if not piece.rows:
            return torch.zeros_like(loss)
        part: float = piece.rows / piece.global_rows
        return loss * (self._get_label_part(piece) if self._is_sum() else part)

    def _get_label_part(self: Any, piece: Piece) -> float:
        """Return the factor on this rank's loss that makes all losses add up to the global loss.

        The factor is 1 if the model divides its loss by the number of labels.
        """
        return 1.0 if self._divides is not False else self._label_parts[piece]

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Compute this rank's rows of a global batch. Return its part of the loss."""
        if self.lab._loop is None:
            return super().training_step(model, inputs, num_items_in_batch)
        backward = partial(type(self.accelerator).backward, self.accelerator)
        reduction = "sum" if self._is_sum() else "mean"

        def scaled(loss: Tensor, **options: Any) -> None:
            backward(loss * self._get_label_part(piece), reduction=reduction, **options)

        self.accelerator.backward = scaled if reduction == "sum" else backward
        total = torch.zeros((), device=self.lab.device)
        for piece, rows in inputs.pieces:
            self.lab._loop.gate.end_piece()  # ends the previous piece
            self.lab._loop.begin_piece(piece)
            total += self._get_part(super().training_step(model, rows, num_items_in_batch), piece)
        return total

    def _maybe_log_save_evaluate(self: Any, tr_loss: Tensor, *args: Any, **options: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            tr_loss.copy_(self.lab.reduce(tr_loss))
        super()._maybe_log_save_evaluate(tr_loss, *args, **options)

    def _finalize_training(self: Any, *args: Any) -> Any:
        self._tr_loss = self.lab.reduce(self._tr_loss)
        return super()._finalize_training(*args)


class Trainer(MotleyTrainerMixin, _Trainer):  # type: ignore[misc]
    """The Trainer of transformers on all ranks, with the same arguments and results."""
