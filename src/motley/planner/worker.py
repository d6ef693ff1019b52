"""One rank that trains: its device, the precision in which that computes, the cores next to it."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from motley.cluster.binding import bind_process, choose_node, memory_nodes
from motley.engines.memory import uuid_of
from motley.errors import MotleyError
from motley.launch.world import World
from motley.measure.kernels import kernel_speed
from motley.plan.precision import PRECISIONS, best_precision, best_precision_of_amd

_FASTER = 1.3  # than fp32: below it a lower precision is not worth its rounding


@dataclass(frozen=True)
class Worker:
    """One rank that trains, as run.json lists it.

    Attributes:
        rank: in the launch, as errors and file names call it; it never changes.
        group_rank: in the process group; among the ranks that are left, those that train are
            counted.
        device: for example ``cuda:0 NVIDIA H200`` or ``cpu``.
        uuid: of its GPU; empty without one.
        why: why this precision.
        cores: that it is kept on, in words; empty: any.
        maker: of its GPU, NVIDIA or AMD; empty without one.
    """

    rank: int
    group_rank: int
    host: str
    device: str
    uuid: str
    precision: str
    why: str
    cores: str = ""
    maker: str = ""


def kept_workers(workers: Sequence[Worker], ranks: Collection[int]) -> tuple[Worker, ...]:
    """Workers of these ranks of the launch, with new numbers in the process group."""
    kept = [worker for worker in workers if worker.rank in ranks]
    return tuple(replace(worker, group_rank=number) for number, worker in enumerate(kept))


def bind_to_device(world: World, device: torch.device) -> str:
    """Keep this rank next to its device; says where that is, nothing where it may be anywhere."""
    has_gpu, near = device.type == "cuda", None
    if has_gpu:
        uuid = uuid_of(device)
        own = [each for each in world.nodes[world.rank].devices if each.uuid == uuid]
        near = own[0].memory_node if own else None
    node = choose_node(
        memory_nodes(), near, has_gpu, world.local_rank, world.local_size, os.sched_getaffinity(0)
    )
    if node is None:
        return ""
    bind_process(node.cores)
    return node.words()


def find_worker(rank: int, world: World, device: torch.device, wanted: str, cores: str) -> Worker:
    """This rank, with a precision in which its device really computes; MotleyError if there is no
    kernel for the one that is asked for.

    Args:
        rank: in the process group. wanted: a precision, or auto. cores: that it is kept on.
    """
    name, uuid, maker = "cpu", "", ""
    if device.type == "cuda":
        name = f"{device} {torch.cuda.get_device_properties(device).name}"
        uuid, maker = uuid_of(device), "AMD" if torch.version.hip else "NVIDIA"
    precision, why = wanted, "asked for"
    if wanted == "auto":
        precision, why = confirmed(*promised_precision(device), device)
    speed = kernel_speed(device, precision, seconds=0.02)
    if speed.tflops is None:
        able = [p for p in PRECISIONS if kernel_speed(device, p, seconds=0.02).tflops is not None]
        fix = (
            f"it can do {', '.join(able)}: choose one with --precision for rank {rank}"
            if able
            else "this torch has no kernels for it: bash setup/install_cn.sh chooses one that has"
        )
        raise MotleyError(
            f"{world.host}, {name}: a {precision} kernel fails ({speed.error}); {fix}"
        )
    return Worker(world.number, rank, world.host, name, uuid, precision, why, cores, maker)


def promised_precision(device: torch.device) -> tuple[str, str]:
    """The precision that a device should run fast, by what its maker calls it, and why."""
    if device.type != "cuda":
        return best_precision(None)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:  # whose "compute capability" is another number
        return best_precision_of_amd(properties.gcnArchName)
    return best_precision((properties.major, properties.minor))


def confirmed(precision: str, why: str, device: torch.device) -> tuple[str, str]:
    """The precision that a capability promises, if a real kernel keeps it; else fp32.

    A claim of support can be emulation, slower than fp32.
    """
    if precision == "fp32":
        return precision, why
    fast = kernel_speed(device, precision, seconds=0.02).tflops or 0.0
    plain = kernel_speed(device, "fp32", seconds=0.02).tflops or 0.0
    if fast > _FASTER * plain:
        return precision, why
    return "fp32", f"{why}, but {precision} does {fast:.3g} TFLOP/s here and fp32 {plain:.3g}"
