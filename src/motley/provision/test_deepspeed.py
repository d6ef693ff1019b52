"""Test DeepSpeed on all ranks by a distributed matrix product that checks its result.

    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/test_deepspeed.py
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/test_deepspeed.py --size 4096

The product C = A B has its inner dimension split over the ranks. Each rank multiplies its slice,
and deepspeed.comm sums the products. Every rank compares C with a product that it computes alone.
The times are measured after a warm-up. All ranks and devices are synchronised before each clock is
read. The use of the GPUs during the test is recorded in logs/.
"""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.launch.world import World, run
from motley.plan.precision import read_precisions
from motley.records.run_folder import RunFolder

if TYPE_CHECKING:
    import torch

    from motley.measure.process_group import ProcessGroup


def main() -> None:
    """Run the test with the options on the command line."""
    parser = OneVoice(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="rows of the matrices, default 1024")
    parser.add_argument("--repeats", type=int, default=5, help="timed products, default 5")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="default: logs")
    options = parser.parse_args()
    run(lambda world: test_ranks(world, options.size, options.repeats, options.logs))


def test_ranks(world: World, size: int, repeats: int, logs: Path) -> None:
    """Multiply on all ranks, check the result, and print one table on rank 0."""
    import torch  # once the command line is right

    from motley.measure.process_group import gpu_logger, join_process_group, leave_process_group

    group = join_process_group(world, read_precisions("fp32"))
    folder = RunFolder(logs / time.strftime("test_deepspeed_%Y-%m-%d_%H-%M-%S"))
    folder = world.from_first(lambda: folder)
    world.once_per_node(folder.create)
    if group.rank is None:
        return
    with gpu_logger(world, group, folder, interval=1.0):
        compute, reduce, error = multiply(group, size, repeats)
    rows = comm_table(group, [compute, reduce, error])
    leave_process_group()
    if world.rank == 0:
        show(group, size, rows)
    # A sum of `size` products of numbers in [-1, 1], rounded in another order.
    bound = size * torch.finfo(torch.float32).eps
    wrong = [str(rank) for rank, row in enumerate(rows) if not row[2] < bound]  # NaN too
    if wrong:
        raise MotleyError(
            f"the result of a matrix product is wrong by more than {bound:.1e} on rank "
            f"{', '.join(wrong)}: a device or the network corrupts data"
        )
    if world.rank == 0:
        print(f"the product is right; GPU log in {folder.path}", flush=True)


def multiply(group: "ProcessGroup", size: int, repeats: int) -> tuple[float, float, float]:
    """Multiply matrices, C = A B, with a part of the product on each rank.

    Returns:
        The seconds of this rank's part, the seconds of the sum over ranks, and the error of C: the
        largest absolute difference between an entry of C and the expected entry.
    """
    import torch

    from motley.engines.import_deepspeed import comm, deepspeed
    from motley.plan.plan import apportion
    from motley.tasks.model import set_matmul_precision

    assert group.rank is not None
    deepspeed.init_distributed(dist_backend=group.backend, verbose=False)
    set_matmul_precision("fp32")
    generator = torch.Generator().manual_seed(0)  # the same matrices on every rank
    left, right = (2 * torch.rand(size, size, generator=generator) - 1 for _ in range(2))
    left, right = left.to(group.device), right.to(group.device)
    counts = apportion(size, [1.0] * group.size)
    start = sum(counts[: group.rank])
    mine = slice(start, start + counts[group.rank])

    compute, reduce = [], []
    for _ in range(repeats + 1):
        comm.barrier()
        began = now(group.device)
        product = left[:, mine] @ right[mine]
        multiplied = now(group.device)
        comm.all_reduce(product)
        reduced = now(group.device)
        compute.append(multiplied - began)
        reduce.append(reduced - multiplied)
    error = float((product - left @ right).abs().max())
    return min(compute[1:]), min(reduce[1:]), error  # the first one was the warm-up


def now(device: "torch.device") -> float:
    """Wait until ``device`` has finished its queued work, and return the time in seconds."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def comm_table(group: "ProcessGroup", values: list[float]) -> list[list[float]]:
    """Gather the values of all ranks with deepspeed.comm, in the order of ranks."""
    import torch

    from motley.engines.import_deepspeed import comm

    own = torch.tensor(values, dtype=torch.float64, device=group.device)
    rows = [torch.empty_like(own) for _ in range(group.size)]
    comm.all_gather(rows, own)
    return [row.tolist() for row in rows]


def show(group: "ProcessGroup", size: int, rows: list[list[float]]) -> None:
    """Print the table of times and errors."""
    from rich.table import Table

    from motley.engines.import_deepspeed import deepspeed
    from motley.train.recorder import console

    table = Table(
        title=f"{size} x {size} matrix product over {group.size} ranks, {group.backend}, "
        f"DeepSpeed {deepspeed.__version__}",
        title_justify="left",
    )
    for heading in ("rank", "host", "device"):
        table.add_column(heading)
    for heading in ("own product, ms", "sum over ranks, ms", "largest error"):
        table.add_column(heading, justify="right")
    for worker, (compute, reduce, error) in zip(group.workers, rows, strict=True):
        table.add_row(
            str(worker.rank), worker.host, worker.device,
            f"{compute * 1e3:.2f}", f"{reduce * 1e3:.2f}", f"{error:.1e}",
        )  # fmt: skip
    console().print(table)
    for line in group.describe_left_out():
        print(line)
