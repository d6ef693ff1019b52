"""The survivors of a lost rank: which ranks continue, and how they exchange values.

MPI may wait for the lost rank for ever, so survivors communicate through the connections that the
supervisor of each rank has to rank 0. Rank 0 first makes all survivors copy their state. Only then
does rank 0 make them continue: a rank that leaves a broken collective may break the collective on
other ranks, and no rank may be copying its state at that time.
"""

import base64
import pickle
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

from motley.errors import MotleyError
from motley.faults import Fault, FaultKind
from motley.membership.messages import MOST_BYTES, Listening

T = TypeVar("T")

# Faults of a rank whose process is gone. A silent host takes mpirun's daemon, and so the job, with
# it. An error that a rank reports would come again on the others.
_LOST = {
    FaultKind.KILLED, FaultKind.SEGFAULT, FaultKind.ABORTED, FaultKind.ILLEGAL_INSTRUCTION,
}  # fmt: skip


SURVIVES = "MOTLEY_SURVIVES"  # in rank 0's environment if the launcher has these variables
# Each launcher ignores the variables of the others. They override any configuration file, and an
# option on the command line overrides them.
SURVIVE = {
    "PRTE_MCA_state_base_recoverable": "1",  # Open MPI 5
    "PRTE_MCA_state_base_error_non_zero_exit": "0",
    "OMPI_MCA_orte_enable_recovery": "1",  # Open MPI 4
    "SLURM_KILL_BAD_EXIT": "0",  # srun
    SURVIVES: "1",
}
_PART_BYTES = MOST_BYTES // 16  # bytes of values in one message
# Seconds in which the host of a lost rank has to report; without a report mpirun ends the job.
_WITNESS_S = 1.0
_KEEP_S = 20.0  # seconds in which all ranks have to copy their state
# Seconds in which all ranks have to leave the broken group; a rank may still compute.
_MEET_S = 60.0


class RankLostError(Exception):
    """An error because a lost rank broke the group; see :meth:`Supervisor.get_survivors`."""


@dataclass(frozen=True)
class Survivors:
    """The ranks that continue after a loss.

    Attributes:
        ranks: old numbers of the ranks, ascending. The index of a rank is its new number.
        lost: the fault of the first lost rank.
        standby: new number of the rank that reports when rank 0 cannot.
    """

    ranks: tuple[int, ...]
    lost: Fault
    standby: int

    def message(self) -> dict[str, Any]:
        """Return the survivors as JSON."""
        return {"ranks": list(self.ranks), "lost": asdict(self.lost), "standby": self.standby}

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> "Survivors":
        """Return the survivors that :meth:`message` has encoded."""
        lost = Fault.read(message["lost"])
        return cls(tuple(message["ranks"]), lost, message["standby"])


@dataclass(frozen=True)
class GroupPlace:
    """The process group of this rank, and the rank's number in the group.

    After a loss, each surviving rank gets a new group and a new number.

    Attributes:
        rank: number of this rank in the group.
        host: name of this rank's host.
        numbers: number in the launch of each rank of the group. Faults and events name ranks by
            this number, since it never changes.
        machines: for each rank, the lowest rank on the same machine; empty before all have joined.
        listening: address at which each rank accepts connections once it replaces rank 0; empty
            before all ranks have joined.
        survives: True if the launcher lets all other ranks live on when a rank dies.
    """

    rank: int
    host: str
    numbers: tuple[int, ...]
    machines: tuple[int, ...] = ()
    listening: tuple[Listening, ...] = ()
    survives: bool = False

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.numbers)

    @property
    def number(self) -> int:
        """Number of this rank in the launch."""
        return self.numbers[self.rank]

    @property
    def is_standby(self) -> bool:
        """True if this rank reports to the user when rank 0 cannot."""
        return bool(self.machines) and self.rank == choose_standby(self.machines)

    def among(self, ranks: Sequence[int]) -> "GroupPlace":
        """Return the place of this rank in the group of ``ranks``, with new numbers."""
        return replace(
            self, rank=ranks.index(self.rank), numbers=tuple(self.numbers[rank] for rank in ranks),
            machines=tuple(renumber_machines(self.machines, ranks)),
            listening=tuple(self.listening[rank] for rank in ranks if self.listening),
        )  # fmt: skip


class SupervisedRanks:
    """An implementation of motley.launch.ranks.Launched for the survivors of a launch.

    Args:
        rank: number of this rank among the survivors.
        size: number of survivors.
        here: numbers of the surviving ranks on this machine.
        gather: function that gathers a value from every rank, by rank.
    """

    def __init__(
        self, rank: int, size: int, here: Sequence[int], gather: Callable[[Any], list[Any]]
    ) -> None:
        self.rank, self.size, self._here, self._gather = rank, size, list(here), gather

    def allgather(self, value: T) -> list[T]:
        """Return the value of every rank, by rank; see Launched."""
        return self._gather(value)

    def on_this_machine(self) -> list[int]:
        """Return the ranks of this machine; see Launched."""
        return self._here


def packed(value: Any) -> str:
    """Return a value of any type as text that fits into a message.

    Raises:
        MotleyError: the text is longer than half the limit of a message.
    """
    text = base64.b64encode(pickle.dumps(value)).decode()
    if len(text) > MOST_BYTES // 2:
        raise MotleyError(f"a value of {len(text)} bytes is too long for an exchange between ranks")
    return text


def unpacked(text: str) -> Any:
    """Return the value that :func:`packed` has encoded. The sender must have sent the token."""
    return pickle.loads(base64.b64decode(text))


def parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield lists of consecutive texts, each small enough for one message.

    A list has as many texts as fit, since a thousand ranks may each receive a thousand values.
    """
    part, size = list[str](), 0
    for text in texts:
        if part and size + len(text) > _PART_BYTES:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    yield part


class Status(Protocol):
    """A protocol: the fields of a RankStatus (motley.membership.detector) that a regroup reads."""

    rank: int
    regroups: bool


class RegroupState:
    """The progress of a regroup on rank 0: lost ranks, copied states and gathered values.

    Args:
        machines: for each rank, the lowest rank on the same machine.
        survives: True if the launcher lets all other ranks live on when a rank dies.
    """

    def __init__(self, machines: Sequence[int], survives: bool) -> None:
        self._machines, self._survives = list(machines), survives
        self._lost: dict[int, Fault] = {}
        self._keeping: set[int] = set()
        self._witnessed: set[int] = set()  # lost ranks whose host is known to live
        self._gathered: dict[int, str] = {}
        self._since = 0.0
        self._meeting: Fault | None = (
            None  # the loss after which not all ranks have left the broken group yet
        )

    @property
    def first(self) -> Fault | None:
        """Fault of the first lost rank, which may have caused all others; None without a loss."""
        return next(iter(self._lost.values()), None)

    @property
    def waits(self) -> bool:
        """True from the loss of a rank until all ranks have left the group that broke."""
        return bool(self._lost) or self._meeting is not None

    @property
    def faults(self) -> list[Fault]:
        """Faults of all ranks that were lost together, in the order in which they were reported."""
        return list(self._lost.values())

    def lose(self, rank: int, fault: Fault, left: Collection[Status]) -> bool:
        """Record that a rank is lost; return True if the other ranks can probably continue.

        Args:
            rank: number of the lost rank in the present group.
            fault: fault of the lost rank.
            left: status of all ranks except lost ranks, this rank included.
        """
        ready = all(status.regroups for status in left)
        if not (self._survives and ready and fault.kind in _LOST):
            return False
        self._since = time.monotonic()
        if not self._lost:
            self._keeping = {status.rank for status in left}
        self._lost[rank] = fault
        self._keeping.discard(rank)
        return True

    def note_host_alive(self, rank: int) -> None:
        """Record that the host of a lost rank lives, so that mpirun's daemon on it lives too."""
        self._witnessed.add(rank)

    def all_hosts_live(self, left: Collection[Status]) -> bool:
        """Return True if the host of every lost rank lives, so that mpirun continues too."""
        alive = {self._machines[status.rank] for status in left}
        return all(self._machines[rank] in alive or rank in self._witnessed for rank in self._lost)

    def overdue(self, left: Collection[Status]) -> Fault | None:
        """Return the fault of the first lost rank if the regroup took too long, else None."""
        limit = _MEET_S
        if self.first is not None:
            limit = _KEEP_S if self.all_hosts_live(left) else _WITNESS_S
        late = time.monotonic() - self._since > limit
        return (self.first or self._meeting) if late else None

    def note_kept(self, rank: int) -> None:
        """Record that a rank has copied its state."""
        self._keeping.discard(rank)

    def survivors(self, left: Collection[Status]) -> Survivors | None:
        """Return the survivors; None while some rank is not ready, and None if no rank is lost."""
        if self.first is None or self._keeping or not self.all_hosts_live(left):
            return None
        ranks = tuple(sorted(status.rank for status in left))
        return Survivors(
            ranks, self.first, choose_standby(renumber_machines(self._machines, ranks))
        )

    def begin_anew(self, survivors: Survivors) -> None:
        """Start again for the next loss, with the survivors and their new numbers."""
        self._meeting, self._since = survivors.lost, time.monotonic()
        self._machines = renumber_machines(self._machines, survivors.ranks)
        self._lost.clear()
        self._witnessed.clear()
        self._gathered.clear()

    def gather(self, rank: int, text: str) -> list[str] | None:
        """Store a rank's value. Return all values, by rank, once all ranks have sent one."""
        self._gathered[rank] = text
        if len(self._gathered) < len(self._machines):
            return None
        self._meeting = None
        result = [self._gathered[rank] for rank in range(len(self._machines))]
        self._gathered.clear()
        return result


def choose_standby(machines: Sequence[int]) -> int:
    """Return the rank that reports when rank 0 cannot.

    A rank on another machine is preferred, because it does not freeze with the machine of rank 0.

    Args:
        machines: for each rank, the lowest rank on the same machine.
    """
    return min((rank for rank, machine in enumerate(machines) if machine != 0), default=1)


def renumber_machines(machines: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the machine of each rank of a new group, whose ranks are renumbered from 0.

    Args:
        machines: for each rank, the lowest rank on the same machine.
        ranks: old numbers of the ranks in the new group.

    Returns:
        For each new rank, the lowest new rank on the same machine.
    """
    staying = [machines[rank] for rank in ranks]
    return [staying.index(machine) for machine in staying]
