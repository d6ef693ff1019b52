"""The task protocol: a model, its samples, and the loss of each sample.

    @dataclass
    class Lines(Task):
        width: int = 64                        # an option, --width

        def model(self): ...                   # nn.Module
        def data(self, held_out): ...          # len(), [index]
        def losses(self, net, batch): ...      # [n], per sample, summed over tokens or pixels

``--task FILE.py`` takes the one class in a file that is derived from Task; see
examples/my_task.py. Neither this module nor the built-in tasks import torch when they are
imported: ``-h`` imports them only to list a task's fields as options.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from motley.config.option import Duration
from motley.errors import MotleyError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from motley.data.source import Samples, Source, Tensors

LABEL, PREDICTED = "label", "predicted"  # scores that are counted, and not averaged
Net = Callable[..., Any]  # the model; it computes in the rank's precision, and returns fp32


class Task:
    """A model, its data and its loss, as a user defines them.

    A subclass is a dataclass. Its fields are options of the command line: ``digits: int = 2`` is
    ``--digits``. Each rank makes the task from the same options. A subclass defines :meth:`model`,
    :meth:`data` and :meth:`losses`. All other methods have defaults.

    Attributes:
        noun: name of one sample in messages.
        unit: plural noun that rates count, such as tokens.
        weight: weight of a usual sample, in units. A batch's summed losses are divided by this
            weight until the actual weights of the samples are known.
        grain: number of consecutive samples that depend on each other, such as the samples of one
            group of a batch norm. These samples stay on one rank. A micro-batch interleaves the
            samples of its G groups: row k * G + j is sample k of group j. If a smaller last batch
            leaves a shorter group, this group has a micro-batch of its own.
        grain_is: reason for the grain, and the option that sets the grain. An error message puts
            this text after "32 samples".
        block_classes: class names of the modules that are each sharded and recomputed as one unit.
            Empty: the members of the outermost lists of equal modules.
        compiles_whole: True: torch.compile compiles the loss as well as the blocks.
        fp32: modules that never compute in 16 bits, by path or by the path's last word.
        keeps: True: runs of the task write checkpoints.
        head_options: names of the options that determine the classes, and so the model's head.
        recipes: named sets of options. ``--recipe NAME`` selects a set, which is a text as on the
            command line. Options on the command line override a recipe.
        sometimes_unused: True: some parameters have no gradient in some steps, such as experts that
            no sample chose. Set this attribute if the check before training may not find these
            parameters.
        needs_workers: True: reading a sample takes longer than passing it between processes.
            Loader processes then read the samples.
        class_names: names of the classes by number; empty without classes. A run continues only
            with the same names. Exports and predictions contain them.
        usual: defaults that suit the task, by the name of an option, as a user types them.
        gathered: names of results of :meth:`scores` that are not averaged. Instead
            :meth:`compute_metrics` receives these results of all held-out samples.
        directions: ``min`` or ``max`` by the name of a metric: the better direction for
            ``--keep-best``. Usual names, such as loss and accuracy, need no entry.
        acts_every: interval at which :meth:`during_training` is called, in steps or as a Duration;
            None: never.
        acts_option: option that sets ``acts_every``, for errors.
        account: one line about the samples: how many were read, and how many were left out. May be
            empty.
        sample_list: text with a fingerprint of the list of samples. A continued run reports a
            change of this text.
    """

    noun: ClassVar[str] = "sample"
    unit: ClassVar[str] = "samples"
    weight: float = 1.0
    grain: int = 1
    grain_is: str = "stay together in this task, as its grain says"
    block_classes: ClassVar[tuple[str, ...]] = ()
    compiles_whole: ClassVar[bool] = False
    fp32: ClassVar[tuple[str, ...]] = ()
    head_options: ClassVar[tuple[str, ...]] = ()
    recipes: ClassVar[Mapping[str, str]] = {}
    usual: ClassVar[Mapping[str, str]] = {}
    keeps: bool = True
    needs_workers: bool = True
    sometimes_unused: bool = False
    class_names: ClassVar[tuple[str, ...]] = ()
    gathered: ClassVar[tuple[str, ...]] = ()
    directions: ClassVar[Mapping[str, str]] = {}
    sample_list: ClassVar[str] = ""
    acts_every: ClassVar[int | Duration | None] = None
    acts_option: ClassVar[str] = ""
    account: ClassVar[str] = ""

    # -- to be written

    def model(self) -> "nn.Module":
        """Return the model, on the CPU.

        The caller has seeded torch's random numbers with ``--seed``.
        """
        raise NotImplementedError

    def data(self, held_out: bool) -> "Source":
        """Return the training data or the held-out data.

        The result is any object with ``len()`` and ``[index]``.

        Args:
            held_out: True: return the held-out data. False: return the training data.
        """
        raise NotImplementedError

    def losses(self, net: Net, batch: "Tensors") -> "Tensor":
        """Return the loss of each sample, [n]: the *sum* over its tokens or pixels, not the mean.

        Args:
            net: the model, which computes in the rank's precision and returns fp32.
            batch: tensors of :meth:`collate`, on the rank's device, with n >= 1 rows each.
        """
        raise NotImplementedError

    # -- may be written

    def check_options(self) -> None:
        """Raise MotleyError if options of the task contradict each other.

        A run that continues checks them after the options of the checkpoint have replaced those
        that the user did not type. ``__post_init__`` would be too early.
        """

    def held_out_sets(self) -> "Mapping[str, Source]":
        """Return additional held-out data sets by name, in the form of :meth:`data`.

        Each evaluation includes these data sets. Their metrics are recorded as ``NAME/METRIC``.
        """
        return {}

    def prepare(self) -> None:
        """Download or unpack missing data. One rank of each host calls this method."""

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """Return the tensors of one item of :meth:`data`, by name.

        Args:
            item: the item.
            training: True: the item may be augmented. Torch's random numbers are seeded by sample
                and epoch, so that they are the same on any rank.
        """
        result: Mapping[str, Any] = item
        return result

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> "Tensors":
        """Return a batch of samples: tensors by name, with one row for each sample.

        By default, the tensors of the samples are stacked. Override the method to pad tensors of
        different shapes.
        """
        from torch.utils.data import default_collate

        try:
            return dict(default_collate(list(samples)))
        except (RuntimeError, TypeError) as error:
            if "Too many open files" in str(error):
                raise  # the host's limit is the cause, not the samples
            raise MotleyError(
                f"samples of {type(self).__name__} cannot be stacked: "
                f"{str(error).splitlines()[0]}; write collate(), which pads them to one shape"
            ) from None

    def on(self, device: "torch.device") -> "Samples":
        """Return the object that reads samples for a rank with this device.

        The object is this task, or a copy of it that moves a part of :meth:`sample` to the device.
        Both read the same samples.
        """
        return self

    def complete(self, batch: "Tensors") -> "Tensors":
        """Return a batch on the rank's device with everything that :meth:`losses` needs.

        This method does the work that :meth:`collate` has left to the device.
        """
        return batch

    def weights(self, batch: "Tensors") -> "Tensor | None":
        """Return the weight of each sample in the mean loss, [n], on the CPU.

        A weight is for example the number of tokens. None: each sample has the weight ``weight``.
        """
        return None

    @property
    def has_weights(self) -> bool:
        """True if samples may differ in weight. A sample must be read to find its weight."""
        return type(self).weights is not Task.weights

    def balanced_classes(self) -> Sequence[int] | None:
        """Return the class of each training sample if epochs are to be balanced, else None.

        A balanced epoch has equally many samples of each class. The samples of a class are repeated
        or left out as evenly as possible. None: an epoch has each sample once.
        """
        return None

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """Return the relative compute time of training samples.

        The split of a batch gives a rank of twice the speed samples of twice the total time. None:
        all samples take the same time.

        Args:
            indices: indices of the samples in the training data.
        """
        return None

    def scores(self, net: Net, batch: "Tensors") -> "Mapping[str, Tensor]":
        """Return the scores of held-out samples by name, [n] each.

        A score is summed over the tokens or pixels of its sample. One of the scores is ``loss``.
        The scores ``label`` and ``predicted``, int64 [n] each, are optional. They are the true and
        the predicted class of each sample, and are counted instead of averaged. The last evaluation
        then writes ``classes.csv`` and ``confusion.csv``. A score that ``gathered`` names may have
        rows of any shape, [n, ...], or be a list of n values such as texts.
        """
        return {"loss": self.losses(net, batch)}

    def compute_metrics(self, gathered: Mapping[str, Any]) -> Mapping[str, float]:
        """Return metrics that are not means over the held-out samples, such as AUROC.

        Rank 0 calls this method after each evaluation, on the CPU. The metrics are recorded beside
        those of :meth:`summary`.

        Args:
            gathered: the results of :meth:`scores` that ``gathered`` names, for each sample once,
                in the order of the samples. Each is a tensor [samples, ...], or a list if its rows
                differ in shape or are not tensors.
        """
        return {}

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics that an evaluation records.

        Args:
            means: for each score of :meth:`scores`, its sum over all samples, divided by the total
                weight of the samples.
        """
        return means

    def words(self, metrics: Mapping[str, float]) -> str:
        """Return the metrics of :meth:`summary` as a text for the progress line."""
        return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())

    def optimizer(self, groups: list[dict[str, Any]]) -> "torch.optim.Optimizer":
        """Return the optimizer that replaces the one of ``--opt``.

        Args:
            groups: groups of parameters with and without weight decay, each with ``params``, ``lr``
                and ``weight_decay`` from the options.
        """
        raise NotImplementedError

    def schedule(self, step: float, total: int) -> float:
        """Return the factor on ``--lr`` in a step. The factor replaces the schedule of ``--sched``.

        Args:
            step: number of steps before this step. After a change of the batch size, the number may
                be a fraction.
            total: number of steps of the whole schedule.
        """
        raise NotImplementedError

    def after_evaluation(self, net: "nn.Module", folder: Path) -> None:
        """Use the model after an evaluation, for example to write pictures. Rank 0 calls it.

        The other ranks wait meanwhile. The method must not change the model.

        Args:
            net: the network, in evaluation mode and without gradients.
            folder: the run's folder.
        """

    def during_training(self, net: "nn.Module", folder: Path, step: int) -> str:
        """Use the model between two steps, and return a text for the log. Rank 0 calls it.

        The other ranks wait meanwhile. The method must not change the model.

        Args:
            net: the network, in evaluation mode and without gradients.
            folder: the run's folder.
            step: number of finished steps.
        """
        raise NotImplementedError

    def predict(self, net: Net, batch: "Tensors") -> Mapping[str, Sequence[Any]]:
        """Return predictions as the columns of a table by name, with one row per sample."""
        return {
            name: values if isinstance(values, list) else values.tolist()
            for name, values in self.scores(net, batch).items()
        }

    def pictures(self, batch: "Tensors") -> "Tensor | None":
        """Return pictures of the samples for the report, uint8 [n, channels, height, width].

        None: the samples have no pictures.

        Args:
            batch: a batch of held-out samples.
        """
        return None

    def describe_scores(self, scores: "Mapping[str, Tensor]") -> Mapping[str, Any]:
        """Return values by name that the report shows for a held-out sample with a large loss.

        Args:
            scores: the sample's row of each tensor of :meth:`scores`.
        """
        result = dict[str, Any]()
        for name in (LABEL, PREDICTED):
            if name in scores:
                number = int(scores[name])
                result[name] = self.class_names[number] if self.class_names else number
        return result

    def blocks(self, net: "nn.Module") -> "dict[str, nn.Module]":
        """Return the blocks of the model by name, in order.

        An engine shards each block as one unit. With ``--grad-checkpointing``, each block is
        recomputed as one unit.
        """
        from motley.tasks.net import find_blocks

        return find_blocks(net, self.block_classes)

    def head(self, net: "nn.Module") -> tuple[str, ...]:
        """Return the names of the modules whose shape depends on the data.

        An example is a classifier's head. These modules get new random weights if a run starts with
        weights that were trained on other data.
        """
        return ()

    def pretrained_weights(self) -> "tuple[dict[str, Tensor], str] | None":
        """Return the initial weights of a new run by name, and a description of their source.

        Return None for random weights. Rank 0 calls this method and broadcasts the weights.
        """
        return None

    @property
    def begins_with_weights(self) -> bool:
        """True if a subclass overrides :meth:`pretrained_weights`, which may still return None."""
        return type(self).pretrained_weights is not Task.pretrained_weights

    def adapt(self, tensors: "dict[str, Tensor]", net: "nn.Module") -> "dict[str, Tensor]":
        """Convert weights of another program to the names and shapes of ``net``."""
        return tensors

    def save(self, net: "nn.Module", folder: Path) -> None:
        """Write a trained model into a folder, in the format that other programs load."""
        from safetensors.torch import save_file

        # Tied weights are written under each name, so a loader need not know of the tie.
        tensors = {name: value.contiguous().clone() for name, value in net.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")

    def identity(self) -> dict[str, Any]:
        """Return values that must be equal in a run and in the checkpoint that it continues.

        Options are compared separately. The values must be of types that JSON can represent.
        """
        return {}

    def name_of(self, source: "Source", index: int) -> str:
        """Return the name of a sample for an error message."""
        return f"{self.noun} {index}"

    def with_files(self, folder: Path) -> "Task":
        """Return the task with the files below a folder as its held-out samples."""
        raise MotleyError(
            f"{type(self).__name__} does not read files of a user; leave out --images"
        )

    def with_rows(self, rows: "Sequence[Mapping[str, Any]]") -> "Task":
        """Return the task with these rows of a table as its held-out samples.

        Args:
            rows: values by column. Values of a CSV file are texts.
        """
        raise MotleyError(
            f"the task {type(self).__name__} does not read rows of a table; define "
            "with_rows(rows) in it, as docs/your_model.md shows"
        )

    def noise(self, example: "Tensors", count: int) -> "Tensors":
        """Return a batch of ``count`` samples for timing, which repeats the rows of ``example``."""
        import torch

        rows = torch.arange(count) % len(next(iter(example.values())))
        return {name: tensor[rows.to(tensor.device)] for name, tensor in example.items()}

    def title(self) -> str:
        """Return one line that describes the task."""
        return f"task {type(self).__name__}"


def acts_after_evaluation(task: Task) -> bool:
    """Return True if a task overrides :meth:`Task.after_evaluation`."""
    return type(task).after_evaluation is not Task.after_evaluation


def name_action(task: Task) -> str:
    """Return the name of the task's method, or of its option, that uses the model during training.

    The result is empty if the task does not use the model during training. Errors contain the name.
    """
    if task.acts_every is not None:
        return task.acts_option or f"during_training() of {type(task).__name__}"
    return f"after_evaluation() of {type(task).__name__}" if acts_after_evaluation(task) else ""


def is_in(name: str, parts: Iterable[str]) -> bool:
    """Return True if the path of a parameter is in ``parts``, or below a path in ``parts``."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)
