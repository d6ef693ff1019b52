"""Each rank says where it is, and hears from all others; the twin of hello_mpi.c.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh setup/hello_mpi.py
"""

from motley import launch
from motley.errors import MotleyError


def main(world: launch.World) -> None:
    """Print one line, whole."""
    total = sum(world.allgather(world.rank + 1))
    if total != world.size * (world.size + 1) // 2:
        raise MotleyError(f"{world}: the sum of ranks is {total}")
    print(f"hello from rank {world.rank} of {world.size} on {world.host}\n", end="")


if __name__ == "__main__":
    launch.run(main)
