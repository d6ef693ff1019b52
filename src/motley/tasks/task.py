"""What is learnt: a model, its samples, and what each of them costs. Motley does the rest.

    @dataclass
    class Lines(Task):
        width: int = 64                        # an option, --width

        def model(self): ...                   # nn.Module
        def data(self, held_out): ...          # len(), [index]
        def losses(self, net, batch): ...      # [n], of each sample, summed over what is averaged

``--task FILE.py`` takes the one such class in a file; see examples/my_task.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import default_collate

from motley.data.source import Samples, Source, Tensors
from motley.errors import MotleyError
from motley.tasks.blocks import find_blocks

Net = Callable[..., Any]  # the model; it computes in the rank's precision, and gives fp32


class Task:
    """What is learnt. A subclass is a dataclass, whose fields are options of the same names; each
    rank makes one of its own from the same options.

    Attributes:
        noun: what a sample is called. unit: what a rate counts.
        weight: of a usual sample, in these: what the mean over a batch is divided by, before the
            true weights are known.
        grain: consecutive samples of the global order that depend on each other (batch norm takes
            its statistics over them), and therefore stay together. A micro-batch of G groups has
            them interleaved: row k * G + j is sample k of group j. What is left of a ragged last
            batch is a shorter group, in a micro-batch of its own.
        grain_is: why they do, behind "32 samples", and which option decides it.
        block_classes: names of classes of modules that are sharded and recomputed as one; empty:
            those of the longest lists of equal modules.
        compiles_whole: torch.compile takes the loss too, and not the blocks alone: what is between
            them, as a language model's logits, is worth it.
        fp32: modules, by path or by its last word, that never compute in 16 bits.
        keeps: a run is worth checkpoints; not where there is nothing to learn.
        head_options: names of options that decide what the head tells apart.
        recipes: options by a name that ``--recipe`` takes, as a user would write them; what he does
            write comes after them.
        sometimes_unused: some parameters have no gradient in some steps, as experts that no sample
            chose, though the first samples do not show it.
        needs_workers: reading a sample takes longer than asking another process to.
        class_names: of the classes by their number; empty where there are none. A run is continued
            with the same names alone, and exports and predictions have them.
        account: one line of what was read and what was left out; empty where nothing is to be said.
        sample_list: tells one list of samples from another, in words. A continued run names a
            change.
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
    keeps: bool = True
    needs_workers: bool = True
    sometimes_unused: bool = False
    class_names: ClassVar[tuple[str, ...]] = ()
    sample_list: ClassVar[str] = ""
    account: ClassVar[str] = ""

    # -- to be written

    def model(self) -> nn.Module:
        """The model, on the CPU; torch's random numbers are seeded by ``--seed``."""
        raise NotImplementedError

    def data(self, held_out: bool) -> Source:
        """Training samples, or held-out ones."""
        raise NotImplementedError

    def losses(self, net: Net, batch: Tensors) -> Tensor:
        """What is minimised, [n]: of each sample, *summed* over all that counts in it.

        Args:
            net: the model; it computes in the rank's precision, and gives fp32.
            batch: of :meth:`collate`, on the rank's device; n is 1 or more.
        """
        raise NotImplementedError

    # -- may be written

    def prepare(self) -> None:
        """Fetch and unpack what is missing; called on one rank a machine."""

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """What the model gets of an item of :meth:`data`: tensors by name. In training torch's
        random numbers are seeded for this sample and epoch, whoever computes it."""
        found: Mapping[str, Any] = item
        return found

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Tensors:
        """One batch of samples, each tensor with a row a sample: stacked, or padded."""
        try:
            return dict(default_collate(list(samples)))
        except (RuntimeError, TypeError) as error:
            if "Too many open files" in str(error):
                raise  # of the host, not of the samples
            raise MotleyError(
                f"samples of {type(self).__name__} cannot be stacked: "
                f"{str(error).splitlines()[0]}; write collate(), which fills them up"
            ) from None

    def on(self, device: torch.device) -> Samples:
        """Return the samples as a rank with this device reads them: this task, unless the device
        does a part of :meth:`sample` better than the host. The samples stay the same."""
        return self

    def complete(self, batch: Tensors) -> Tensors:
        """Return a batch on the rank's device with all that :meth:`losses` needs; a task whose
        :meth:`collate` leaves work to the device does that work here."""
        return batch

    def weights(self, batch: Tensors) -> Tensor | None:
        """What each sample counts in the mean, [n], as its tokens; on the CPU. None: ``weight``."""
        return None

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """Time that training samples take, in proportion: a global batch is cut so that nobody
        waits for who has the long ones. None: all the same."""
        return None

    def scores(self, net: Net, batch: Tensors) -> Mapping[str, Tensor]:
        """Of held-out samples: sums over each, [n] by name; ``loss`` is among them."""
        return {"loss": self.losses(net, batch)}

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """What is recorded of an evaluation.

        Args:
            means: of :meth:`scores`, each divided by the weight of all samples.
        """
        return means

    def words(self, metrics: Mapping[str, float]) -> str:
        """What is said of an evaluation, of :meth:`summary`."""
        return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())

    def predict(self, net: Net, batch: Tensors) -> Mapping[str, Sequence[Any]]:
        """What the model says of samples, for a table: columns by name, with a row a sample."""
        return {name: values.tolist() for name, values in self.scores(net, batch).items()}

    def blocks(self, net: nn.Module) -> dict[str, nn.Module]:
        """Modules that are sharded and recomputed as one, by name, in order."""
        return find_blocks(net, self.block_classes)

    def head(self, net: nn.Module) -> tuple[str, ...]:
        """Names of the parts whose shape the data decides, as the classes do: they are made anew
        where a run begins with weights of other data."""
        return ()

    def pretrained_weights(self) -> tuple[dict[str, Tensor], str] | None:
        """Weights by name that a new run begins with, and where they are from; None: random ones.
        One rank asks, and gives them to the others."""
        return None

    @property
    def begins_with_weights(self) -> bool:
        """Whether :meth:`pretrained_weights` gives some; where it is written, it may."""
        return type(self).pretrained_weights is not Task.pretrained_weights

    def adapt(self, tensors: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
        """Weights from elsewhere, by the names and in the shapes of ``net``."""
        return tensors

    def save(self, net: nn.Module, folder: Path) -> None:
        """Write a trained model into a folder, as others load it."""
        # Tied ones under each name: whoever loads it need not know.
        tensors = {name: value.contiguous().clone() for name, value in net.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")

    def identity(self) -> dict[str, Any]:
        """What a checkpoint and a run that goes on from it must agree on besides options; JSON."""
        return {}

    def name_of(self, source: Source, index: int) -> str:
        """How to call a sample in an error."""
        return f"{self.noun} {index}"

    def with_files(self, folder: Path) -> "Task":
        """The same, but its held-out samples are all those under a folder, to be predicted."""
        raise MotleyError(f"{type(self).__name__} takes no files of your own; leave out --images")

    def noise(self, example: Tensors, count: int) -> Tensors:
        """A batch to time a device with, on its device: samples again and again."""
        rows = torch.arange(count) % len(next(iter(example.values())))
        return {name: tensor[rows.to(tensor.device)] for name, tensor in example.items()}

    def title(self) -> str:
        """One line of what is trained."""
        return f"task {type(self).__name__}"


def weighs(task: Task) -> bool:
    """Whether samples may count differently; else the weight of a batch is known before it."""
    return type(task).weights is not Task.weights


def is_in(name: str, parts: Iterable[str]) -> bool:
    """Whether a parameter is one of ``parts``, or in one of them; all by path."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)
