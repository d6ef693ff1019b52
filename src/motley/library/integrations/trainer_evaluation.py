"""Evaluation and prediction of a Trainer, whose results are those of whole global batches."""

from typing import Any

from motley.library.lab import Lab

_Base: Any = object  # the methods of transformers.Trainer


class TrainerEvaluation(_Base):  # type: ignore[misc]
    """The methods of a Trainer that evaluate and predict, for all ranks of the lab."""

    lab: Lab

    def _get_dataloader(self: Any, *args: Any, **options: Any) -> Any:
        if not options.get("is_training"):
            options["batch_size"] *= self.lab.size
        return super()._get_dataloader(*args, **options)

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        """Return the loss; held-out labels are counted here if the caller has not done so."""
        in_training = self.lab._session is None or self.lab._piece is self.accelerator.piece
        if num_items_in_batch is None and not in_training:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self: Any, *args: Any, **options: Any) -> Any:
        """Return the loss of the global batch, and this rank's results."""
        loss, logits, labels = super().prediction_step(*args, **options)
        if loss is not None and self.lab._session is not None:
            total = self.lab.reduce(self._get_part(loss, self.accelerator.piece))
            loss = total.expand(self.lab.size)  # of which transformers makes one entry per row
        return loss, logits, labels
