"""An estimate of the memory that a rank needs for a model, made before the allocation.

The module reads no file, clock or hardware.

A model has P parameters, of which T are trained. Parameters take 4 P bytes, and gradients 4 T. An
optimizer with k numbers of 32 bits per trained parameter takes 4 k T bytes. For AdamW k is 2. For
an optimizer that keeps its state in 8 bits, k is a half, plus the scales of blocks. Over W ranks,
each rank holds 1 / W of the state that an engine shards (motley.plan.wire). An engine that shards
parameters gathers the parameters of a few blocks at a time for a pass. The engine's
:class:`GatheredMemory` describes how many gathered bytes a rank holds at once.
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
    """Numbers of values in a model.

    Attributes:
        parameters: number of all parameters.
        trained: number of trained parameters.
        largest: number of parameters in the largest block of the model that is gathered at once.
        outside: number of parameters that belong to no block, such as embeddings.
        slots: values of 32 bits per trained parameter that the optimizer keeps, including an
            average of the parameters, if there is one.
    """

    parameters: int
    trained: int
    largest: int
    outside: int
    slots: float


@dataclass(frozen=True)
class GatheredMemory:
    """The way in which an engine that shards parameters gathers them.

    Attributes:
        estimate: function that returns the peak number of bytes on a rank for gathered parts of
            other ranks and for gradients in transfer. The arguments are the model's size, the bytes
            per gathered value, and the bytes per value of a gradient in a reduce-scatter.
        count_blocks: function that returns how many neighbouring blocks are gathered at once, given
            the number of parameters in each block.
        options: options that reduce this memory, as a user writes them.
    """

    estimate: Callable[[ModelSize, int, int], float]
    count_blocks: Callable[[Sequence[int]], int] = lambda numbers: 1
    options: tuple[str, ...] = ()

    def cut(self, numbers: Sequence[int]) -> list[slice]:
        """Return the groups of blocks that are gathered together, as slices of the list of blocks.

        Args:
            numbers: number of parameters in each block.
        """
        count = self.count_blocks(numbers)
        return [slice(first, first + count) for first in range(0, len(numbers), count)]


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that one rank needs, in MiB.

    Attributes:
        parameters: the rank's part of the parameters.
        gradients: the rank's part of the gradients.
        optimizer: the rank's part of the optimizer state.
        gathered: peak memory for gathered parts of other ranks and for gradients in transfer.
        activations: memory that a pass over the largest micro-batch takes in addition to the memory
            that is allocated between passes; None: not measured.
        in_host: names of the parts that are in the host's memory and not on the device, out of
            ``parameters``, ``gradients`` and ``optimizer``.
        accumulates: True if gradients of an earlier micro-batch are in memory when a backward pass
            starts.
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
        """MiB of parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> float:
        """MiB of the parts that are in the host's memory."""
        result: list[float] = [getattr(self, name) for name in self.in_host]
        return sum(result)

    @property
    def beside_activations(self) -> float:
        """MiB on the device when the backward pass starts, except for activations."""
        comes = not self.accumulates and "gradients" not in self.in_host
        return self.gathered + self.state - self.host - (self.gradients if comes else 0.0)

    @property
    def peak(self) -> float:
        """Largest memory on the device, in MiB.

        The peak is either at the start of the backward pass, when all activations are in memory, or
        at its end, when all gradients are in memory.
        """
        begins = self.beside_activations + (self.activations or 0.0)
        return max(begins, self.gathered + self.state - self.host)

    def words(self) -> str:
        """Return a text that lists the parts of the memory."""
        parts = {
            "parameters": self.parameters, "gradients": self.gradients,
            "optimizer": self.optimizer, "gathered": self.gathered,
            "activations": self.activations,
        }  # fmt: skip
        words = [f"{name} {amount(mib)}" for name, mib in parts.items() if mib]
        away = f"; {', '.join(self.in_host)} in the host's memory" if self.in_host else ""
        return ", ".join(words) + away

    def as_json(self) -> dict[str, Any]:
        """Return the entry of one rank for run.json."""
        return {
            "parameters_mib": self.parameters, "gradients_mib": self.gradients,
            "optimizer_mib": self.optimizer, "gathered_mib": self.gathered,
            "activations_mib": self.activations, "foreseen_mib": self.peak,
            "foreseen_host_mib": self.host,
        }  # fmt: skip


@dataclass(frozen=True)
class Foreseen:
    """The estimated memory of each rank that trains.

    Attributes:
        needs: memory of each rank, by its number in the group.
        rooms: for each rank, the MiB of its device that its process can use; None for a CPU.
    """

    needs: tuple[MemoryNeed, ...]
    rooms: tuple[float | None, ...]

    def sentence(self) -> str:
        """Return a sentence for the summary about the rank with the largest peak."""
        rank = max(range(len(self.needs)), key=lambda each: self.needs[each].peak)
        need, room = self.needs[rank], self.rooms[rank]
        of = f" of {amount(room)}" if room is not None else ""
        return f"memory, foreseen: {amount(need.peak)}{of} on rank {rank}: {need.words()}"

    def as_json(self) -> list[dict[str, Any]]:
        """Return one entry per rank for run.json."""
        pairs = zip(self.needs, self.rooms, strict=True)
        return [{**need.as_json(), "room_mib": room} for need, room in pairs]


def amount(mib: float) -> str:
    """Return an amount of memory as a text with a unit, such as ``3.2 GiB``."""
    return f"{mib / 1024:.3g} GiB" if mib >= 1000 else f"{mib:.3g} MiB"


def estimate_rank_memory(
    size: ModelSize,
    traits: "EngineTraits",
    ranks: int,
    narrow: bool,
    wire_bytes: int = WIDE,
) -> MemoryNeed:
    """Estimate the memory that a rank needs, without activations.

    Args:
        size: numbers of values in the model.
        traits: traits of the engine.
        ranks: number of ranks over which the state is sharded.
        narrow: True if parameters are gathered in 16 bits.
        wire_bytes: bytes per value of a gradient that is sent to the rank that keeps it.
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
    """Return the smallest number of ranks above ``ranks`` that can hold the model, or None.

    Args:
        need: memory of a rank over the current number of ranks, if all of the state is sharded.
        ranks: current number of ranks.
        room: MiB that are available on each rank's device.
    """
    remaining = room - need.gathered - (need.activations or 0.0)
    return None if remaining <= 0 else max(ranks + 1, -int(-need.state * ranks // remaining))
