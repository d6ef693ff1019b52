"""Wire modes: their properties, and the time of an all-reduce in each. Pure.

The traits of an engine, on which this time depends, are here too.

The modes that a user may ask for with ``--wire`` are in motley.comm.modes, one file a kind.
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

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of a number
_DEAR = 0.5  # points of top-1; what loses more is marked where it is offered, or taken


class Addition(Enum):
    """The way in which a wire mode has an engine add up gradients."""

    NUMBERS = "a sum of numbers of one dtype, which any engine can do"
    BUCKETS = "each bucket of gradients to be given to a reducer of the mode's own"
    LOCAL_STEPS = "steps of each rank's own, and parameters averaged in between"


@dataclass(frozen=True)
class WireMode(ABC):
    """A wire mode, as ``--wire`` names it: the content that travels. A kind of mode is a subclass.

    Attributes:
        slow_rank: the rank behind the one slow link, which sends its gradient once and receives the
            sum once, while the others make the sum among themselves; None: all in a ring.

    Attributes of a kind:
        name: in ``--wire NAME`` or ``--wire NAME:NUMBER``. usage: with its number. says: of the
            kind, for ``-h``.
        addition: how it has an engine add up gradients.
        mixes_devices: GPUs and CPUs can do it together.
        waits_for_gpu: in each bucket, so that a backward pass on a GPU does not hide it.
        kept_copies: of the gradient's size, that each rank keeps from step to step.
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
        """Read what follows ``NAME:``, empty if nothing does.

        Raises:
            ValueError: what to write in place of it.
        """

    @classmethod
    def offers(cls, precisions: Collection[str], part: float) -> Sequence["WireMode"]:
        """Return modes that are measured unasked, and advised if they would be faster.

        Args:
            precisions: precisions of the ranks.
            part: part of a step that the exact mode takes, relative to a step without any wire.
        """
        return ()

    @property
    def dtype(self) -> str:
        """Type of the numbers that travel, as ``--precision`` names it."""
        return "fp32"

    @property
    def sync_every(self) -> int:
        """Steps between two all-reduces."""
        return 1

    @property
    def least_side(self) -> int:
        """Side of the smallest square matrix that travels as large ones do."""
        return 1

    @property
    def is_inexact(self) -> bool:
        """Not the gradient to rounding: it may cost accuracy."""
        return self.addition is not Addition.NUMBERS

    @property
    def is_exact(self) -> bool:
        """The gradient in fp32."""
        return not self.is_inexact and self.dtype == "fp32"

    @property
    def lost_points(self) -> tuple[float, int] | None:
        """Points of top-1 lost against the exact mode, and the number of seeds in this mean.

        The data set is digits or textures, whichever lost more
        (benchmarks/results/accuracy_wire*.json). None: unknown.
        """
        return None

    @property
    def price(self) -> str:
        """Effect on the gradient and on accuracy, in words."""
        if self.lost_points is None:
            return "it is inexact, and what that costs in accuracy was not measured"
        lost, seeds = self.lost_points
        dear = "it is inexact and DEAR" if lost > _DEAR else "it is inexact"
        return (
            f"{dear}: {lost:.1f} points of top-1 were lost, mean of {seeds} seeds, in the "
            "benchmarks"
        )

    def count_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the bytes that a gradient of these shapes takes on the wire, each time."""
        return _BYTES[self.dtype] * sum(map(math.prod, shapes))

    def in_job(self, precisions: Collection[str]) -> "WireMode":
        """Return the mode to use where ranks compute in these precisions."""
        return self

    def is_free(self, precisions: Collection[str]) -> bool:
        """Return True if a plan may use the mode unasked.

        Such a mode is exact, or adds no new kind of rounding to a job of these precisions.
        """
        return False

    def cost_from(self, exact: "AllReduceCost") -> "AllReduceCost | None":
        """Return the cost that follows from the exact mode's; None if it is to be measured."""
        return None

    def reducer(self, device: Any) -> Any:
        """Return a motley.comm.reducer.Reducer for buckets on a torch.device; all ranks call it.

        Torch is imported by this method alone, since the name or the price of a mode does not need
        it.
        """
        raise NotImplementedError(f"--wire {self} gives no bucket to a reducer")

    def __str__(self) -> str:
        """Return the mode as ``--wire`` takes it."""
        return self.name if self.slow_rank is None else f"{self.name}/leaf{self.slow_rank}"


@dataclass(frozen=True)
class FewerCost:
    """The measured cost of an all-reduce among some of the ranks.

    Attributes:
        ranks: those, ascending. transfer_s: as of AllReduceCost.
    """

    ranks: tuple[int, ...]
    transfer_s: float


@dataclass(frozen=True)
class AllReduceCost:
    """How long all ranks take to add up their gradients, as measured.

    Attributes:
        latency_s: of next to nothing: what each bucket costs, whatever its size.
        transfer_s: of the whole gradient, besides.
        sync_every: steps between two all-reduces, beside which it travels.
        on_gpu: the GPUs work it themselves, beside what they compute (NCCL).
        overlaps: a backward pass can hide it; not where it needs the very cores that compute.
        size: of all that is summed, bytes.
        allreduces_per_step, allreduces_per_micro_step: of EngineTraits.
        frozen: numbers of the model that are not trained, for each that is: they have no gradient,
            and travel where parameters do.
        tensors: of each gradient, in the order of a backward pass, its part of all numbers (in
            proportion to which it is computed, too) and of all bytes; empty: any cut is possible.
        fewer: without the rank behind the one slow link; None: there is none, or it is not known.
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
        """Micro-batches of a whole share may shorten what a step waits for the wire."""
        return self.overlaps or self.allreduces_per_micro_step > 0

    @property
    def seconds_once(self) -> float:
        """Seconds of one all-reduce of the whole gradient, in one piece."""
        return self.latency_s + self.transfer_s

    def seconds(self, buckets: int = 1, micro_steps: int = 1) -> float:
        """All that a step sends, in so many buckets one after the other."""
        return (buckets * self.latency_s + self.transfer_s) * (
            self.allreduces_per_step + self.allreduces_per_micro_step * micro_steps
        )

    def exposed(
        self, buckets: int, backward_s: float, compute_s: float = 0.0, micro_steps: int = 1
    ) -> float:
        """Return the seconds that a backward pass cannot hide.

        A mode that sends once in several steps counts the seconds per step. A bucket is ready when
        its part of the backward pass is done, and travels once those before it have.

        Args:
            buckets: number of buckets.
            backward_s: seconds of the last micro-batch's backward pass.
            compute_s: seconds of computing in a whole step.
            micro_steps: micro-batches in a step.
        """
        if self.sync_every > 1:
            hidden = self.sync_every * compute_s if self.overlaps else 0.0
            return max(0.0, self.seconds() - hidden) / self.sync_every
        if buckets == 1 or not self.overlaps:
            return self.seconds(buckets, micro_steps)
        late_s = 0.0  # behind the backward pass
        for computed, sent in self._cut(buckets):
            late_s = max(0.0, late_s - computed * backward_s)
            late_s += self.latency_s + sent * self.transfer_s
        return late_s

    def _cut(self, buckets: int) -> Iterator[tuple[float, float]]:
        """Yield the part of the computing and of the bytes in each bucket.

        DDP fills each bucket with gradients until they are 1 / ``buckets`` of all numbers.
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
        """Return the cost with what the exact mode takes among fewer ranks: each byte as long."""
        if fewer is None or exact.size == 0:
            return self
        own_s = fewer.transfer_s * self.size / exact.size
        return dataclasses.replace(self, fewer=FewerCost(fewer.ranks, own_s))

    def among(
        self, machines: Sequence[int], ranks: Sequence[int], links: Links | None
    ) -> "AllReduceCost":
        """Return the cost among some of the ranks.

        The all-reduce is taken for a ring, which sends 2 (n - 1) / n of the gradient over each
        link. The part that the slowest link does not account for, such as the processors' own work,
        shrinks with n alone. The nearest measurement that holds all of the ranks counts: beside one
        slow link the whole measurement does not show the speed of the others.

        Args:
            machines: machine of each of all ranks, by number.
            ranks: the ranks that are left.
            links: measured links between the machines; None: all links are equal.
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
    """The abilities of an engine with gradients.

    Attributes:
        overlaps: it sends them while the backward pass still runs.
        additions: that wire modes may ask of it. spares_slow_rank: see WireMode.slow_rank.
        allreduces_per_step, allreduces_per_micro_step: of the gradient, once in a step and once in
            each of its micro-batches.
        gathers_per_step, gathers_per_micro_step: cost of gathering parameters after a step and in
            each of its micro-batches, in fp32 all-reduces of the gradient.
        narrow_parameters: they are gathered in 16 bits where all ranks compute in the same.
        mixed: GPUs and CPUs can do it together.
        shards_optimizer: each rank keeps, and steps, a part of the optimizer alone.
        shards_gradients, shards_parameters: it keeps a part of these alone.
        gathered: the memory that gathered parameters take; None: none are gathered for a pass.
        flat_parts: as in DeepSpeed, the optimizer steps a copy of its part of the parameters, and
            gradients have their place all the time.
        state_in_host: which of "parameters", "gradients" and "optimizer" are in the host's memory.
        fills_model: it gives a model its initial numbers as it cuts it, if it has none yet.
        compiles: the model that it wraps may be compiled by blocks.
        words: how it sends, for the user.
        others: engines that send otherwise, by the options that choose them.
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
        """Return True if the engine can do this mode."""
        return mode.addition in self.additions and (self.spares_slow_rank or mode.slow_rank is None)

    def through(
        self,
        wire: AllReduceCost,
        mode: WireMode,
        precisions: Sequence[str] = (),
        exact: AllReduceCost | None = None,
    ) -> AllReduceCost:
        """Return the measured cost of a mode, as the engine uses it.

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
            # After a step those alone are gathered that it has changed.
            allreduces_per_micro_step=(
                self.allreduces_per_micro_step
                + wide * self.gathers_per_micro_step * (1 + wire.frozen)
            ),
        )

    def optimizer_shards(self, ranks: int) -> int:
        """Parts that the optimizer is cut into, over so many ranks."""
        return ranks if self.shards_optimizer else 1

    @property
    def numbers(self) -> list[float]:
        """Numbers that a forecast depends on, for the records."""
        return [
            self.allreduces_per_step,
            self.allreduces_per_micro_step,
            self.gathers_per_step,
            self.gathers_per_micro_step,
        ]
