"""The processes of one launch, which communicate by MPI or by TCP.

Only this module uses MPI. Ranks use MPI if ``mpirun`` (Open MPI 4.1 or 5) or ``srun --mpi=pmix``
has started them. Ranks use TCP if torchrun, or srun without PMIx, has started them.

TCP ranks connect to rank 0, on the first node that the environment names, and exchange values
through rank 0. Both ends of a connection prove that they know a secret of this user, by the
challenges of multiprocessing.connection. The proof is needed because ports can be guessed, and
because ranks exchange pickled values.
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
# Polls for a message without a pause; later ones have pauses between these two bounds.
_AT_ONCE = 50
_SHORTEST_S, _LONGEST_S = 5e-5, 1e-3


class Launched(Protocol):
    """A protocol: the processes of one launch, as one process sees them; see :class:`MpiRanks`.

    Attributes:
        rank: 0-based number of this process.
        size: number of processes.
    """

    rank: int
    size: int

    def allgather(self, value: _T) -> list[_T]:
        """Return the value of every rank, by rank. All ranks must call it."""

    def on_this_machine(self) -> list[int]:
        """Return the numbers of the ranks on this machine, ascending. All ranks must call it."""


class MpiRanks:
    """An implementation of :class:`Launched` for mpirun and srun."""

    def __init__(self) -> None:
        # Open MPI 5 sleeps for a second when it closes an unused one-sided transport of libfabric.
        # The exchange of values here does not need that transport.
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
        """Return the ranks of this machine; see :class:`Launched`.

        MPI finds these ranks by shared memory, since several machines may have the same host name.
        """
        self.allgather(None)  # sleeps while it waits, so that Split_type need not wait
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
        ranks: list[int] = node.allgather(self.rank)
        return ranks


def _wait_for(look: Callable[[], Any]) -> Any:
    """Call ``look`` until it returns a true value, and return that value.

    MPI itself waits without sleep. This would take processor time from other users, and from late
    ranks that share the processor.
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
    """Call MPI_Finalize if this process has started MPI. All ranks call this function."""
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
            f"Slurm started {tasks} tasks, but MPI finds one: the PMIx versions of Slurm and of "
            "MPI are not compatible. Start the ranks with srun --mpi=none, or with mpirun inside "
            "the allocation"
        )
    if ranks:
        raise MotleyError(
            f"the launcher started {ranks} ranks, but MPI finds one: the launcher is of another "
            "MPI (MPICH, Intel MPI) than mpi4py. Start the ranks with the mpirun of "
            "setup/make_env.sh, or with torchrun"
        )


def _several(environ: Mapping[str, str], name: str) -> int:
    """Return the number in the variable ``name`` if it is more than 1, else 0."""
    digits = environ.get(name, "")
    return int(digits) if digits.isdigit() and int(digits) > 1 else 0


# Variables of torchrun for torch.distributed; its group is not that of the training ranks.
TORCHRUN_GROUP = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
})  # fmt: skip

SECRET_VARIABLE = "MOTLEY_SECRET"
_PORTS = 8  # consecutive ports that are tried, since another job may hold some of them
_FIRST_PORT, _LAST_PORT = 20000, 32000  # below the ports that systems assign
_PROOF_S = 5.0  # seconds that a challenge may take
_MOST_STRANGERS = 64
_AGAIN_S = 0.2  # seconds between attempts to connect to rank 0
_RANK = struct.Struct("!I")


class TcpRanks:
    """An implementation of motley.launch.ranks.Launched by TCP connections to rank 0.

    Raises:
        MotleyError: some rank did not connect in time, or the environment does not name rank 0's
            address.
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
        """Return the value of every rank, by rank; see Launched.

        Raises:
            ConnectionResetError: another rank has ended.
        """
        try:
            if self.rank == 0:
                values: list[_T] = [value, *(line.recv() for line in self._lines)]
                data = pickle.dumps(values)
                for line in self._lines:
                    line.send_bytes(data)  # what recv() reads
            else:
                self._lines[0].send(value)
                values = self._lines[0].recv()
        except (EOFError, OSError) as error:  # the rank that ended has printed the reason
            raise ConnectionResetError("connection closed by another rank") from error
        return values

    def on_this_machine(self) -> list[int]:
        """Return the ranks on this machine; see Launched.

        A machine is identified by the kernel's id of this boot and by the host's name. Containers
        on one machine that have different host names count as different machines.
        """
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        own = boot, socket.gethostname()
        return [rank for rank, other in enumerate(self.allgather(own)) if other == own]


def meeting_point(launch: Launch, environ: Mapping[str, str]) -> tuple[str, str, int]:
    """Return the job's name, the address of rank 0, and the first port that rank 0 tries.

    Raises:
        MotleyError: the environment does not name the job, the address or the port.
    """
    try:
        if launch.by is Launcher.TORCHRUN:
            address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
            return (
                f"torchrun {address} {port}",
                address,
                port + 1,
            )  # torchrun itself listens on MASTER_PORT
        job = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_NODELIST"]
        number = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
        port = _FIRST_PORT + number % (_LAST_PORT - _FIRST_PORT) // _PORTS * _PORTS
        return f"slurm {job}", environ.get("MASTER_ADDR") or expand_nodes(nodes)[0], port
    except (KeyError, ValueError, IndexError) as error:
        raise MotleyError(
            f"{launch.by.value} started this process as rank {launch.rank} of {launch.size}, but "
            f"the environment does not name the address of rank 0 (missing: {error}); start the "
            "ranks with mpirun"
        ) from None


def secret(environ: Mapping[str, str]) -> str:
    """Return a secret that only this user can read, from a variable or a file in the home.

    Raises:
        MotleyError: other users can read the file, or the file cannot be made.
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
        f"{path} holds the secret by which ranks recognise each other: {wrong}. Remove the file, "
        f"or set {SECRET_VARIABLE} to one value on all ranks"
    )


def _answer(ports: range, key: bytes, size: int, seconds: float) -> list[Connection]:
    """Accept the connections of all other ranks on rank 0, and return them by rank.

    Args:
        ports: ports to try; rank 0 listens on the first free port.
        key: shared key that a connecting rank must prove to know.
        size: number of ranks.
        seconds: seconds to wait for all ranks.

    Raises:
        MotleyError: a rank did not connect in time, or no port is free.
    """
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
                else:  # too many strangers; a rank tries again
                    line.close()
            while not came.empty():
                rank, connection = came.get()
                if 0 < rank < size:
                    result.setdefault(rank, connection)
    if len(result) < size - 1:
        missing = sorted({*range(1, size)} - {*result})
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise MotleyError(
            f"{shown} of {size} ranks did not connect to rank 0 within {seconds:.0f} s"
        )
    return [result[rank] for rank in range(1, size)]


def _listener(ports: range) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=1024)
    raise MotleyError(
        f"other programs use all ports from {ports[0]} to {ports[-1]} on {socket.gethostname()}, "
        "on one of which the ranks connect to rank 0; start the job again"
    )


def _call(address: str, ports: range, key: bytes, rank: int, seconds: float) -> Connection:
    """Connect to rank 0 and return the connection; every other rank calls this.

    Args:
        address: address of rank 0.
        ports: ports on which rank 0 may listen.
        key: shared key that both ends must prove to know.
        rank: number of this rank.
        seconds: seconds to try.

    Raises:
        MotleyError: rank 0 was not found within ``seconds``.
    """
    deadline, why = time.monotonic() + seconds, "no process listens on these ports"
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
                    f"a process with another secret listens there; set {SECRET_VARIABLE} to one "
                    "value on all ranks if they do not share a home"
                )
            except (OSError, EOFError) as error:
                if not isinstance(error, ConnectionRefusedError | EOFError):
                    why = str(error)
        time.sleep(_AGAIN_S)
    raise MotleyError(
        f"rank {rank} did not reach rank 0 at {address}, ports {ports[0]} to {ports[-1]}, within "
        f"{seconds:.0f} s: {why}. If rank 0 has another address, set MASTER_ADDR to it"
    )


def _proven(line: socket.socket, key: bytes, first: bool) -> Connection:
    """Return a connection after both ends have proved that they know the key.

    Args:
        line: the connected socket.
        key: the shared key.
        first: True if this end is challenged first.

    Raises:
        AuthenticationError: the other end has another key.
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
    """Set the time limit of reads and writes on a connection, in seconds; None: no limit."""
    whole = 0.0 if seconds is None else seconds
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        value = struct.pack("ll", int(whole), int(whole % 1 * 1e6))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
