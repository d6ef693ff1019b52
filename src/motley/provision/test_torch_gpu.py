"""Check that every rank can compute; show each rank's device, versions and speed of a kernel.

    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/test_torch_gpu.py

Each rank computes a matrix product in each precision, and checks the result. This test thus finds a
torch build that lacks a GPU's architecture, before a training fails in its first step. Exit code: 1
if a rank cannot compute in fp32, or if the ranks' versions differ.
"""

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.launch.world import World, run
from motley.plan.precision import PRECISIONS, best_precision
from motley.records.json_files import to_json

if TYPE_CHECKING:
    import torch

    from motley.measure.device import KernelSpeed


@dataclass(frozen=True)
class Report:
    """The device, versions and speeds of one rank.

    Attributes:
        rank: number of the rank.
        host: name of the rank's host.
        device: name of the rank's device.
        capability: CUDA compute capability; None on a CPU.
        torch: version of torch.
        cuda: version of CUDA that torch was built with.
        nccl: version of NCCL; empty without a GPU.
        built_for: CUDA architectures in this torch build.
        speeds: speed of a matrix product in each precision.
    """

    rank: int
    host: str
    device: str
    capability: tuple[int, int] | None
    torch: str
    cuda: str
    nccl: str
    built_for: tuple[str, ...]
    speeds: "tuple[KernelSpeed, ...]"


def main() -> None:
    """Run the test with the options on the command line."""
    parser = OneVoice(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    as_json = parser.parse_args().json
    run(lambda world: test_ranks(world, as_json))


def test_ranks(world: World, as_json: bool) -> None:
    """Measure on all ranks, one after the other on each host, and print the table on rank 0."""
    reports = world.allgather(examine(world))
    if world.rank == 0:
        if as_json:
            print(to_json([asdict(report) for report in reports]), flush=True)
        else:
            show(reports)
    problems = [*mismatches(reports), *failures(reports)]
    if problems:
        raise MotleyError("; ".join(problems))


def examine(world: World) -> Report:
    """Measure the speed of this rank's kernels while no other rank of its host computes."""
    import torch  # once the command line is right

    count = torch.cuda.device_count()
    device = torch.device("cuda", world.local_rank % count) if count else torch.device("cpu")
    report = None
    for turn in range(max(world.allgather(world.local_size))):
        if turn == world.local_rank:
            report = read(world, device)
        world.allgather(None)  # the next one's turn
    assert report is not None
    return report


def read(world: World, device: "torch.device") -> Report:
    """Measure this rank's speeds, and return its device, versions and speeds."""
    import torch

    from motley.measure.device import kernel_speed
    from motley.measure.process_group import nccl_version

    name, capability = "cpu", None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, capability = properties.name, (properties.major, properties.minor)
    names = [name_ for name_ in PRECISIONS if device.type == "cuda" or name_ != "tf32"]
    return Report(
        world.rank, world.host, name, capability, torch.__version__, torch.version.cuda or "none",
        nccl_version(), tuple(torch.cuda.get_arch_list()),
        tuple(kernel_speed(device, precision) for precision in names),
    )  # fmt: skip


def mismatches(reports: list[Report]) -> list[str]:
    """Return a sentence for each version of torch, CUDA or NCCL that differs between ranks."""
    problems = []
    for what in ("torch", "cuda", "nccl"):
        result = {getattr(report, what): report.host for report in reports if getattr(report, what)}
        if len(result) > 1:
            each = ", ".join(f"{host} has {value}" for value, host in result.items())
            problems.append(f"the hosts have different {what}: {each}; install the same on all")
    return problems


def failures(reports: list[Report]) -> list[str]:
    """Return a sentence for each rank that cannot compute in fp32."""
    return [
        f"rank {report.rank} on {report.host} ({report.device}) cannot run a kernel: "
        f"{report.speeds[0].error}; its torch is built for {', '.join(report.built_for)}"
        for report in reports
        if report.speeds[0].tflops is None
    ]


def show(reports: list[Report]) -> None:
    """Print the table of reports."""
    from rich.table import Table

    from motley.train.recorder import console

    table = Table(title="TFLOP/s of a matrix product, by precision", title_justify="left")
    for heading in ("rank", "host", "device", "capability", "torch", "NCCL"):
        table.add_column(heading)
    for precision in PRECISIONS:
        table.add_column(precision, justify="right")
    table.add_column("best for training")
    for report in reports:
        speeds = {speed.precision: speed for speed in report.speeds}
        cells = [speeds.get(precision) for precision in PRECISIONS]
        table.add_row(
            str(report.rank), report.host, report.device,
            ".".join(map(str, report.capability)) if report.capability else "-",
            report.torch, report.nccl or "-",
            *("-" if cell is None else "fails" if cell.tflops is None else f"{cell.tflops:.3g}"
              for cell in cells),
            best_precision(report.capability)[0],
        )  # fmt: skip
    console().print(table)
    built = {", ".join(report.built_for) for report in reports if report.built_for}
    for architectures in built:
        print(f"this torch is built for {architectures}", flush=True)
