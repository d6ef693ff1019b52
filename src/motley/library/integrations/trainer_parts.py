"""The parts of a Trainer besides its steps: evaluation, checkpoints, and checks of its options."""

from typing import Any

from motley.engines.gradient_sum import broadcast
from motley.errors import MotleyError
from motley.library.integrations.framework_loader import check_folder
from motley.library.lab import Lab

_Base: Any = object  # the methods of transformers.Trainer


class TrainerParts(_Base):  # type: ignore[misc]
    """The methods of a Trainer that evaluate, predict, save and load, on all ranks."""

    lab: Lab

    # -- evaluation

    def _get_dataloader(self: Any, *args: Any, **options: Any) -> Any:
        if not options.get("is_training"):
            options["batch_size"] *= self.lab.size
        return super()._get_dataloader(*args, **options)

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        """Return the loss of the inputs.

        For held-out data without ``num_items_in_batch``, this method counts the labels itself.
        """
        loop = self.lab._loop
        in_training = loop is None or loop.piece is self.accelerator.piece
        if num_items_in_batch is None and not in_training:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self: Any, *args: Any, **options: Any) -> Any:
        """Return the loss of the global batch, and the logits and labels of this rank's rows."""
        loss, logits, labels = super().prediction_step(*args, **options)
        if loss is not None and self.lab._loop is not None:
            total = self.lab.reduce(self._get_part(loss, self.accelerator.piece))
            loss = total.expand(self.lab.size)  # transformers makes it one entry per row
        return loss, logits, labels

    # -- checkpoints

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train on all ranks, from a checkpoint if one is given.

        Raises:
            MotleyError: a rank cannot read the checkpoint to resume from.
        """
        if resume_from_checkpoint and self.lab._loop is not None:
            is_path = resume_from_checkpoint is not True
            check_folder(
                self.lab._loop, resume_from_checkpoint if is_path else self.args.output_dir
            )
        return super().train(resume_from_checkpoint, *args, **options)

    def _run_epoch(self: Any, **given: Any) -> None:
        if given["resume_from_checkpoint"] and given["epoch"] == given["epochs_trained"]:
            batches = given["epoch"] * len(given["train_dataloader"])
            self.lab._position.step = batches + given["steps_trained_in_current_epoch"]
        super()._run_epoch(**given)

    def _save_rng_state(self: Any, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _save_checkpoint(self: Any, *args: Any) -> None:
        super()._save_checkpoint(*args)
        if self.lab._loop is not None:
            best = self.lab._loop.gather_objects(
                self.state.best_model_checkpoint
            )  # rank 0 has saved before it gathers
            self.state.best_model_checkpoint = best[0]

    def _load_best_model(self: Any) -> None:
        if self.lab.is_main:
            super()._load_best_model()
        if self.lab._loop is not None:
            broadcast([*self.model.parameters(), *self.model.buffers()])


def check_trainer(trainer: Any) -> None:
    """Raise MotleyError if an option or a method of a Trainer prevents exact results.

    The result would depend on the number of rows that each rank computes.
    """
    kind, args = type(trainer), trainer.args
    config = getattr(trainer.model, "config", None)
    if args.auto_find_batch_size:
        raise MotleyError(
            "auto_find_batch_size halves the batch of one rank alone after an out-of-memory error: "
            "remove it, and limit the rows of a pass with motley.join(micro_batch=4)"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise MotleyError(
            "train_sampling_strategy='batch_rebalance' gives all ranks equal parts, and Motley's "
            "parts are unequal: write train_sampling_strategy='group_by_length'"
        )
    if getattr(config, "output_router_logits", False):
        raise MotleyError(
            f"{type(trainer.model).__name__} balances its experts over the rows of one rank, so "
            "the loss depends on the shares: write model.config.output_router_logits = False"
        )
    owners = [each for each in kind.__mro__ if "compute_loss" in vars(each)]
    owner = next(each for each in owners if not each.__module__.startswith("motley."))
    is_known = owner.__module__.startswith(("transformers.", "trl."))
    if not is_known and trainer.loss_is_scaled_for_ga is None:
        raise MotleyError(
            f"{owner.__name__}.compute_loss returns either a mean over rows or a sum divided by "
            "num_items_in_batch, and Motley cannot find out which: write `loss_is_scaled_for_ga = "
            f"False` in the class {owner.__name__} for a mean, or True for such a sum"
        )
