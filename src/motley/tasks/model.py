"""A module that holds a task's network and its loss, and its compilation by torch.compile.

All engines train this module, so one rule for dtypes holds for all engines. The module is compiled
block by block, or as a whole, including the loss.

Blocks of one class are compiled once, whatever their number. The compile time of a ViT-B falls to a
third of that of the whole model, and the compiled model is as fast. Gradients can be sent as soon
as a block's backward pass ends. The parts around the blocks, such as a ViT's patch embedding, last
norm and head, take 1 % of a step.

All dimensions of a shape are fixed except the first, which counts samples. A batch of another size
therefore causes no recompilation. Convolutions are the exception: torch's kernels around them are
slower for a variable number of samples than for a fixed one, by a fifth for a ResNet-50. A network
with convolutions is compiled separately for each number of samples in a plan.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from motley.data.source import Tensors, first_batch
from motley.errors import MotleyError
from motley.tasks.build import BlockByBlock
from motley.tasks.ghost_batch_norm import GroupStatistics, batch_norms, keep_frozen
from motley.tasks.net import is_recomputed, keep_fp32, parts_around
from motley.tasks.task import LABEL, PREDICTED, Task
from motley.tasks.worst import WorstSamples

Compute = Callable[..., Any]

_MOST = 64  # compiled versions of one function: stages and evaluations need their own
_READS = 16  # tensors that one kernel may read; with torch's 8, batch norm writes fp32 gradients
_RARE = 2  # unplanned sizes in a row that run uncompiled: last batches of an epoch or evaluation


class _Way(Enum):
    """The code that computes a forward pass: plain code, or one of two compiled versions."""

    PLAIN = 0
    ONE_COUNT = 1  # compiled for its number of samples
    ANY_COUNT = 2


class Compiled:
    """The compiled parts of a model. Each part is compiled at its first call.

    :meth:`undo` restores the plain, uncompiled parts.

    Args:
        whole: module whose methods ``names`` are compiled if ``blocks`` is empty.
        names: names of these methods.
        blocks: blocks whose ``forward`` is compiled, instead of the methods of ``whole``.
        around: modules whose ``forward`` is compiled beside the blocks. A call with an argument
            that is not a tensor runs uncompiled.
        counts: numbers of samples for which separate versions are compiled. A pass over another
            number of samples runs uncompiled, unless several passes with other numbers follow one
            another. Empty: compile one version for any number of samples.
    """

    def __init__(
        self,
        whole: nn.Module,
        names: Iterable[str],
        blocks: Iterable[nn.Module],
        around: Iterable[nn.Module],
        counts: Collection[int] = (),
    ) -> None:
        torch._dynamo.config.suppress_errors = True  # code that cannot be compiled runs uncompiled
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST)
        if counts:
            torch._inductor.config.realize_acc_reads_threshold = _READS
        self._before: list[tuple[nn.Module, str, Compute | None]] = []
        self._counts, self._others, self._way = frozenset(counts), 0, _Way.ANY_COUNT
        blocks = list(blocks)
        if not blocks:
            for name in names:
                self._put(whole, name, self._compile(getattr(whole, name)))
            return
        for module in blocks:
            self._put(module, "forward", self._of_one_size(module.forward))
        for module in around:
            plain = module.forward
            self._put(module, "forward", _of_tensors(self._of_one_size(plain), plain))

    def begin_pass(self, samples: int) -> None:
        """Choose between the plain and the compiled code for the next forward pass.

        Args:
            samples: number of samples in this pass.
        """
        if not self._counts:
            return
        if samples in self._counts:
            self._others, self._way = 0, _Way.ONE_COUNT
        else:
            self._others += 1
            self._way = _Way.PLAIN if self._others <= _RARE else _Way.ANY_COUNT

    def _put(self, module: nn.Module, name: str, compute: Compute) -> None:
        self._before.append((module, name, module.__dict__.get(name)))  # recompute() sets one, say
        module.__dict__[name] = compute

    def undo(self) -> None:
        """Restore the plain methods, and discard all compiled code."""
        for module, name, before in self._before:
            del module.__dict__[name]
            if before is not None:
                module.__dict__[name] = before
        torch._dynamo.reset()

    def _compile(self, plain: Compute) -> Compute:
        """Return a function that runs ``plain`` or a compiled version of it.

        :meth:`begin_pass` chooses which code runs.
        """
        fixed, free = torch.compile(plain, dynamic=False), torch.compile(plain)

        def computed(*given: Any, **named: Any) -> Any:
            if self._way is _Way.PLAIN:
                return plain(*given, **named)
            if self._way is _Way.ONE_COUNT:
                return fixed(*given, **named)
            _mark_counts((given, named))
            return free(*given, **named)

        return computed

    def _of_one_size(self, plain: Compute) -> Compute:
        """Return a function that is compiled for tensors of the sizes in its first call.

        Calls with tensors of other sizes run a version that is compiled for any size.

        Blocks of all stages run the same code. Torch compiles this code for a variable dimension if
        the dimension differs between two calls. For Swin's windows of any height and width, this
        compilation took minutes.
        """
        fixed, free = torch.compile(plain, dynamic=False), torch.compile(plain)
        first: list[list[torch.Size]] = []

        def computed(*given: Any, **named: Any) -> Any:
            if self._way is _Way.PLAIN:
                return plain(*given, **named)
            if self._way is _Way.ANY_COUNT:
                _mark_counts((given, named))
            sizes = [tensor.shape[1:] for tensor in _batched((given, named))]
            if not first:
                first.append(sizes)
            return (fixed if sizes == first[0] else free)(*given, **named)

        return computed


def _batched(given: Any) -> list[Tensor]:
    """Return all tensors with at least one dimension in nested arguments."""
    return [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.dim()]


def _mark_counts(given: Any) -> None:
    """Mark the first dimension of all tensors as dynamic for torch.compile."""
    for tensor in _batched(given):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _of_tensors(compute: Compute, plain: Compute) -> Compute:
    """Return a function that calls ``compute``, or ``plain`` if an argument is not a tensor.

    An argument that is not a tensor, such as the time of a forecast, is a constant for
    torch.compile. Torch would compile the module again for each new value of the argument.
    """

    def computed(*given: Any, **named: Any) -> Any:
        all_tensors = all(isinstance(each, Tensor) for each in (*given, *named.values()))
        return (compute if all_tensors else plain)(*given, **named)

    return computed


Gathered = dict[str, Any]  # tensors with a row for each sample, or lists of values, by name
GatheredRows = tuple[tuple[int, ...], Gathered]  # indices of samples, with their rows


def select_gathered(task: Task, scores: Mapping[str, Any], count: int) -> Gathered:
    """Return the scores of a batch that ``task.gathered`` names, on the CPU.

    Args:
        task: the task.
        scores: result of the task's :meth:`scores`.
        count: number of samples in the batch.

    Raises:
        MotleyError: the scores lack a name, or a score has another number of rows than ``count``.
    """
    result, name = dict[str, Any](), type(task).__name__
    for each in task.gathered:
        if each not in scores:
            raise MotleyError(
                f"{name}.gathered names {each!r}, but scores() returns only {', '.join(scores)}; "
                f"return {each!r} too, or remove it from gathered"
            )
        value = scores[each]
        rows = len(value) if not isinstance(value, Tensor) or value.dim() else None
        if rows != count:
            raise MotleyError(
                f"scores() of {name} returns {each!r} with {'no' if rows is None else rows} rows "
                f"for {count} samples; return one row for each sample"
            )
        result[each] = value.detach().cpu() if isinstance(value, Tensor) else list(value)
    return result


def compute_metrics(task: Task, gathered: Gathered) -> dict[str, float]:
    """Return the metrics that a task computes from gathered scores, as floats.

    Raises:
        MotleyError: the task's method raises an error, or does not return numbers by name.
    """
    name = f"compute_metrics() of {type(task).__name__}"
    try:
        metrics = task.compute_metrics(gathered)
    except MotleyError:
        raise
    except Exception as error:
        raise MotleyError(f"{name} raises {type(error).__name__}: {error}") from error
    if not isinstance(metrics, Mapping):
        raise MotleyError(
            f"{name} returns a {type(metrics).__name__}; return a dictionary of numbers by name, "
            'as in {"auroc": 0.9}'
        )
    try:
        return {str(each): float(value) for each, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise MotleyError(f"{name} returns a value that is not a number: {error}") from None


AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_EXAMPLES = 2  # samples with which a model is checked and timed


def common_type(task: Task, precisions: Collection[str]) -> torch.dtype | None:
    """Return the 16-bit dtype in which parameters may be gathered, or None.

    The result is a dtype only if all ranks compute in this dtype and the task keeps no part of the
    model in fp32.
    """
    first, *others = set(precisions)
    return None if others or task.fp32 else AUTOCAST[first]


class _Idle(torch.autograd.Function):
    """Autograd function of a pass without samples: no losses, and a zero gradient per parameter.

    A rank without samples must still take part in every collective. Its parameters therefore need
    gradients, and their hooks must fire. An empty batch through the network would have the same
    effect, but costs more, and every task would have to support an empty batch. On CUDA, torch
    2.11's attention returns None for an empty batch in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        """Return an empty tensor, fp32 [0]: the losses of a pass without samples."""
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return a gradient of zeros for each parameter."""
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class TaskModel(nn.Module):
    """A module that takes samples and returns the loss of each sample.

    The task's loss and autocast are inside. Autocast sits inside ``forward``, which DDP and
    DeepSpeed wrap, and the network's output is cast to fp32. The wrappers therefore never see a
    rank's dtype, and ranks may differ in their dtype.

    Args:
        task: the task.
        net: the task's network.
        precision: precision of this rank; see motley.plan.precision.
        device: device of this rank.

    Attributes:
        example: batch of a few samples, on the device.
        samples: number of training samples.
        score_names: names of the scores that :meth:`forward` returns for held-out samples, in
            order.
        class_pairs: labels and predicted classes of held-out samples: a list with one tensor per
            batch, int64 [2, n]. The caller empties the list.
        gathered: scores that are gathered instead of averaged; see ``Task.gathered``. The list has
            the sample indices and the scores of each batch, on the CPU. The caller empties it.
        worst: collector of the held-out samples with the largest loss; None: none are collected.
        gathered_example: the gathered scores of one sample.
        by_blocks: object that fills the network with its initial values, or None if the network has
            all its values. The network is folded until an engine is built; see motley.tasks.build.
        held_mib: memory in MiB that training needs on the device besides activations. 0: training
            needs no more than the memory that is already allocated.
        statistics: statistics of the batch norms, or None for a model without batch norm.
        sometimes_unused: names of parameters that have no gradient for some samples.
    """

    measuring_s = 11.0  # longest time to measure the model's speed; all ranks measure at once

    def __init__(self, task: Task, net: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__()
        self.task, self.net, self.device = task, net.to(device), device
        keep_frozen(net)
        norms = batch_norms(net)
        if norms and task.grain == 1:
            raise MotleyError(
                f"the model has a batch norm ({next(iter(norms))}), whose statistics would depend "
                "on the shares of the ranks. Give the task a grain, the number of samples over "
                "which statistics are computed, as in grain = 32"
            )
        self.statistics = GroupStatistics(net, task.grain) if norms else None
        self.sometimes_unused: tuple[str, ...] = ()
        self.by_blocks: BlockByBlock | None = None
        self.held_mib = 0.0
        self._compiled: Compiled | None = None
        self._recomputes = any(map(is_recomputed, net.modules()))
        self._autocast = AUTOCAST[precision]
        if self._autocast is not None:
            keep_fp32(net, task.fp32)
        # Tensor cores need channels last for 16 bits; torch.compile uses it for fixed shapes only.
        convolutions = sum(isinstance(part, nn.Conv2d) for part in net.modules())
        self._convolves = convolutions > 1 and device.type == "cuda" and self._autocast is not None
        kinds = {each.dtype for each in net.parameters()}
        wide = kinds <= {torch.float64, torch.complex128}  # tests that check gradients use fp64
        self._dtype = torch.float64 if wide else torch.float32
        example, self.samples = first_batch(task, _EXAMPLES)
        self.example = example.to(device)
        self.score_names = self._score_names()
        self.class_pairs: list[Tensor] = []
        self.gathered: list[GatheredRows] = []
        self.worst: WorstSamples | None = None
        if self.statistics:
            self._find_rows(self.statistics)

    def every_parameter(self) -> list[Tensor]:
        """Return a list with one entry for each parameter of the network.

        While the network is folded, an entry may be a parameter of another block, of the same
        shape.
        """
        return self.by_blocks.parameters() if self.by_blocks else list(self.net.parameters())

    def fill(self, *parts: nn.Module) -> None:
        """Draw the initial values of modules that have no values yet, on the model's device."""
        if self.by_blocks:
            self.by_blocks.fill(parts, self.device)

    def _score_names(self) -> tuple[str, ...]:
        self.eval()
        with torch.no_grad():
            result = self.task.scores(self.compute, self.blank())
        self.train()
        counted = {LABEL, PREDICTED} if {LABEL, PREDICTED} <= result.keys() else set()
        self.gathered_example = select_gathered(self.task, result, 1)
        return tuple(sorted(result.keys() - counted - self.gathered_example.keys()))

    def _find_rows(self, statistics: GroupStatistics) -> None:
        self.eval()
        statistics.find_rows(self._losses, self.noise(2))
        self.train()

    def forward(self, data: Tensors, scored: bool = False) -> Any:
        """Return the loss of each sample, fp32 [n].

        Args:
            data: tensors by name, as in motley.data.source.Batch. An empty dictionary means no
                samples.
            scored: True: the samples are held-out samples, and the method returns the task's scores
                by name, [n] each, instead of losses.
        """
        samples = len(next(iter(data.values()), ()))
        if self._compiled is not None and samples:
            self._compiled.begin_pass(samples)
        if scored:
            return self._scores(data)
        if not data:
            return _Idle.apply(*(p for p in self.net.parameters() if p.requires_grad))
        if self.statistics is None or not self.training:
            return self._losses(data)
        with self.statistics.note_pass(samples):
            return self._losses(data)

    def compile_task(self, counts: Collection[int] = ()) -> None:
        """Compile the network at its next forward pass; see motley.tasks.model.

        Args:
            counts: numbers of samples in the micro-batches to come, if these numbers are fixed.
        """
        if self._compiled is None:
            whole = self.task.compiles_whole
            blocks = set() if whole else set(self.task.blocks(self.net).values())
            around = parts_around(self.net, blocks)
            self._compiled = Compiled(
                self, ("_losses", "_scores"), blocks, around, counts if self._convolves else ()
            )

    def compute_plainly(self) -> None:
        """Use the plain code again, and discard the code that :meth:`compile_task` compiled."""
        if self._compiled is not None:
            self._compiled.undo()
            self._compiled = None

    @property
    def is_compiled(self) -> bool:
        """True if the model is compiled, or will be compiled at its next forward pass."""
        return self._compiled is not None

    def _losses(self, data: Tensors) -> Tensor:
        return self.task.losses(self.compute, data)

    def _scores(self, data: Tensors) -> Mapping[str, Tensor]:
        return self.task.scores(self.compute, data)

    def compute(self, *given: Any, **named: Any) -> Any:
        """Run the network in this rank's precision. Floating-point inputs and outputs are fp32."""
        given, named = tree_map(self._gather, given), tree_map(self._gather, named)
        if self._compiled is not None and self._convolves:
            given = tree_map(_channels_last, given)
        # The cache of autocast keeps a 16-bit copy of each weight until the pass ends. If blocks
        # are sharded or recomputed, the copies would add half of the parameters' memory.
        keeps = not (self.by_blocks or self._recomputes)
        enabled = self._autocast is not None
        with torch.autocast(self.device.type, self._autocast, enabled, cache_enabled=keeps):
            made = self.net(*given, **named)
        return tree_map(self._gather, made)

    def _gather(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_float else value

    def blank(self) -> Tensors:
        """Return a batch of one sample for passes whose results are not used.

        The batch is on the model's device.
        """
        return self.example[:1].data

    def noise(self, count: int) -> Tensors:
        """Return a batch of ``count`` samples for timing, on the model's device.

        Each call with the same count returns the same values.
        """
        return self.task.noise(self.example.data, count)

    def try_attention(self, kind: str) -> None:
        """Raise MotleyError if an attention kernel cannot compute this model on this device.

        Args:
            kind: value of ``--attention``.
        """
        if kind not in ("fused", "efficient"):
            return
        with warnings.catch_warnings(record=True) as text, torch.no_grad():
            warnings.simplefilter("always")
            try:
                self(self.blank())
            except RuntimeError as error:
                words = [str(warning.message).splitlines()[0] for warning in text]
                raise MotleyError(
                    f"--attention {kind} cannot compute this model on {self.device}: "
                    f"{'; '.join(words) or str(error).splitlines()[0]}. Take another kind, or "
                    "auto"
                ) from None


def _channels_last(value: Any) -> Any:
    images = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if images else value


def set_matmul_precision(precision: str) -> None:
    """Turn TF32 on for the precision ``tf32``, and off for all other precisions.

    The setting applies to matrix products and to convolutions. Without TF32, both use IEEE fp32
    arithmetic.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
