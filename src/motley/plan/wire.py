"""How ranks add up their gradients: the modes of ``--wire``, and how long one takes. Pure."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from motley.errors import MotleyError
from motley.plan.links import Links
from motley.text import did_you_mean

SIXTEEN = ("bf16", "fp16")
_NUMBERS = {
    "powersgd": "powersgd needs a rank of 1 or more, as in powersgd:8, or powersgd:8+bf16; a "
    "higher one sends more and leaves out less",
    "local": "local needs the steps between two averaging rounds, 1 or more, as in local:4; more "
    "of them hide a slower wire and cost more accuracy",
}
_KINDS = ("exact", *SIXTEEN, "powersgd", "local")
# Of top-1 against the exact wire, mean of so many seeds, on digits or textures, whichever lost
# more: benchmarks/results/accuracy_wire*.json.
LOST_POINTS = {
    "powersgd:1": (6.4, 5), "powersgd:4": (1.0, 16), "powersgd:8": (0.3, 8),
    "local:2": (0.3, 5), "local:4": (0.5, 8), "local:8": (0.3, 8),
}  # fmt: skip
_DEAR = 0.5  # points; what loses more is marked where it is offered, or taken


@dataclass(frozen=True)
class WireMode:
    """What travels.

    Attributes:
        kind: exact: fp32. bf16, fp16: rounded before it is sent. powersgd: matrices of a low
            rank in place of the gradient's, what that leaves out is sent later; inexact.
            local: parameters, now and then, between which each rank takes steps of its own;
            inexact.
        rank: of these matrices. sync_every: local steps between two averaging rounds.
        rounded: what PowerSGD sends is rounded to bf16 on the way.
        slow_rank: the rank behind the one slow link, which sends its gradient once and receives the
            sum once, while the others make the sum among themselves; None: all in a ring.
    """

    kind: str = "exact"
    rank: int = 0
    slow_rank: int | None = None
    sync_every: int = 1
    rounded: bool = False

    @property
    def is_inexact(self) -> bool:
        """Not the gradient to rounding: it may cost accuracy."""
        return self.kind in ("powersgd", "local")

    @property
    def price(self) -> str:
        """What it does to the gradient, and to accuracy, in words."""
        if not self.is_inexact:
            return "the gradient is " + ("rounded to 16 bits on the way" if self.kind in SIXTEEN
                                         else "exact")  # fmt: skip
        found = LOST_POINTS.get(str(dataclasses.replace(self, rounded=False)))
        if found is None:
            return "it is inexact, and what that costs in accuracy was not measured"
        lost, seeds = found
        dear = "it is inexact and DEAR" if lost > _DEAR else "it is inexact"
        return (f"{dear}: {lost:.1f} points of top-1 were lost, mean of {seeds} seeds, in the "
                "benchmarks")  # fmt: skip

    def bytes_of(self, shapes: Sequence[Sequence[int]]) -> int:
        """What a gradient of these shapes takes on the wire, each time; PowerSGD's as torch's
        hook does it, which leaves alone what would not become half as large."""
        width = 2 if self.rounded or self.kind in SIXTEEN else 4
        if self.kind != "powersgd":
            return width * sum(map(math.prod, shapes))
        return width * sum(self.thin(shape) or math.prod(shape) for shape in shapes)

    def thin(self, shape: Sequence[int]) -> int | None:
        """Elements that PowerSGD sends for a gradient of this shape; None: it is sent as it is."""
        high, whole = shape[0] if shape else 1, math.prod(shape)
        wide = whole // high
        numbers = (high + wide) * min(high, wide, self.rank)
        return numbers if 2 * numbers < whole else None

    def __str__(self) -> str:
        number = {"powersgd": f":{self.rank}", "local": f":{self.sync_every}"}
        words = self.kind + number.get(self.kind, "")
        words += "+bf16" if self.rounded else ""
        return words if self.slow_rank is None else f"{words}/leaf{self.slow_rank}"


@dataclass(frozen=True)
class EngineTraits:
    """What an engine can do with gradients.

    Attributes:
        overlaps: send them while the backward pass still runs.
        kinds: of WireMode. spares_slow_rank: whose link is slow; see WireMode.slow_rank.
        allreduces_per_step, allreduces_per_micro_step: of the gradient, once in a step and once in
            each of its micro-batches.
        gathers_per_step, gathers_per_micro_step: what it costs to gather parameters after a step
            and in each of its micro-batches, in fp32 all-reduces of the gradient.
        mixed: whether GPUs and CPUs can do it together.
        shards_optimizer: each rank keeps, and steps, a part of the optimizer alone.
        words: how it sends, for the user.
        others: engines that send otherwise, by what a user writes to have them.
    """

    overlaps: bool = True
    kinds: tuple[str, ...] = _KINDS
    spares_slow_rank: bool = True
    allreduces_per_step: float = 1.0
    allreduces_per_micro_step: float = 0.0
    gathers_per_step: float = 0.0
    gathers_per_micro_step: float = 0.0
    mixed: bool = True
    shards_optimizer: bool = False
    words: str = "gradients are sent while the backward pass still runs"
    others: Mapping[str, "EngineTraits"] = field(default_factory=dict)

    def can(self, mode: WireMode) -> bool:
        """Whether the engine can do this mode."""
        return mode.kind in self.kinds and (self.spares_slow_rank or mode.slow_rank is None)

    def through(self, wire: "AllReduceCost", mode: WireMode) -> "AllReduceCost":
        """What was measured of a mode, as the engine uses it."""
        wide = 2 if mode.kind in SIXTEEN else 1
        return dataclasses.replace(
            wire,
            overlaps=wire.overlaps and self.overlaps,
            allreduces_per_step=self.allreduces_per_step + wide * self.gathers_per_step,
            allreduces_per_micro_step=(
                self.allreduces_per_micro_step + wide * self.gathers_per_micro_step
            ),
        )

    def parts(self, ranks: int) -> int:
        """That the optimizer is cut into, over so many ranks."""
        return ranks if self.shards_optimizer else 1

    @property
    def numbers(self) -> list[float]:
        """What a forecast depends on, for the records."""
        return [
            self.allreduces_per_step,
            self.allreduces_per_micro_step,
            self.gathers_per_step,
            self.gathers_per_micro_step,
        ]


EXACT, BF16 = WireMode(), WireMode("bf16")
# Where nobody has named a rank: 4 lost three times as many points, and was 4 % faster
# (benchmarks/results/tesla_replay_512.json).
OFFERED = WireMode("powersgd", 8)


def parse_wire(text: str) -> WireMode | None:
    """Read ``--wire``; None for auto."""
    if text == "auto":
        return None
    text, slash, number = text.partition("/leaf")
    if slash:  # as the plan writes it
        mode = parse_wire(text)
        if mode is None or mode.is_inexact or not number.isdecimal():
            raise MotleyError(f"--wire {text}{slash}{number}: write it as in exact/leaf4")
        return dataclasses.replace(mode, slow_rank=int(number))
    kind, colon, number = text.partition(":")
    if kind not in _KINDS:
        choices = ("auto", *_KINDS)
        raise MotleyError(
            f"--wire {text} is unknown{did_you_mean(kind, choices)}; choose auto, exact, bf16, "
            "fp16, powersgd:R, as in powersgd:8, or local:H, as in local:4"
        )
    if kind not in _NUMBERS:
        if colon:
            raise MotleyError(f"--wire {text}: {kind} takes no number; write --wire {kind}")
        return WireMode(kind)
    rounded = kind == "powersgd" and number.endswith("+bf16")
    number = number.removesuffix("+bf16") if rounded else number
    if not re.fullmatch(r"[1-9]\d{0,3}", number):
        raise MotleyError(f"--wire {text}: {_NUMBERS[kind]}")
    if kind == "powersgd":
        return WireMode(kind, int(number), rounded=rounded)
    return WireMode(kind, sync_every=int(number)) if number != "1" else EXACT


def may_take(mode: WireMode, asked: WireMode | None, precisions: Collection[str]) -> bool:
    """Whether a plan may take a mode: what was asked for; else the exact wire, or a rounded one
    where that adds no new kind of rounding. Whether it spares a slow link is the plan's to say.

    Args:
        precisions: of those who would train.
    """
    if asked is not None:
        return mode == asked or asked == dataclasses.replace(mode, slow_rank=None)
    return mode.kind == "exact" or mode.kind in precisions


def rounded_as(precisions: Sequence[str]) -> WireMode | None:
    """The 16-bit wire that adds no new kind of rounding to a job; None where all compute in fp32.

    fp16 where a rank computes in it, for then a loss scale keeps its range; else bf16.
    """
    return next((WireMode(kind) for kind in ("fp16", "bf16") if kind in precisions), None)


def rounded_too(mode: WireMode, precisions: Sequence[str]) -> WireMode:
    """The mode in a job of these precisions: PowerSGD rounds what it sends where some rank rounds
    anyway. To bf16: a matrix times the loss scale could leave fp16's range."""
    if mode.kind != "powersgd" or rounded_as(precisions) is None:
        return mode
    return dataclasses.replace(mode, rounded=True)


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
        tensors: of each gradient, in the order of a backward pass, its part of all numbers (in
            proportion to which it is computed, too) and of all bytes; empty: any cut is possible.
    """

    latency_s: float
    transfer_s: float
    on_gpu: bool = False
    overlaps: bool = True
    size: float = 0.0
    sync_every: int = 1
    allreduces_per_step: float = 1.0
    allreduces_per_micro_step: float = 0.0
    tensors: tuple[tuple[float, float], ...] = ()

    @property
    def likes_long_batches(self) -> bool:
        """Micro-batches of a whole share may shorten what a step waits for the wire."""
        return self.overlaps or self.allreduces_per_micro_step > 0

    def seconds(self, buckets: int = 1, micro_steps: int = 1) -> float:
        """All that a step sends, in so many buckets one after the other."""
        return (buckets * self.latency_s + self.transfer_s) * (
            self.allreduces_per_step + self.allreduces_per_micro_step * micro_steps
        )

    def exposed(
        self, buckets: int, backward_s: float, compute_s: float = 0.0, micro_steps: int = 1
    ) -> float:
        """What a backward pass cannot hide; or what is sent once in some steps, those steps.

        A bucket is ready when its part of the backward pass is done, and travels once those
        before it have.

        Args:
            compute_s: of a whole step. micro_steps: in it.
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
        """Parts of the computing and of the bytes, bucket by bucket: as DDP fills them, each with
        gradients until they are 1 / ``buckets`` of all numbers."""
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

    def among(
        self, machines: Sequence[int], ranks: Sequence[int], links: Links | None
    ) -> "AllReduceCost":
        """The same with some of the ranks: as a ring, which sends 2 (n - 1) / n of the gradient
        over each link. What the slowest link does not account for, such as the processors' own
        work, shrinks with n alone.

        Args:
            machines: of all ranks. ranks: those left.
            links: of the machines; None: all alike.
        """
        if len(ranks) == 1:
            return dataclasses.replace(self, latency_s=0.0, transfer_s=0.0)
        share = (1 - 1 / len(ranks)) / (1 - 1 / len(machines))
        before = after = 0.0
        if links is not None:
            before = min(links.ring_s(self.size, len(machines)), self.transfer_s)
            left = {machines[rank] for rank in ranks}
            after = min(links.ring_s(self.size, len(ranks), left), before)
        transfer_s = after + (self.transfer_s - before) * share
        return dataclasses.replace(self, transfer_s=transfer_s)
