"""Check that MPI starts ranks and that they reach each other, as hello_mpi.c does in C.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh setup/hello_mpi.py
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh setup/hello_mpi.py --lose-one

Each rank prints its number and receives a number from all others. Then the machines measure the
bandwidth of the links between them. With --lose-one the last rank kills itself instead, and each
other rank prints a line if the launcher lets it live on. keep_training.sh runs the script with
--lose-one before it starts a training.
"""

import argparse
import os
import signal
import time

from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.launch.ranks import check_size
from motley.launch.world import World, ranks_of_launch, run

# Open MPI 4.1 sends SIGCONT at once and SIGTERM after 1 s. Slurm's PMIx plugin kills after 1 s.
_WAIT_S = 2.0
# In which the other ranks finish an exchange, or a line. The launcher may end all ranks with one.
_LEAVE_S = 0.3


def main() -> None:
    """Print a greeting from all ranks, or lose a rank with ``--lose-one``."""
    parser = OneVoice(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lose-one",
        action="store_true",
        help=("find out whether ranks survive the loss of another"),
    )
    if parser.parse_args().lose_one:
        lose_one()
    run(greet)


def greet(world: World) -> None:
    """Print one complete line per rank. Then print the bandwidth of the links on rank 0."""
    total = sum(world.allgather(world.rank + 1))
    if total != world.size * (world.size + 1) // 2:
        raise MotleyError(
            f"{world}: the sum over all ranks is {total}, and has to be the same on each; MPI "
            "passes wrong data"
        )
    print(f"hello from rank {world.rank} of {world.size} on {world.host}\n", end="", flush=True)
    if len(set(world.machines)) == 1:
        return
    from motley.measure.link_speed import measure_links  # with torch, which one machine need not

    links = measure_links(world)
    if world.rank == 0:
        for line in [*map(links.sentence, links.hosts), *map("note: {}".format, links.remarks())]:
            print(line, flush=True)


def lose_one() -> None:
    """Kill this process if it is the highest of several ranks.

    Every other rank prints a line after 2 s if the launcher has let it live on.
    """
    for number in (signal.SIGCONT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(1))
    launched = ranks_of_launch()
    rank, size = launched.rank, launched.size
    check_size(size, os.environ)
    print(f"trial: rank {rank} of {size} began", flush=True)
    if size > 1:
        launched.allgather(None)
        if rank == size - 1:
            time.sleep(_LEAVE_S)  # the others may still read what this rank has sent
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_WAIT_S)
        print(f"trial: rank {rank} of {size} lives on", flush=True)
        time.sleep(_LEAVE_S)
    os._exit(0)  # MPI would wait for the killed rank


if __name__ == "__main__":
    main()
