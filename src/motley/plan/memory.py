"""The memory that a rank is going to hold of a model, before anything is allocated. Pure.

P parameters, T of them trained, take 4 P bytes, and gradients 4 T. An optimizer that keeps k
numbers of 32 bits for each trained parameter takes 4 k T: AdamW keeps two, in 8 bits half of one
and the scales of blocks. Over W ranks each holds a W-th of the parts that an engine cuts
(motley.plan.wire). An engine that cuts parameters gathers them piece by piece, and says with
:class:`GatheredMemory` how much of them a rank holds at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from motley.plan.wire import EngineTraits

_MIB = 2**20
WIDE, NARROW = 4, 2  # bytes of a number
STATE = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class ModelSize:
    """Numbers in a model.

    Attributes:
        parameters: all. trained: of these. largest: in what is gathered at once. outside: in no
            such piece, as embeddings.
        slots: that the optimizer keeps of each that is trained, and an average, if there is one; in
            numbers of 32 bits.
    """

    parameters: int
    trained: int
    largest: int
    outside: int
    slots: float


@dataclass(frozen=True)
class GatheredMemory:
    """How an engine that cuts parameters gathers them.

    Attributes:
        estimate: returns the bytes of other ranks' parts, and of gradients on their way, that a
            rank holds at most. Its arguments are the model's size, the bytes of a gathered number,
            and those of a number of a gradient that is scattered.
        count_blocks: returns how many neighbouring blocks are gathered at once, from the numbers of
            parameters in each.
        options: less of it is held with these, as a user writes them.
    """

    estimate: Callable[[ModelSize, int, int], float]
    count_blocks: Callable[[Sequence[int]], int] = lambda numbers: 1
    options: tuple[str, ...] = ()

    def cut(self, numbers: Sequence[int]) -> list[slice]:
        """Return the pieces that blocks are gathered in, as slices of the list of blocks.

        Args:
            numbers: of parameters in each block.
        """
        count = self.count_blocks(numbers)
        return [slice(first, first + count) for first in range(0, len(numbers), count)]


@dataclass(frozen=True)
class MemoryNeed:
    """The memory of one rank, MiB.

    Attributes:
        parameters, gradients, optimizer: its part of each.
        gathered: of the others' parts, and of gradients on their way, at most.
        activations: of a micro-batch, with the layers after the model; None: not known.
        in_host: which of the first three are in the host's memory.
        accumulates: gradients of an earlier micro-batch are there while a backward pass begins.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float | None = None
    in_host: tuple[str, ...] = ()
    accumulates: bool = True

    @property
    def state(self) -> float:
        """MiB of the state that is there all the time, and of gradients."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> float:
        """MiB of the host's memory."""
        result: list[float] = [getattr(self, name) for name in self.in_host]
        return sum(result)

    @property
    def beside_activations(self) -> float:
        """MiB of the device, when activations are most."""
        comes = not self.accumulates and "gradients" not in self.in_host
        return self.gathered + self.state - self.host - (self.gradients if comes else 0.0)

    @property
    def peak(self) -> float:
        """Largest memory on the device, in MiB.

        The peak is at the start of the backward pass, with all activations, or at its end, with all
        gradients.
        """
        begins = self.beside_activations + (self.activations or 0.0)
        return max(begins, self.gathered + self.state - self.host)

    def words(self) -> str:
        """For people: what it is made of."""
        parts = {
            "parameters": self.parameters, "gradients": self.gradients,
            "optimizer": self.optimizer, "gathered": self.gathered,
            "activations": self.activations,
        }  # fmt: skip
        text = [f"{name} {amount(mib)}" for name, mib in parts.items() if mib]
        away = f"; {', '.join(self.in_host)} in the host's memory" if self.in_host else ""
        return ", ".join(text) + away

    def as_json(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "parameters_mib": self.parameters, "gradients_mib": self.gradients,
            "optimizer_mib": self.optimizer, "gathered_mib": self.gathered,
            "activations_mib": self.activations, "foreseen_mib": self.peak,
            "foreseen_host_mib": self.host,
        }  # fmt: skip


@dataclass(frozen=True)
class Foreseen:
    """Memory of each rank that trains, by its number.

    Attributes:
        rooms: MiB that each device had for it; None where a processor is the device.
    """

    needs: tuple[MemoryNeed, ...]
    rooms: tuple[float | None, ...]

    def sentence(self) -> str:
        """For the summary: of the rank that holds most."""
        rank = max(range(len(self.needs)), key=lambda each: self.needs[each].peak)
        need, room = self.needs[rank], self.rooms[rank]
        of = f" of {amount(room)}" if room is not None else ""
        return f"memory, foreseen: {amount(need.peak)}{of} on rank {rank}: {need.words()}"

    def as_json(self) -> list[dict[str, Any]]:
        """For run.json, a rank each."""
        pairs = zip(self.needs, self.rooms, strict=True)
        return [{**need.as_json(), "room_mib": room} for need, room in pairs]


def amount(mib: float) -> str:
    """MiB for people."""
    return f"{mib / 1024:.3g} GiB" if mib >= 1000 else f"{mib:.3g} MiB"


def estimate_rank_memory(
    size: ModelSize,
    traits: "EngineTraits",
    ranks: int,
    narrow: bool,
    wire_bytes: int = WIDE,
) -> MemoryNeed:
    """Estimate the memory of a rank besides activations.

    Args:
        size: numbers in the model.
        traits: traits of the engine.
        ranks: number of ranks over which the state is sharded.
        narrow: True if parameters are gathered in 16 bits.
        wire_bytes: bytes per number of a gradient that is scattered.
    """
    gathered = 0.0
    if traits.gathered is not None:
        gathered = traits.gathered.estimate(size, NARROW if narrow else WIDE, wire_bytes)

    def part(numbers: float, is_cut: bool) -> float:
        return WIDE * numbers / (ranks if is_cut else 1) / _MIB

    return MemoryNeed(
        part(size.parameters, traits.shards_parameters),
        part(size.trained, traits.shards_gradients),
        part((size.slots + traits.flat_parts) * size.trained, traits.shards_optimizer),
        gathered / _MIB, in_host=traits.state_in_host,
    )  # fmt: skip


def enough_ranks(need: MemoryNeed, ranks: int, room: float) -> int | None:
    """Return the number of ranks from which on the model fits; None if there is no such number.

    Each rank has ``room`` MiB, and all of the state is sharded.
    """
    remaining = room - need.gathered - (need.activations or 0.0)
    return None if remaining <= 0 else max(ranks + 1, -int(-need.state * ranks // remaining))
