"""The process group of the ranks that train, with each rank's device, precision and cores."""

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from motley import ROOT
from motley.cluster.launcher import bind_process, choose_node, memory_nodes
from motley.comm.collectives import leave_group
from motley.engines.out_of_memory import get_uuid
from motley.errors import MotleyError
from motley.launch.world import World
from motley.measure.device import kernel_speed
from motley.membership.detector import PROGRESS_TIMEOUT_S
from motley.plan.plan import Rank, choose_participants
from motley.plan.precision import (
    PRECISIONS,
    PerRank,
    best_precision,
    best_precision_of_amd,
    named_hosts,
    read_precisions,
)
from motley.records.gpu_logger import GpuLogger, Progress
from motley.records.run_folder import RunFolder
from motley.text import INSTALL_TORCH

_FASTER = 1.3  # least speed relative to fp32 for which a lower precision is worth its rounding


def kept_workers(workers: Sequence[Rank], ranks: Collection[int]) -> tuple[Rank, ...]:
    """Return the workers whose numbers in the launch are in ``ranks``, with new group numbers."""
    staying = [worker for worker in workers if worker.rank in ranks]
    return tuple(replace(worker, group_rank=number) for number, worker in enumerate(staying))


def bind_to_device(world: World, device: torch.device) -> str:
    """Bind this rank to the cores of its GPU's memory node; return a description of these cores.

    The result is empty if the rank stays unbound.
    """
    has_gpu, near = device.type == "cuda", None
    if has_gpu:
        uuid = get_uuid(device)
        own = [each for each in world.nodes[world.rank].devices if each.uuid == uuid]
        near = own[0].memory_node if own else None
    node = choose_node(
        memory_nodes(), near, has_gpu, world.local_rank, world.local_size, os.sched_getaffinity(0)
    )
    if node is None:
        return ""
    bind_process(node.cores)
    return node.words()


def find_worker(own: Rank, device: torch.device, wanted: str) -> Rank:
    """Return this rank with its device, and with a precision that works on the device.

    Args:
        own: this rank.
        device: the device of this rank.
        wanted: a value of ``--precision`` for one rank: the name of a precision, or auto.

    Raises:
        MotleyError: the device has no kernel for the precision that the user wants.
    """
    name, uuid, maker = "cpu", "", ""
    if device.type == "cuda":
        name = f"{device} {torch.cuda.get_device_properties(device).name}"
        uuid, maker = get_uuid(device), "AMD" if torch.version.hip else "NVIDIA"
    precision, why = wanted, "asked for"
    if wanted == "auto":
        precision, why = confirmed(*promised_precision(device), device)
    speed = kernel_speed(device, precision, seconds=0.02)
    if speed.tflops is None:
        able = [p for p in PRECISIONS if kernel_speed(device, p, seconds=0.02).tflops is not None]
        other = "bash setup/install_cn.sh chooses" if ROOT else f"{INSTALL_TORCH} installs"
        fix = (
            f"the device supports {', '.join(able)}: choose one of these with --precision for "
            f"rank {own.group_rank}"
            if able
            else f"this torch has no kernels for the device: {other} a build that has them"
        )
        raise MotleyError(f"{own.host}, {name}: a {precision} kernel fails ({speed.error}); {fix}")
    return replace(own, device=name, uuid=uuid, precision=precision, why=why, maker=maker)


def promised_precision(device: torch.device) -> tuple[str, str]:
    """Return the precision in which a device of this type should be fast, and the reason."""
    if device.type != "cuda":
        return best_precision(None)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:  # on AMD the "compute capability" has another meaning
        return best_precision_of_amd(properties.gcnArchName)
    return best_precision((properties.major, properties.minor))


def confirmed(precision: str, why: str, device: torch.device) -> tuple[str, str]:
    """Return the precision if a real kernel is fast in it, else fp32; and the reason.

    A device may claim to support a precision, and emulate it more slowly than fp32.

    Args:
        precision: precision in which a device of this type should be fast.
        why: reason why the device should be fast in this precision.
        device: the device.
    """
    if precision == "fp32":
        return precision, why
    fast = kernel_speed(device, precision, seconds=0.02).tflops or 0.0
    plain = kernel_speed(device, "fp32", seconds=0.02).tflops or 0.0
    if fast > _FASTER * plain:
        return precision, why
    return "fp32", f"{why}, but {precision} reaches {fast:.3g} TFLOP/s here, fp32 {plain:.3g}"


_RCCL = "RCCL "
# Timeout of a collective. The supervisor ends the job long before, and can name the rank.
_TIMEOUT = timedelta(seconds=2 * PROGRESS_TIMEOUT_S)


@dataclass(frozen=True)
class ProcessGroup:
    """The process group of all ranks that train, on one launched rank.

    Attributes:
        rank: this rank's number in the process group; None if it is left out.
        workers: facts of each rank that trains, by its number in the group.
        left_out: launched ranks that do not train, with the reasons.
        device: device of this rank.
        backend: nccl or gloo.
    """

    rank: int | None
    workers: tuple[Rank, ...]
    left_out: tuple[Rank, ...]
    device: torch.device
    backend: str

    @property
    def size(self) -> int:
        """Number of ranks that train."""
        return len(self.workers)

    @property
    def has_gpus(self) -> bool:
        """True if some rank computes on a GPU."""
        return any(worker.maker for worker in self.workers)

    @property
    def is_mixed(self) -> bool:
        """True if some ranks have a GPU and some have none, or if GPUs are of two makers.

        No backend can send tensors from the memory of every device of such a group.
        """
        return len({worker.maker for worker in self.workers}) > 1

    @property
    def kinds(self) -> str:
        """Text that names the kinds of devices."""
        makers = sorted({worker.maker for worker in self.workers})
        if len(makers) < 3 and "" in makers:
            return "GPUs and CPUs"
        return " and ".join(f"{maker} GPUs" if maker else "CPUs" for maker in makers[::-1])

    def ranks(self, world: World) -> list[int]:
        """Return each worker's number among the surviving ranks of the launch."""
        return [world.numbers.index(worker.rank) for worker in self.workers]

    def machines(self, world: World) -> list[int]:
        """Return the machine of each rank, since several machines may have the same host name."""
        return [world.machines[rank] for rank in self.ranks(world)]

    def describe_left_out(self) -> list[str]:
        """Return one line per reason, with the ranks that are left out for that reason."""
        ranks: dict[str, list[str]] = {}
        for entry in self.left_out:
            ranks.setdefault(entry.reason, []).append(f"rank {entry.rank} on {entry.host}")
        return [
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} left out: {reason}"
            for reason, names in ranks.items()
        ]

    def without_lost(self, numbers: Collection[int]) -> "ProcessGroup":
        """Return a description of the group of the surviving ranks, before they join it.

        Args:
            numbers: numbers of the surviving ranks in the launch.
        """
        left_out = tuple(entry for entry in self.left_out if entry.rank in numbers)
        return replace(self, workers=kept_workers(self.workers, numbers), left_out=left_out)

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precision of each rank."""
        return tuple(worker.precision for worker in self.workers)


def join_process_group(
    world: World,
    precision: PerRank[str] | None = None,
    hosts: str | tuple[str, ...] = "all",
    bind: bool = True,
) -> ProcessGroup:
    """Decide which ranks train, and join their process group.

    Every launched rank calls this function.

    The backend is NCCL if every rank that trains has a GPU, all of one maker. For AMD's GPUs,
    torch's NCCL is RCCL. Otherwise all ranks use gloo.

    Args:
        world: the ranks.
        precision: value of ``--precision``; None: auto.
        hosts: value of ``--hosts``.
        bind: True: bind each rank to the cores of its GPU's memory node.
    """
    check_nccl(world)
    known = range(torch.cuda.device_count())
    gpus = tuple(get_uuid(torch.device("cuda", index)) for index in known)
    machine = world.machines[world.rank]
    launched = world.allgather(Rank(world.rank, world.host, machine, world.local_rank, gpus))
    named = named_hosts(hosts, [each.host for each in launched])
    chosen = choose_participants(launched, named)
    participants = [each.rank for each in chosen if not each.reason]
    rank, own = world.join_group(participants), chosen[world.rank]
    device = torch.device("cpu")
    if own.gpu is not None:
        device = torch.device("cuda", own.gpu)
        torch.cuda.set_device(device)
    wanted = (precision or read_precisions("auto")).for_ranks(len(participants))
    if rank is not None:
        cores = bind_to_device(world, device) if bind else ""
        own = replace(own, group_rank=rank, cores=cores)
        own = find_worker(own, device, wanted[rank])
    ranks = world.allgather(own)
    workers = tuple(each for each in ranks if not each.reason)
    left_out = tuple(each for each in ranks if each.reason)
    return ProcessGroup(rank, workers, left_out, device, _connect(world, rank, workers, device))


def _connect(world: World, rank: int | None, workers: Sequence[Rank], device: torch.device) -> str:
    """Create the process group, and return its backend. Every launched rank calls it."""
    if rank == 0:  # init_process_group uses this store, since the port is the same
        host, port = world.master()
        _store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, len(workers), is_master=True, timeout=_TIMEOUT,
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    world.allgather(None)  # a rank that connects too early retries only after 0.5 s
    if {worker.maker for worker in workers} not in ({"NVIDIA"}, {"AMD"}):
        if rank is not None:
            dist.init_process_group("gloo", timeout=_TIMEOUT)
        return "gloo"
    if rank is not None:
        # A GPU has few queues. In the queue of the model's kernels, a long all-reduce would stop
        # the kernels that run beside it. Streams of another priority have queues of their own.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = _TIMEOUT  # else torch warns that it is another
        # Otherwise torch ends this process a minute after the group has lost a rank, even if the
        # process continues without it. motley.membership.supervisor decides what to do.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        dist.init_process_group("nccl", timeout=_TIMEOUT, device_id=device, pg_options=options)
    return "nccl"


def shrink_group(
    world: World, group: ProcessGroup, ranks: Collection[int], reasons: Mapping[int, str]
) -> ProcessGroup:
    """Continue with some launched ranks alone, and return their group.

    Every launched rank calls this function.

    Args:
        world: the ranks.
        group: the former process group.
        ranks: the launched ranks that stay.
        reasons: reason why each other rank is left out, by launched rank.
    """
    if group.rank is not None:
        leave_process_group()
    workers = kept_workers(group.workers, ranks)
    out = [
        replace(each, reason=reasons[each.rank]) for each in group.workers if each.rank not in ranks
    ]
    left_out = sorted([*group.left_out, *out], key=lambda entry: entry.rank)
    rank = world.join_group([worker.rank for worker in workers])
    backend = _connect(world, rank, workers, group.device)
    return ProcessGroup(rank, workers, tuple(left_out), group.device, backend)


def reconnected(world: World, group: ProcessGroup) -> ProcessGroup:
    """Join a new process group of the same ranks; every rank of ``world`` calls it."""
    rank = world.join_group(group.ranks(world))
    return replace(group, rank=rank, backend=_connect(world, rank, group.workers, group.device))


def check_nccl(world: World) -> None:
    """Raise MotleyError unless all ranks with a GPU of one maker have one version of NCCL.

    Different versions cannot communicate. NCCL is part of torch, and may differ between builds of
    one release.
    """
    result = world.allgather(nccl_version())
    ranks = {version: rank for rank, version in reversed(list(enumerate(result))) if version}
    if len(ranks) > len({version.startswith(_RCCL) for version in ranks}):
        listed = ", ".join(
            f"{version} on {world.nodes[rank].host}" for version, rank in sorted(ranks.items())
        )
        raise MotleyError(
            f"the hosts have different versions of NCCL ({listed}); make them the same with: "
            "bash setup/install_cn.sh"
        )


def nccl_version() -> str:
    """Return the version of NCCL, such as ``2.27.3`` or ``RCCL 2.22.3``; empty without a GPU."""
    if not torch.cuda.is_available():
        return ""
    maker = _RCCL if torch.version.hip else ""
    return maker + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def leave_process_group() -> None:
    """Leave the process group."""
    leave_group()


def gpu_logger(
    world: World,
    group: ProcessGroup,
    folder: RunFolder,
    progress: Callable[[], Progress] = Progress,
    interval: float = 2.0,
) -> contextlib.AbstractContextManager[object]:
    """Return a context manager in which this machine's lowest rank logs the machine's GPUs.

    On other ranks the context manager does nothing.

    Args:
        world: the ranks.
        group: process group of the ranks that train.
        folder: folder of the run.
        progress: function that returns the position of the training.
        interval: seconds between samples.
    """
    if not world.first_here:
        return contextlib.nullcontext()
    machines = group.machines(world)
    here = [
        worker for worker, machine in zip(group.workers, machines, strict=True)
        if machine == world.rank
    ]  # fmt: skip
    lowest = here[0].rank if here else world.number  # no rank trains here
    ranks = {"": lowest} | {worker.uuid: worker.rank for worker in here if worker.uuid}
    return GpuLogger(folder.gpu_log(world.host), world.host, ranks, progress, interval)
