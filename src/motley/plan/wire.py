"""Wire modes: their properties, and the time of an all-reduce in each mode.

The module reads no file, clock or hardware.

A wire mode is the form in which gradients travel between ranks. The modes that ``--wire`` selects
are in motley.comm.modes, one module per kind. This module also defines the traits of an engine that
affect the time.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Self

from motley.plan.memory import GatheredMemory
from motley.plan.speeds import Links

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # per number
_DEAR = 0.5  # lost points of top-1, above which a mode is marked as costly


class Addition(Enum):
    """The way in which an engine adds up gradients in a wire mode."""

    NUMBERS = "a sum of numbers of one dtype, which any engine can do"
    BUCKETS = "each bucket of gradients to be given to a reducer of the mode's own"
    LOCAL_STEPS = "steps of each rank's own, and parameters averaged in between"


@dataclass(frozen=True)
class WireMode(ABC):
    """A wire mode, which ``--wire`` selects. Each kind of mode is a subclass.

    Attributes:
        slow_rank: rank whose link is far slower than all others. This rank sends its gradient once
            and receives the sum once, while the other ranks form a ring. None: all ranks form a
            ring.

    Attributes of a kind:
        name: name in ``--wire NAME`` or ``--wire NAME:NUMBER``.
        usage: the form ``NAME`` or ``NAME:NUMBER`` that help texts show.
        says: description of the kind for ``-h``.
        addition: way in which an engine adds up gradients in this mode.
        mixes_devices: True if GPUs and CPUs can take part together.
        waits_for_gpu: True if the reducer waits for the GPU in each bucket. A backward pass on a
            GPU then does not hide the all-reduce.
        kept_copies: number of tensors of the gradient's size that each rank keeps between steps.
    """

    slow_rank: int | None = field(default=None, kw_only=True)

    name: ClassVar[str]
    usage: ClassVar[str]
    says: ClassVar[str]
    addition: ClassVar[Addition]
    mixes_devices: ClassVar[bool] = True
    waits_for_gpu: ClassVar[bool] = False
    kept_copies: ClassVar[int] = 0

    @classmethod
    @abstractmethod
    def parse(cls, number: str) -> Self:
        """Return the mode for the text after ``NAME:`` in ``--wire NAME:NUMBER``.

        The text is empty without a NUMBER.

        Raises:
            ValueError: the text is not valid. The error message states a valid form.
        """

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence["WireMode"]:
        """Return modes to measure even if the user has not requested them.

        If such a mode would be faster, Motley advises the user to take it.

        Args:
            precisions: precisions of the ranks.
            part: communication time of a step in the exact mode, divided by the time of a step
                without communication.
        """
        return ()

    @property
    def dtype(self) -> str:
        """Type of the numbers that ranks send, by its name in ``--precision``."""
        return "fp32"

    @property
    def sync_every(self) -> int:
        """Steps between two all-reduces."""
        return 1

    @property
    def least_side(self) -> int:
        """Rows of the smallest square matrix that the mode compresses like a large matrix."""
        return 1

    @property
    def is_inexact(self) -> bool:
        """True if the mode does more than round the gradient, which may reduce accuracy."""
        return self.addition is not Addition.NUMBERS

    @property
    def is_exact(self) -> bool:
        """True if the mode sends the gradient in fp32."""
        return not self.is_inexact and self.dtype == "fp32"

    @property
    def lost_points(self) -> tuple[float, int] | None:
        """Loss of top-1 accuracy against the exact mode in percentage points, and number of seeds.

        The loss is a mean over the seeds. The data set is digits or textures, the one with the
        larger loss (benchmarks/results/accuracy_wire*.json). None: unknown.
        """
        return None

    @property
    def price(self) -> str:
        """Description of the mode's effect on the gradient and on accuracy."""
        if self.lost_points is None:
            return "it is inexact, and its cost in accuracy was not measured"
        lost, seeds = self.lost_points
        dear = "it is inexact and DEAR" if lost > _DEAR else "it is inexact"
        return (
            f"{dear}: the benchmarks lost {lost:.1f} points of top-1 with it (mean of {seeds} "
            "seeds)"
        )

    def count_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the number of bytes in which the mode sends tensors of these shapes."""
        return _BYTES[self.dtype] * sum(map(math.prod, shapes))

    def in_job(self, precisions: Collection[str]) -> "WireMode":
        """Return the form of this mode for a job whose ranks compute in these precisions."""
        return self

    def is_free(self, precisions: Collection[str]) -> bool:
        """Return True if a plan may use the mode without a user's request.

        The mode must be exact, or add no new kind of rounding to a job of these precisions.
        """
        return False

    def cost_from(self, exact: "AllReduceCost") -> "AllReduceCost | None":
        """Return the mode's cost, computed from the exact mode's; None if it must be measured."""
        return None

    def reducer(self, device: Any) -> Any:
        """Return a motley.comm.reducer.Reducer for buckets on a torch.device; all ranks call it.

        Only this method imports torch, since the other properties of a mode do not need torch.
        """
        raise NotImplementedError(f"--wire {self} gives no bucket to a reducer")

    def __str__(self) -> str:
        """Return the mode as a value of the option ``--wire``."""
        return self.name if self.slow_rank is None else f"{self.name}/leaf{self.slow_rank}"


@dataclass(frozen=True)
class FewerCost:
    """The measured cost of an all-reduce among some of the ranks.

    Attributes:
        ranks: numbers of these ranks, ascending.
        transfer_s: see :class:`AllReduceCost`.
    """

    ranks: tuple[int, ...]
    transfer_s: float


@dataclass(frozen=True)
class AllReduceCost:
    """The measured time in which all ranks add up their gradients.

    Attributes:
        latency_s: seconds that each bucket takes in addition, whatever its size.
        transfer_s: seconds to transfer the whole gradient, without ``latency_s``.
        on_gpu: True if the GPUs themselves run the all-reduce, beside their computation (NCCL).
        overlaps: True if a backward pass can hide the all-reduce. False if both need the same
            cores.
        size: bytes of all tensors that are summed.
        sync_every: number of steps between two all-reduces. An all-reduce runs while these steps
            compute.
        allreduces_per_step: see EngineTraits.
        allreduces_per_micro_step: see EngineTraits.
        frozen: number of frozen parameters per trained parameter. Frozen parameters have no
            gradient, but are sent when parameters are gathered.
        tensors: for each gradient, in the order of the backward pass, the gradient's fraction of
            all values and of all bytes. The time of the backward pass for a gradient is
            proportional to its number of values. Empty: any division into buckets is possible.
        fewer: cost without the rank whose link is far slower than all others. None: all links are
            similar, or the cost is not known.
    """

    latency_s: float
    transfer_s: float
    on_gpu: bool = False
    overlaps: bool = True
    size: float = 0.0
    sync_every: int = 1
    allreduces_per_step: float = 1.0
    allreduces_per_micro_step: float = 0.0
    frozen: float = 0.0
    tensors: tuple[tuple[float, float], ...] = ()
    fewer: FewerCost | None = None

    @property
    def likes_long_batches(self) -> bool:
        """True if larger micro-batches may reduce the time that a step waits for the all-reduce."""
        return self.overlaps or self.allreduces_per_micro_step > 0

    @property
    def seconds_once(self) -> float:
        """Seconds of one all-reduce of the whole gradient, in one piece."""
        return self.latency_s + self.transfer_s

    def seconds(self, buckets: int = 1, micro_steps: int = 1) -> float:
        """Return the seconds of all all-reduces in a step, without overlap.

        Args:
            buckets: number of buckets, which are sent one after the other.
            micro_steps: micro-batches in a step.
        """
        return (buckets * self.latency_s + self.transfer_s) * (
            self.allreduces_per_step + self.allreduces_per_micro_step * micro_steps
        )

    def exposed(
        self, buckets: int, backward_s: float, compute_s: float = 0.0, micro_steps: int = 1
    ) -> float:
        """Return the seconds of all-reduces in a step that the backward pass cannot hide.

        For a mode that sends once in several steps, the result is the mean per step. A bucket is
        ready when its part of the backward pass is done, and is sent after the buckets before it.

        Args:
            buckets: number of buckets.
            backward_s: seconds of the last micro-batch's backward pass.
            compute_s: compute seconds of a whole step.
            micro_steps: micro-batches in a step.
        """
        if self.sync_every > 1:
            hidden = self.sync_every * compute_s if self.overlaps else 0.0
            return max(0.0, self.seconds() - hidden) / self.sync_every
        if buckets == 1 or not self.overlaps:
            return self.seconds(buckets, micro_steps)
        late_s = 0.0  # seconds by which the wire lags behind the backward pass
        for computed, sent in self._cut(buckets):
            late_s = max(0.0, late_s - computed * backward_s)
            late_s += self.latency_s + sent * self.transfer_s
        return late_s

    def _cut(self, buckets: int) -> Iterator[tuple[float, float]]:
        """Yield, for each bucket, its fraction of the backward pass and its fraction of all bytes.

        DDP fills each bucket with gradients until it has 1 / ``buckets`` of all values.
        """
        if not self.tensors:
            yield from [(1 / buckets, 1 / buckets)] * buckets
            return
        computed = sent = 0.0
        for numbers, size in self.tensors:
            computed, sent = computed + numbers, sent + size
            if computed >= (1 - 1e-9) / buckets:
                yield computed, sent
                computed = sent = 0.0
        if computed:
            yield computed, sent

    def among_fewer(self, fewer: FewerCost | None, exact: "AllReduceCost") -> "AllReduceCost":
        """Return a copy with the field :attr:`fewer`, computed from the exact mode's measurement.

        Each byte is assumed to take as long as in the exact mode.

        Args:
            fewer: cost of the exact mode among fewer ranks; None: not measured.
            exact: cost of the exact mode among all ranks.
        """
        if fewer is None or exact.size == 0:
            return self
        own_s = fewer.transfer_s * self.size / exact.size
        return dataclasses.replace(self, fewer=FewerCost(fewer.ranks, own_s))

    def among(
        self, machines: Sequence[int], ranks: Sequence[int], links: Links | None
    ) -> "AllReduceCost":
        """Return the cost of an all-reduce among some of the ranks.

        The all-reduce is modelled as a ring, which sends 2 (n - 1) / n of the gradient over each
        link. The part that the slowest link does not explain, such as the processors' own work,
        scales with (n - 1) / n alone. The basis is the smallest measured set of ranks that contains
        all remaining ranks: with one slow link, the measurement of all ranks does not show the
        speed of the other links.

        Args:
            machines: number of the host of every rank, left-out ranks included.
            ranks: the ranks that remain.
            links: measured links between the hosts; None: all links are equal.
        """
        if len(ranks) == 1:
            return dataclasses.replace(self, latency_s=0.0, transfer_s=0.0, fewer=None)
        if len(ranks) == len(machines):
            return self
        known = FewerCost(tuple(range(len(machines))), self.transfer_s)
        if self.fewer and set(ranks) <= set(self.fewer.ranks):
            known = self.fewer
        share = (1 - 1 / len(ranks)) / (1 - 1 / len(known.ranks))
        before = after = 0.0
        if links is not None:
            met, remaining = ({machines[rank] for rank in some} for some in (known.ranks, ranks))
            before = min(links.ring_s(self.size, len(known.ranks), met), known.transfer_s)
            after = min(links.ring_s(self.size, len(ranks), remaining), before)
        transfer_s = after + (known.transfer_s - before) * share
        return dataclasses.replace(self, transfer_s=transfer_s, fewer=None)


@dataclass(frozen=True)
class EngineTraits:
    """The properties of an engine that matter for communication and memory.

    Attributes:
        overlaps: True if the engine sends gradients while the backward pass still runs.
        additions: ways of adding gradients that the engine supports.
        spares_slow_rank: True if the engine supports :attr:`WireMode.slow_rank`.
        allreduces_per_step: number of all-reduces of the gradient in a step.
        allreduces_per_micro_step: number of all-reduces of the gradient in each micro-batch.
        gathers_per_step: cost of gathering parameters after a step, as a number of fp32 all-reduces
            of the gradient.
        gathers_per_micro_step: cost of gathering parameters in each micro-batch, as a number of
            fp32 all-reduces of the gradient.
        narrow_parameters: True if parameters are gathered in 16 bits whenever all ranks compute in
            the same 16-bit type.
        mixed: True if GPUs and CPUs can take part together.
        shards_optimizer: True if each rank keeps and updates only a part of the optimizer state.
        shards_gradients: True if each rank keeps only a part of the gradients.
        shards_parameters: True if each rank keeps only a part of the parameters.
        gathered: memory of gathered parameters; None: the engine does not gather them for a pass.
        flat_parts: True if the optimizer updates a copy of its part of the parameters, and
            gradients stay allocated between steps, as in DeepSpeed.
        state_in_host: parts of the state that are in the host's memory: any of "parameters",
            "gradients" and "optimizer".
        fills_model: True if the engine itself initializes parameters without values when it shards
            a model.
        compiles: True if the model that the engine wraps may be compiled block by block.
        words: description of the engine's communication for the user.
        others: engines that communicate differently, by the options that select them.
    """

    overlaps: bool = True
    additions: tuple[Addition, ...] = tuple(Addition)
    spares_slow_rank: bool = True
    allreduces_per_step: float = 1.0
    allreduces_per_micro_step: float = 0.0
    gathers_per_step: float = 0.0
    gathers_per_micro_step: float = 0.0
    narrow_parameters: bool = False
    mixed: bool = True
    shards_optimizer: bool = False
    shards_gradients: bool = False
    shards_parameters: bool = False
    gathered: GatheredMemory | None = None
    flat_parts: bool = False
    state_in_host: tuple[str, ...] = ()
    fills_model: bool = False
    compiles: bool = True
    words: str = "gradients are sent while the backward pass still runs"
    others: Mapping[str, "EngineTraits"] = field(default_factory=dict)

    def can(self, mode: WireMode) -> bool:
        """Return True if the engine supports this wire mode."""
        return mode.addition in self.additions and (self.spares_slow_rank or mode.slow_rank is None)

    def through(
        self,
        wire: AllReduceCost,
        mode: WireMode,
        precisions: Sequence[str] = (),
        exact: AllReduceCost | None = None,
    ) -> AllReduceCost:
        """Return the measured cost of a mode, adjusted to the engine's communication.

        Args:
            wire: the measured cost.
            mode: the wire mode.
            precisions: precisions of all ranks.
            exact: the measured cost of fp32, in which parameters are gathered; None: each byte
                takes as long as in ``wire``.
        """
        wide = 1.0 if mode.dtype == "fp32" else 2.0
        if self.narrow_parameters and set(precisions) in ({"bf16"}, {"fp16"}):
            wide /= 2
        elif exact is not None and wire.seconds_once > 0:
            wide = exact.seconds_once / wire.seconds_once
        return dataclasses.replace(
            wire,
            overlaps=wire.overlaps and self.overlaps,
            allreduces_per_step=self.allreduces_per_step + wide * self.gathers_per_step,
            # After a step, only the parameters that it has changed are gathered.
            allreduces_per_micro_step=(
                self.allreduces_per_micro_step
                + wide * self.gathers_per_micro_step * (1 + wire.frozen)
            ),
        )

    def optimizer_shards(self, ranks: int) -> int:
        """Return the number of shards of the optimizer state with this many ranks."""
        return ranks if self.shards_optimizer else 1

    @property
    def numbers(self) -> list[float]:
        """The engine's traits on which a forecast depends, as a list of numbers for the records."""
        return [
            self.allreduces_per_step,
            self.allreduces_per_micro_step,
            self.gathers_per_step,
            self.gathers_per_micro_step,
        ]
