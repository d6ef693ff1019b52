"""The processes of one launch, joined by MPI or by TCP.

MPI has no other user than this module. TCP joins ranks that torchrun starts, or srun without PMIx.

Ranks are started by ``mpirun`` (Open MPI 4.1 or 5) or ``srun --mpi=pmix``.

They meet at rank 0, on the first node that the environment names, and talk through it. Both ends
prove that they know a secret of this user's, by multiprocessing.connection's challenges: ports can
be guessed, and what ranks say to each other is pickled.
"""

import contextlib
import hashlib
import hmac
import os
import pickle
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Protocol, TypeVar

from motley.cluster.account import home_folder
from motley.cluster.hostfile import expand_nodes
from motley.cluster.launcher import Launch, Launcher
from motley.errors import MotleyError
from motley.launch.start_watch import start_timeout

_T = TypeVar("_T")
_AT_ONCE = 50  # looks whether a message has come, without a rest; then with these between:
_SHORTEST_S, _LONGEST_S = 5e-5, 1e-3


class Launched(Protocol):
    """The processes of one launch, seen from one of them: :class:`MpiRanks`.

    Attributes:
        rank, size: 0-based number of this process, of how many.
    """

    rank: int
    size: int

    def allgather(self, value: _T) -> list[_T]:
        """Every rank's value, by rank. All ranks must call it."""

    def on_this_machine(self) -> list[int]:
        """Return the ranks of this machine, in order. All ranks must call it."""


class MpiRanks:
    """Implements :class:`Launched` for mpirun and srun."""

    def __init__(self) -> None:
        # Where Open MPI 5 has no use for libfabric's one-sided transport, it sleeps for a second
        # when it closes it; what ranks say to each other here has none either.
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")
        from mpi4py import MPI  # importing it starts MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size

    def allgather(self, value: _T) -> list[_T]:
        """Gather a value from each rank, in rounds. See :class:`Launched`.

        In round k each rank sends all values it has to the rank 2^k before it. After log2(size)
        rounds all ranks have all values (Bruck et al. 1997).
        """
        known = {self.rank: value}
        distance = 1
        while distance < self.size:
            sent = self._comm.isend(known, (self.rank - distance) % self.size)
            sender = (self.rank + distance) % self.size
            came = _wait_for(partial(self._comm.improbe, source=sender))
            known = known | came.recv()
            _wait_for(sent.Test)
            distance *= 2
        return [known[rank] for rank in range(self.size)]

    def on_this_machine(self) -> list[int]:
        """See :class:`Launched`; by shared memory, since host names may be all alike."""
        self.allgather(None)  # it is over soon where all have come
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
        ranks: list[int] = node.allgather(self.rank)
        return ranks


def _wait_for(look: Callable[[], Any]) -> Any:
    """Return what ``look`` finds, once it does.

    MPI's own waiting never sleeps, and so takes the processor from ranks that are waited for, where
    ranks share one, or from other users.
    """
    looks, pause_s = 0, _SHORTEST_S
    while not (result := look()):
        looks += 1
        if looks < _AT_ONCE:
            os.sched_yield()
        else:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
    return result


def finalize_mpi() -> None:
    """Leave MPI, if this process is in it; all ranks do."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def check_size(size: int, environ: Mapping[str, str]) -> None:
    """Raise MotleyError if the launcher started several ranks that cannot see each other."""
    if size > 1 or "OMPI_COMM_WORLD_SIZE" in environ:
        return
    tasks, ranks = (_several(environ, name) for name in ("SLURM_STEP_NUM_TASKS", "PMI_SIZE"))
    if tasks:
        raise MotleyError(
            f"Slurm started {tasks} tasks but MPI sees one: its PMIx and that of MPI do not fit; "
            "start them with srun --mpi=none, or with mpirun inside the allocation"
        )
    if ranks:
        raise MotleyError(
            f"the launcher started {ranks} ranks but MPI sees one: the launcher is of another MPI "
            "(MPICH, Intel MPI) than mpi4py; start them with the mpirun of setup/make_env.sh, or "
            "with torchrun"
        )


def _several(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable if it is more than 1, else 0."""
    digits = environ.get(name, "")
    return int(digits) if digits.isdigit() and int(digits) > 1 else 0


# Variables of torchrun for torch.distributed; its group is not that of the training ranks.
TORCHRUN_GROUP = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
})  # fmt: skip

SECRET_VARIABLE = "MOTLEY_SECRET"
_PORTS = 8  # one of these, next to each other: others may be another job's
_FIRST_PORT, _LAST_PORT = 20000, 32000  # below those that systems give out
_PROOF_S = 5.0  # that a challenge may take
_MOST_STRANGERS = 64
_AGAIN_S = 0.2  # between looks whether rank 0 is there
_RANK = struct.Struct("!I")


class TcpRanks:
    """Implements motley.launch.ranks.Launched.

    Raises:
        MotleyError: the others are not found in time, or the environment does not say where.
    """

    def __init__(self, launch: Launch, environ: Mapping[str, str] = os.environ) -> None:
        self.rank, self.size = launch.rank, launch.size
        job, address, first_port = meeting_point(launch, environ)
        key = hmac.digest(secret(environ).encode(), f"{job} {self.size}".encode(), "sha256")
        seconds = start_timeout(environ) or float("inf")
        ports = range(first_port, first_port + _PORTS)
        if self.rank == 0:
            self._lines = _answer(ports, key, self.size, seconds)
        else:
            self._lines = [_call(address, ports, key, self.rank, seconds)]

    def allgather(self, value: _T) -> list[_T]:
        """See Launched."""
        try:
            if self.rank == 0:
                values: list[_T] = [value, *(line.recv() for line in self._lines)]
                data = pickle.dumps(values)
                for line in self._lines:
                    line.send_bytes(data)  # what recv() reads
            else:
                self._lines[0].send(value)
                values = self._lines[0].recv()
        except (EOFError, OSError) as error:  # the rank that is gone has said why
            raise ConnectionResetError("connection closed by another rank") from error
        return values

    def on_this_machine(self) -> list[int]:
        """Return the ranks on this machine. See Launched.

        A machine is identified by the kernel's id of this boot and by the host's name, which
        differs in containers of one machine that are to be hosts of their own.
        """
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        own = boot, socket.gethostname()
        return [rank for rank, other in enumerate(self.allgather(own)) if other == own]


def meeting_point(launch: Launch, environ: Mapping[str, str]) -> tuple[str, str, int]:
    """Return the job's name, rank 0's address, and the first of the ports that it may listen on.

    Raises:
        MotleyError: the environment lacks one of them.
    """
    try:
        if launch.by is Launcher.TORCHRUN:
            address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
            return f"torchrun {address} {port}", address, port + 1  # at that one it listens
        job = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_NODELIST"]
        number = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
        port = _FIRST_PORT + number % (_LAST_PORT - _FIRST_PORT) // _PORTS * _PORTS
        return f"slurm {job}", environ.get("MASTER_ADDR") or expand_nodes(nodes)[0], port
    except (KeyError, ValueError, IndexError) as error:
        raise MotleyError(
            f"{launch.by.value} started this as rank {launch.rank} of {launch.size}, and the "
            f"environment does not say where rank 0 is ({error}); start it with mpirun"
        ) from None


def secret(environ: Mapping[str, str]) -> str:
    """Return a secret that only this user's processes know: a variable, or a file of their home.

    Raises:
        MotleyError: the file is open to others, or cannot be made.
    """
    if given := environ.get(SECRET_VARIABLE):
        return given
    path = home_folder() / ".motley/secret"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not path.exists():
            own = path.with_name(f"secret.{secrets.token_hex(8)}")
            own.touch(mode=0o600)
            own.write_text(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another rank was quicker
                path.hardlink_to(own)
            own.unlink()
        result = path.stat()
        if result.st_uid == os.getuid() and not result.st_mode & 0o077:
            return path.read_text()
        wrong = "it belongs to another user, or others can read it"
    except OSError as error:
        wrong = error.strerror or str(error)
    raise MotleyError(
        f"{path}: {wrong}; ranks know each other by it: remove it, or set {SECRET_VARIABLE} to the "
        "same on all"
    )


def _answer(ports: range, key: bytes, size: int, seconds: float) -> list[Connection]:
    """Rank 0: the connections of all others, by rank."""
    deadline, result = time.monotonic() + seconds, dict[int, Connection]()
    came: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
    room = threading.Semaphore(_MOST_STRANGERS)

    def admit(line: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError, struct.error, ValueError):
            connection = _proven(line, key, first=False)
            (rank,) = _RANK.unpack(connection.recv_bytes(_RANK.size))
            _wait(connection, None)
            came.put((rank, connection))
        room.release()

    with _listener(ports) as listener:
        listener.settimeout(_AGAIN_S)
        while len(result) < size - 1 and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError, ConnectionError):
                line, _ = listener.accept()
                if room.acquire(blocking=False):
                    threading.Thread(target=admit, args=(line,), daemon=True).start()
                else:  # strangers; a rank comes again
                    line.close()
            while not came.empty():
                rank, connection = came.get()
                if 0 < rank < size:
                    result.setdefault(rank, connection)
    if len(result) < size - 1:
        missing = sorted({*range(1, size)} - {*result})
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise MotleyError(f"of {size} ranks, {shown} did not come to rank 0 in {seconds:.0f} s")
    return [result[rank] for rank in range(1, size)]


def _listener(ports: range) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=1024)
    raise MotleyError(
        f"other programs listen on all ports from {ports[0]} to {ports[-1]} of "
        f"{socket.gethostname()}, where the ranks were to meet; start it again"
    )


def _call(address: str, ports: range, key: bytes, rank: int, seconds: float) -> Connection:
    """Another rank: the connection to rank 0."""
    deadline, why = time.monotonic() + seconds, "no process listens there"
    while time.monotonic() < deadline:
        for port in ports:
            try:
                line = socket.create_connection((address, port), timeout=_PROOF_S)
                connection = _proven(line, key, first=True)
                connection.send_bytes(_RANK.pack(rank))
                _wait(connection, None)
                return connection
            except AuthenticationError:
                why = (
                    f"somebody with another secret listens there: set {SECRET_VARIABLE} to the "
                    "same on all ranks, where they do not share a home"
                )
            except (OSError, EOFError) as error:
                if not isinstance(error, ConnectionRefusedError | EOFError):
                    why = str(error)
        time.sleep(_AGAIN_S)
    raise MotleyError(
        f"rank {rank} did not find rank 0 at {address}, ports {ports[0]} to {ports[-1]}, in "
        f"{seconds:.0f} s: {why}; MASTER_ADDR names another address of it"
    )


def _proven(line: socket.socket, key: bytes, first: bool) -> Connection:
    """Return a connection after both ends have proved that they have the key.

    Args:
        line: the connected socket.
        key: the shared key.
        first: True if this end is challenged first.
    """
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.settimeout(None)
    connection = Connection(line.detach())
    _wait(connection, _PROOF_S)
    for challenged in (first, not first):
        (answer_challenge if challenged else deliver_challenge)(connection, key)
    return connection


def _wait(connection: Connection, seconds: float | None) -> None:
    """How long a read from it may take; None: as long as it takes."""
    whole = 0.0 if seconds is None else seconds
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        value = struct.pack("ll", int(whole), int(whole % 1 * 1e6))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
