"""Each rank says where it is, and hears from all others; the twin of hello_mpi.c. Then the
machines find out what the links between them carry.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh setup/hello_mpi.py
"""

from motley.errors import MotleyError
from motley.launch.world import World, run
from motley.measure.link_speed import measure_links


def main(world: World) -> None:
    """Print one line, whole."""
    total = sum(world.allgather(world.rank + 1))
    if total != world.size * (world.size + 1) // 2:
        raise MotleyError(f"{world}: the sum of ranks is {total}")
    print(f"hello from rank {world.rank} of {world.size} on {world.host}\n", end="", flush=True)
    if len(set(world.machines)) == 1:
        return
    links = measure_links(world)
    if world.rank == 0:
        for line in [*map(links.sentence, links.hosts), *map("note: {}".format, links.remarks())]:
            print(line, flush=True)


if __name__ == "__main__":
    run(main)
