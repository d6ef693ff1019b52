"""All launched ranks: their hosts, addresses, and environment variables for the process group.

Every script of Motley starts through :func:`run`, and a user's own script through
:func:`start_rank`. On each machine, a thread of the lowest rank reports ranks of earlier jobs that
still hold GPU memory. A launch does not wait for this thread.
"""

import atexit
import contextlib
import copy
import errno
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from motley.cluster.facts import NodeFacts, read_node
from motley.cluster.launcher import Launcher, read_launch
from motley.cluster.network import (
    VARIABLES,
    Network,
    Receiver,
    list_networks,
    measure,
    next_in_ring,
    pick_network,
)
from motley.cluster.orphans import state, survey
from motley.errors import MotleyError
from motley.launch.process import (
    allow_files,
    die_with_parent,
    keep_caches_local,
    launched_local_rank,
    launched_rank,
    stop_usage,
)
from motley.launch.ranks import TORCHRUN_GROUP, Launched, MpiRanks, TcpRanks, check_size
from motley.launch.same_code import compare_code
from motley.launch.start_watch import StartClock, StartWatch
from motley.membership.supervisor import Supervisor
from motley.membership.survivors import SURVIVES, GroupPlace, SupervisedRanks, Survivors
from motley.text import typed_command


def why_not_free(port: int) -> str:
    """Return the reason why no process can listen on a port; empty if the port is free."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            return "another program listens on it" if taken else str(error.strerror)
    return ""


def reserve_port(address: str) -> socket.socket:
    """Return a socket that reserves a free port. The socket is bound, but does not listen.

    The kernel gives the port to no other program. torch can still listen on the port, because torch
    sets SO_REUSEADDR.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


_AGE_S = 10.0  # a younger rank may just be ending, after the previous job in a loop of jobs


def report_leftovers() -> None:
    """Start a thread that reports ranks of earlier runs on this machine, in one line."""
    threading.Thread(target=_look, name="leftovers", daemon=True).start()


def _look() -> None:
    with contextlib.suppress(
        Exception
    ):  # a process may end meanwhile, or a driver fail: the line is only advice
        here = survey()
        old = [
            each for each in here.processes
            if each.kind == "rank" and each.age_s > _AGE_S
            and state(each, [(here.node, here.mpiruns)]) == "leftover"
        ]  # fmt: skip
        if old:
            print(words(here.node, [each.pid for each in old]), file=sys.stderr, flush=True)


def words(host: str, pids: list[int]) -> str:
    """Return a sentence on the leftover processes ``pids`` of a host."""
    many = len(pids) > 1
    shown = ", ".join(map(str, pids[:8])) + (", ..." if len(pids) > 8 else "")
    return typed_command(
        f"  {host} still has {len(pids)} rank{'s' * many} of earlier runs (process{'es' * many} "
        f"{shown}), which may hold its GPU; end {'them' if many else 'it'} with: bash "
        "setup/clean_cn.sh"
    )


T = TypeVar("T")


class OneRank:
    """An implementation of :class:`Launched` for a process without a launcher, as in a notebook."""

    rank, size = 0, 1

    def allgather(self, value: T) -> list[T]:
        """Return a list with the value of the only rank; see Launched."""
        return [value]

    def on_this_machine(self) -> list[int]:
        """Return a list with the number of the only rank; see Launched."""
        return [0]


def ranks_of_launch(environ: Mapping[str, str] = os.environ) -> Launched:
    """Connect this rank to all others; all ranks call this function."""
    launch = read_launch(environ)
    if launch.by is Launcher.MPI:
        return MpiRanks()
    if launch.size == 1:
        return OneRank()
    return TcpRanks(launch, environ)


def run(
    main: Callable[["World"], None],
    launched: Launched | None = None,
    packages: Sequence[str] = (),
) -> None:
    """Start this rank, run ``main(world)``, and end together with all other ranks.

    If any rank raises an error, is killed or leaves early, all ranks end with a non-zero status
    within seconds. One printed line names the first cause.

    Args:
        main: the script's function, called with the world of this rank.
        launched: connected ranks that no launcher has started, as in tests; None: the ranks of the
            launcher.
        packages: packages that the script needs, besides those that all scripts need.
    """
    world = start_rank(launched, packages)
    try:
        main(world)
        world.supervisor.finish()
    except BaseException as error:  # SystemExit too: leaving early is a failure
        world.supervisor.fail(error)
    world.supervisor.end_without_lost()


def start_rank(launched: Launched | None = None, packages: Sequence[str] = ()) -> "World":
    """Connect this rank to all others, and start its supervisor. All ranks call this function.

    If the environment variables have an error, all ranks find the same error, and end with status
    2.

    Args:
        launched: connected ranks that no launcher has started, as in tests; None: the ranks of the
            launcher.
        packages: packages that the script needs, besides those that all scripts need.
    """
    clock = StartClock() if launched else StartClock.for_process()
    gc.freeze()  # see motley.launch
    gc.enable()
    atexit.register(gc.disable)
    atexit.register(gc.unfreeze)  # else libraries report the frozen objects as their leaks
    die_with_parent()
    keep_caches_local(os.environ)
    try:
        allow_files(read_launch().size, launched_rank() == 0)
        watch = None if launched else StartWatch()
        world = World(launched or ranks_of_launch(), clock)
        world.connect(packages)
    except MotleyError as error:  # the same on all ranks, and no rank listens yet
        stop_usage(str(error))
    if watch:
        watch.joined()
        if world.first_here:
            report_leftovers()
    threading.excepthook = partial(_end_with_thread, world.supervisor, threading.excepthook)
    return world


def _end_with_thread(
    supervisor: Supervisor,
    usual: Callable[[threading.ExceptHookArgs], object],
    ended: threading.ExceptHookArgs,
) -> None:
    """End the job if a thread has raised a MotleyError. Any other error ends only the thread."""
    if isinstance(ended.exc_value, MotleyError):
        supervisor.fail(ended.exc_value)
    usual(ended)


class World:
    """All launched ranks, as one rank sees them.

    Attributes:
        place: place of this rank among the surviving ranks. Records, messages and
            :class:`motley.plan.plan.Rank` name a rank by its number in the launch.
        local_rank: number of this rank among the ranks of this machine.
        local_size: number of ranks of this machine.
        nodes: facts of every rank's machine, by rank; after :meth:`connect`.
        network: this machine's interface and address on the subnet that all machines share.
        supervisor: object that reports the state of this rank to rank 0.
        clock: clock that measures the parts of this rank's start.
    """

    def __init__(self, launched: Launched, clock: StartClock) -> None:
        self._launched, self.clock = launched, clock
        check_size(launched.size, os.environ)
        check_alone(launched.size, os.environ)
        here = launched.on_this_machine()
        self.local_rank = launched_local_rank(here.index(launched.rank), os.environ)
        self.local_size = len(here)
        self.place = GroupPlace(
            launched.rank, socket.gethostname(), tuple(range(launched.size)),
            tuple(self.allgather(here[0])),
        )  # fmt: skip
        self.nodes: list[NodeFacts] = []
        self.network: Network
        self._written: set[str] = (
            set()
        )  # variables that join_group() sets, or that torchrun has set
        if read_launch().by is Launcher.TORCHRUN:
            self._written |= TORCHRUN_GROUP
        self._leader: int | None = None  # first rank of the group that was joined last
        self.supervisor = Supervisor(self.place)

    def __repr__(self) -> str:
        return (
            f"rank {self.rank} of {self.size} "
            f"(number {self.local_rank} of {self.local_size} on {self.host})"
        )

    @property
    def rank(self) -> int:
        """0-based number of this rank among the surviving ranks of the launch."""
        return self.place.rank

    @property
    def size(self) -> int:
        """Number of surviving ranks of the launch."""
        return self.place.size

    @property
    def host(self) -> str:
        """Name of this machine."""
        return self.place.host

    @property
    def numbers(self) -> Sequence[int]:
        """Number in the launch of each surviving rank."""
        return self.place.numbers

    @property
    def machines(self) -> Sequence[int]:
        """For each rank, the lowest rank on the same machine."""
        return self.place.machines

    @property
    def first_here(self) -> bool:
        """True if this is the lowest rank of its machine."""
        return self.machines[self.rank] == self.rank

    @property
    def number(self) -> int:
        """Number of this rank in the launch."""
        return self.place.number

    def allgather(self, value: T) -> list[T]:
        """Return the value of every rank, by rank. All ranks must call it."""
        return self._launched.allgather(value)

    def from_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0. All ranks return the result, or raise the error."""
        return self._from_some(make, self.rank == 0)[0]

    def once_per_node(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on the first rank of each machine while all other ranks wait.

        If ``work`` fails on any machine, every rank raises the first failure as a MotleyError.
        """
        return self._from_some(work, self.first_here)

    def _from_some(self, make: Callable[[], T], here: bool) -> list[T]:
        values: list[T] = []
        failure = None
        if here:
            try:
                values.append(make())
            except MotleyError as error:
                failure = str(error)
            except Exception as error:  # every rank must receive it, whatever it is
                failure = f"{type(error).__name__} on {self.host}: {error}"
        answers = self.allgather((values, failure))
        for _, failed in answers:
            if failed is not None:
                raise MotleyError(failed)
        return [value for made, _ in answers for value in made]

    def connect(self, packages: Sequence[str] = ()) -> None:
        """Compare the code of all ranks, exchange facts, choose a subnet, start the supervisor.

        Args:
            packages: packages that the script needs, besides those that all scripts need.
        """
        self.clock.lap(
            "imports"
        )  # all ranks have imported by now, since the constructor has waited for them
        compare_code(
            self.host, self.allgather, packages
        )  # first: the later exchanges may differ between versions
        port_of_user(self.allgather(os.environ.get("MASTER_PORT")))
        received = self.allgather(
            (read_node(), {name: os.environ.get(name, "") for name in VARIABLES})
        )
        self.nodes = [node for node, _ in received]
        machines = {
            machine: node.interfaces
            for machine, node in zip(self.machines, self.nodes, strict=True)
        }
        names = {machine: self.nodes[machine].host for machine in machines}
        candidates = list_networks(machines, names, {m: received[m][1] for m in machines})
        chosen = self._try_networks(candidates, names) if len(candidates) > 1 else 0
        self.network = candidates[chosen][self.machines[self.rank]]
        survives = os.environ.get(SURVIVES) == "1"  # keep_training.sh sets it for rank 0
        listening = self.supervisor.listen(self.network.address)
        told_ports = self.allgather((listening, survives))
        self.supervisor.join([port for port, _ in told_ports], told_ports[0][1])
        self.clock.lap("connect")

    def _try_networks(
        self, candidates: Sequence[Mapping[int, Network]], names: Mapping[int, str]
    ) -> int:
        """Try the candidate networks. Return the index of the fastest one; all ranks call it."""
        machines, own = sorted(names), self.machines[self.rank]
        addresses = [each[own].address for each in candidates] if self.first_here else []
        with Receiver(addresses) as receiver:
            doors = self.allgather((receiver.ports, receiver.token))
            answers = list[float | str]()
            if self.first_here:
                peer = next_in_ring(own, machines)
                at, (ports, token) = [each[peer].address for each in candidates], doors[peer]
                answers = measure(list(zip(at, ports, strict=True)), token)
            received = self.allgather(answers)
        chosen, words = pick_network(candidates, {m: received[m] for m in machines}, names)
        if self.rank == 0:
            print(f"motley: {words}", file=sys.stderr, flush=True)
        return chosen

    def among(self, ranks: Sequence[int], gather: Callable[[Any], list[Any]]) -> "World":
        """Return a World of some of the ranks, with new rank numbers.

        The new world does not use MPI, because MPI's collectives would include the other ranks.

        Args:
            ranks: the ranks of the new world; this rank is among them.
            gather: all-gather among these ranks, which returns each rank's value by the new number.
        """
        world = copy.copy(self)
        world.place = self.place.among(ranks)
        world.nodes = [self.nodes[rank] for rank in ranks]
        own = world.machines[world.rank]
        here = [rank for rank in range(world.size) if world.machines[rank] == own]
        world.local_size = len(here)
        world._launched = SupervisedRanks(world.rank, world.size, here, gather)
        world._leader = None
        return world

    def without_lost(self, survivors: Survivors) -> "World":
        """Return a World of the ranks that survived a loss; see :meth:`among`."""
        world = self.among(survivors.ranks, self.supervisor.gather)
        world.clock = StartClock()
        return world

    def has_fixed_master(self) -> bool:
        """Return True if the user has set MASTER_ADDR, the address of rank 0; all ranks call it."""
        return any(self.allgather("MASTER_ADDR" in {*os.environ} - self._written))

    def master(self) -> tuple[str, int]:
        """Return the address and port of the group's first rank, after :meth:`join_group`."""
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def join_group(self, participants: Sequence[int]) -> int | None:
        """Write the variables of ``env://`` that torch.distributed and DeepSpeed read.

        RANK and WORLD_SIZE count only the participants, which form the process group. If the user
        has set an address, port or interface, it is used. A rank or size that the user has set must
        not contradict the launcher. When the participants change, all ranks call this method again,
        including ranks that leave the group.

        Args:
            participants: the ranks that train, in order of their numbers in the group.

        Returns:
            This rank's number in the group; None if this rank does not take part.

        Raises:
            MotleyError: a variable that the user set cannot be used.
        """
        for name in self._written:
            os.environ.pop(name, None)
        self._written = set()
        address, port = self._meeting_place(participants[0])
        before = set(os.environ)
        if self.rank not in participants:
            return None
        here = [rank for rank in participants if self.machines[rank] == self.machines[self.rank]]
        group_rank = participants.index(self.rank)
        own = {
            "RANK": group_rank,
            "WORLD_SIZE": len(participants),
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": len(here),
        }
        set_rank_variables(own, os.environ)
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", str(port))
        for name in VARIABLES:
            os.environ.setdefault(name, self.network.interface)
        self._written = set(os.environ) - before
        return group_rank

    def hide_group(self) -> None:
        """Remove RANK and similar variables of :meth:`join_group`, once the group is formed.

        A script that finds RANK acts as one of torchrun's ranks, and forms a group of its own.
        """
        for name in self._written & TORCHRUN_GROUP:
            os.environ.pop(name, None)

    def _meeting_place(self, leader: int) -> tuple[str, int]:
        """Return the address and port at which rank ``leader`` will listen; all ranks call it."""
        if self.machines[leader] != self.machines[0] and self.has_fixed_master():
            raise MotleyError(
                "MASTER_ADDR is set, and rank 0's host does not train; unset it, or add "
                f"{self.nodes[0].host} to --hosts"
            )
        requested = port_of_user(self.allgather(os.environ.get("MASTER_PORT")))
        wrong = ""
        if self.rank == leader:
            self._reserved = reserve_port(self.network.address)
            if (
                requested is not None and self._leader != leader
            ):  # a port of the same leader may be in use by the previous group
                wrong = why_not_free(requested)
        self._leader = leader
        reserved = self._reserved.getsockname()[1] if self.rank == leader else 0
        offers = self.allgather((self.network.address, requested or reserved, wrong))
        address, port, wrong = offers[leader]
        if wrong:
            raise MotleyError(
                f"MASTER_PORT={port} cannot be used on {self.nodes[leader].host}: {wrong}. Choose "
                "another port, or unset MASTER_PORT to use a free one"
            )
        return address, port


def check_alone(size: int, environ: Mapping[str, str]) -> None:
    """Raise MotleyError if this process finds no other rank, but WORLD_SIZE is more than 1."""
    others = environ.get("WORLD_SIZE", "")
    if size == 1 and "RANK" in environ and others.isdigit() and int(others) > 1:
        raise MotleyError(
            f"the environment sets WORLD_SIZE={others}, but this process finds no other rank: an "
            "unknown launcher, such as DeepSpeed's, started it, or the variable is set in this "
            "shell. Start all ranks with mpirun, srun or torchrun and ./entry_cn.sh, or unset "
            "RANK and WORLD_SIZE"
        )


def set_rank_variables(own: Mapping[str, int], environ: Any) -> None:
    """Write RANK and similar variables. Raise MotleyError if one has another value already."""
    for name, value in own.items():
        result = environ.setdefault(name, str(value))
        if result != str(value):
            raise MotleyError(
                f"the environment sets {name}={result}, but the launcher started this process as "
                f"{name}={value}; unset {name}, which another launcher may have set"
            )


def port_of_user(said: Sequence[str | None]) -> int | None:
    """Return the MASTER_PORT that the user has set on some ranks; None if it is not set.

    All ranks then use this port.

    Args:
        said: value of MASTER_PORT on each rank, by rank; None: unset.

    Raises:
        MotleyError: a value is no port, or ranks have different ports.
    """
    ports = {text: rank for rank, text in enumerate(said) if text is not None}
    for text, rank in ports.items():
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 65535):
            raise MotleyError(
                f"MASTER_PORT={text!r} on rank {rank} is not a port; set it to a number from 1 to "
                "65535, or unset it to use a free one"
            )
    if len({int(text) for text in ports}) > 1:
        words = " and ".join(f"{text} on rank {rank}" for text, rank in ports.items())
        raise MotleyError(
            f"MASTER_PORT is {words}; set it to the same port on all ranks, or unset it"
        )
    return int(next(iter(ports))) if ports else None
