"""A task's network and its loss in one module, and its compilation by torch.compile.

All engines share one rule for dtypes thereby. The module is compiled block by block, or whole with
the loss.

Blocks of one class are compiled once, however many there are: a ViT-B in a third of the time, and
as fast. Between them gradients are sent as they become ready. The parts around them, as a ViT's
patch embedding, last norm and head, are 1 % of its time. Shapes are fixed but for the first, which
counts samples, so that a batch of another size compiles nothing anew. Convolutions are the
exception: torch's kernels around them are slower for any number of samples than for a known one, a
ResNet-50 by a fifth. For these, each number of samples in a plan is compiled separately.
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
from motley.tasks.task import Task

Compute = Callable[..., Any]

_MOST = 64  # ways of one piece of code: blocks of stages differ, and an evaluation has its own
_READS = 16  # tensors that one kernel reads; torch's 8 writes a batch norm's gradient out in fp32
_RARE = 2  # passes of unforeseen sizes in a row: the last batches of an epoch or an evaluation


class _Way(Enum):
    """How the parts compute a pass."""

    PLAIN = 0
    ONE_COUNT = 1  # compiled for its number of samples
    ANY_COUNT = 2


class Compiled:
    """Parts of a model that are compiled when they first compute; :meth:`undo` makes them plain.

    Args:
        whole: module that computes everything. Its methods ``names`` are compiled, and it holds the
            compiled ones from now on.
        names: names of these methods.
        blocks: blocks that are compiled in place of ``whole``.
        around: modules that are compiled beside the blocks. Calls with other arguments than tensors
            are computed plainly.
        counts: numbers of samples that are each compiled for themselves. A pass of another number
            is computed plainly, unless several follow one another. Empty: compile for any number.
    """

    def __init__(
        self,
        whole: nn.Module,
        names: Iterable[str],
        blocks: Iterable[nn.Module],
        around: Iterable[nn.Module],
        counts: Collection[int] = (),
    ) -> None:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled is computed plainly
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
        """Choose how the parts compute the next pass, of this many samples."""
        if not self._counts:
            return
        if samples in self._counts:
            self._others, self._way = 0, _Way.ONE_COUNT
        else:
            self._others += 1
            self._way = _Way.PLAIN if self._others <= _RARE else _Way.ANY_COUNT

    def _put(self, module: nn.Module, name: str, compute: Compute) -> None:
        self._before.append((module, name, module.__dict__.get(name)))  # as it is recomputed, say
        module.__dict__[name] = compute

    def undo(self) -> None:
        """Compute as before; what was compiled is let go of."""
        for module, name, before in self._before:
            del module.__dict__[name]
            if before is not None:
                module.__dict__[name] = before
        torch._dynamo.reset()

    def _compile(self, plain: Compute) -> Compute:
        """Return a compiled function; where its batch has any number of samples, for any."""
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

        Other sizes than these run in a version that is compiled for any size.

        Blocks of all stages share their code, and torch takes for variable what differs from one
        call of a piece of code to the next: Swin's windows of any height and width kept it busy for
        minutes.
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
    """Return the tensors among arguments that have a first dimension."""
    return [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.dim()]


def _mark_counts(given: Any) -> None:
    """Have torch take the first dimension of all tensors for variable."""
    for tensor in _batched(given):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _of_tensors(compute: Compute, plain: Compute) -> Compute:
    """Return the compiled module, or the plain one in calls with arguments that are no tensors.

    The value of such an argument, as the time of a forecast, would be compiled in: each value would
    compile the module again.
    """

    def computed(*given: Any, **named: Any) -> Any:
        all_tensors = all(isinstance(each, Tensor) for each in (*given, *named.values()))
        return (compute if all_tensors else plain)(*given, **named)

    return computed


AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_EXAMPLES = 2  # samples that a model is tried and timed with


def common_type(task: Task, precisions: Collection[str]) -> torch.dtype | None:
    """Return the 16-bit dtype in which parameters may be gathered, or None.

    All ranks have to compute in this dtype, and no part of the model may have to stay in fp32.
    """
    first, *others = set(precisions)
    return None if others or task.fp32 else AUTOCAST[first]


class _Idle(torch.autograd.Function):
    """No samples: no losses, and a gradient of zeros for every parameter.

    A rank without work must still take part in every collective, so its parameters need
    gradients and their hooks must fire. Sending an empty batch through the network would
    do, but costs more, torch 2.11's attention returns None for it in 16 bits on CUDA, and no task
    need be written for it.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        """Losses of no samples, [0]."""
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Zeros."""
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class TaskModel(nn.Module):
    """Samples in, the loss of each out; the task's loss and autocast inside.

    Autocast sits inside ``forward``, where DDP and DeepSpeed wrap it, and what the network gives
    is fp32, so that the wrappers never see a rank's dtype and ranks may differ in it.

    Args:
        task: the task.
        net: the task's network.
        precision: precision of this rank; see motley.plan.precision.
        device: device of this rank.

    Attributes:
        example: some samples. samples: how many there are to train on.
        score_names: of what :meth:`forward` gives of held-out samples, in order.
        by_blocks: gives the network its numbers, if it has not got all of them; until an engine is
            built it is folded.
        held_mib: that training holds on the device besides activations, where that is more than is
            there now; 0: no more.
        statistics: of batch norms, if it has any.
        sometimes_unused: names of parameters that have no gradient for some samples.
    """

    measuring_s = 11.0  # that measuring its speed may take; all ranks measure at once

    def __init__(self, task: Task, net: nn.Module, precision: str, device: torch.device) -> None:
        super().__init__()
        self.task, self.net, self.device = task, net.to(device), device
        keep_frozen(net)
        norms = batch_norms(net)
        if norms and task.grain == 1:
            raise MotleyError(
                f"the model has batch norm ({next(iter(norms))}), whose statistics unequal shares "
                "would make differ: give the task a grain, the samples over which they are "
                "taken, as in grain = 32"
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
        # Tensor cores take 16 bits with channels last; torch.compile arranges only fixed shapes so.
        convolutions = sum(isinstance(part, nn.Conv2d) for part in net.modules())
        self._convolves = convolutions > 1 and device.type == "cuda" and self._autocast is not None
        kinds = {each.dtype for each in net.parameters()}
        wide = kinds <= {torch.float64, torch.complex128}  # tests check gradients so
        self._dtype = torch.float64 if wide else torch.float32
        example, self.samples = first_batch(task, _EXAMPLES)
        self.example = example.to(device)
        self.score_names = self._score_names()
        if self.statistics:
            self._find_rows(self.statistics)

    def every_parameter(self) -> list[Tensor]:
        """One for each that the network has, like it in shape, also while it is folded."""
        return self.by_blocks.parameters() if self.by_blocks else list(self.net.parameters())

    def fill(self, *parts: nn.Module) -> None:
        """Give modules of the network their initial numbers, on its device, if they have none."""
        if self.by_blocks:
            self.by_blocks.fill(parts, self.device)

    def _score_names(self) -> tuple[str, ...]:
        self.eval()
        with torch.no_grad():
            result = self.task.scores(self.compute, self.blank())
        self.train()
        return tuple(sorted(result))

    def _find_rows(self, statistics: GroupStatistics) -> None:
        self.eval()
        statistics.find_rows(self._losses, self.noise(2))
        self.train()

    def forward(self, data: Tensors, scored: bool = False) -> Any:
        """Return the loss of each sample, fp32 [n].

        Args:
            data: see motley.data.source.Batch; n may be 0.
            scored: held-out samples: the task's scores in place of losses, [n] by name.
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
        """Have torch.compile do what is computed of a batch; see motley.tasks.model.

        Args:
            counts: samples of the micro-batches to come, where they are not going to change.
        """
        if self._compiled is None:
            whole = self.task.compiles_whole
            blocks = set() if whole else set(self.task.blocks(self.net).values())
            around = parts_around(self.net, blocks)
            self._compiled = Compiled(
                self, ("_losses", "_scores"), blocks, around, counts if self._convolves else ()
            )

    def compute_plainly(self) -> None:
        """Take :meth:`compile_task` back."""
        if self._compiled is not None:
            self._compiled.undo()
            self._compiled = None

    @property
    def is_compiled(self) -> bool:
        """True if the model is compiled, or will be at the first batch."""
        return self._compiled is not None

    def _losses(self, data: Tensors) -> Tensor:
        return self.task.losses(self.compute, data)

    def _scores(self, data: Tensors) -> Mapping[str, Tensor]:
        return self.task.scores(self.compute, data)

    def compute(self, *given: Any, **named: Any) -> Any:
        """Return the network's output in this rank's precision; floats are fp32 in and out."""
        given, named = tree_map(self._gather, given), tree_map(self._gather, named)
        if self._compiled is not None and self._convolves:
            given = tree_map(_channels_last, given)
        # Weights in 16 bits, to be used again, would be kept until the end: of a model in blocks,
        # which are cut or computed again, as much as half of all parameters once more.
        keeps = not (self.by_blocks or self._recomputes)
        enabled = self._autocast is not None
        with torch.autocast(self.device.type, self._autocast, enabled, cache_enabled=keeps):
            made = self.net(*given, **named)
        return tree_map(self._gather, made)

    def _gather(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_float else value

    def blank(self) -> Tensors:
        """Return a sample to compute where only a pass counts, on the model's device."""
        return self.example[:1].data

    def noise(self, count: int) -> Tensors:
        """``count`` samples to time, always the same, on the model's device."""
        return self.task.noise(self.example.data, count)

    def try_attention(self, kind: str) -> None:
        """MotleyError if a kernel that the user has chosen cannot compute this model here."""
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
                    f"{'; '.join(words) or str(error).splitlines()[0]}. Take another one, or auto"
                ) from None


def _channels_last(value: Any) -> Any:
    images = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if images else value


def set_matmul_precision(precision: str) -> None:
    """Switch TF32 on for the precision ``tf32``, and off for all others.

    The switch holds for matrix products and for the patch convolution. With fp32 both use IEEE
    arithmetic.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
