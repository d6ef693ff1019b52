"""Ranks stay on the cores next to their GPUs.

The trees are as nvidia-smi topo -m shows a DGX H100 (two processors, each a memory node) and a DGX
A100 (eight memory nodes, four of them with GPUs).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.cluster.launcher import (
    MemoryNode,
    choose_node,
    core_list,
    memory_nodes,
    node_of_device,
    read_core_list,
)

H100 = {0: "0-55,112-167", 1: "56-111,168-223"}
H100_GPUS = {"1B": 0, "43": 0, "52": 0, "61": 0, "9D": 1, "C3": 1, "D1": 1, "DF": 1}
A100 = {n: f"{16 * n}-{16 * n + 15},{128 + 16 * n}-{143 + 16 * n}" for n in range(8)}
A100_GPUS = {"07": 3, "0F": 3, "47": 1, "4E": 1, "87": 7, "90": 7, "B7": 5, "BD": 5}


def tree(root: Path, nodes: dict[int, str], gpus: dict[str, int]) -> Path:
    for number, cores in nodes.items():
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for bus, node in gpus.items():
        folder = root / f"sys/bus/pci/devices/0000:{bus.lower()}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


@pytest.mark.parametrize(("nodes", "gpus"), [(H100, H100_GPUS), (A100, A100_GPUS)])
def test_each_rank_of_a_node_with_eight_gpus_stays_next_to_its_own(
    tmp_path: Path, nodes: dict[int, str], gpus: dict[str, int]
) -> None:
    found = memory_nodes(tree(tmp_path, nodes, gpus))
    everything = frozenset[int]().union(*(node.cores for node in found))
    assert [node.number for node in found] == list(nodes)
    for rank, (bus, number) in enumerate(gpus.items()):
        near = node_of_device(f"00000000:{bus}:00.0", tmp_path)
        assert near == number
        chosen = choose_node(found, near, True, rank, 8, everything)
        assert chosen and core_list(chosen.cores) == nodes[number]
        assert chosen.words() == f"cores {nodes[number]} of memory node {number}"
        some = sorted(everything)[:64]  # that a launcher or a container has chosen
        assert choose_node(found, near, True, rank, 8, some) is None
        assert choose_node(found, None, True, rank, 8, everything) is None


def test_ranks_without_a_gpu_share_the_nodes_if_each_gets_as_many(tmp_path: Path) -> None:
    found = memory_nodes(tree(tmp_path, H100, {}))
    everything = frozenset(range(224))
    at = [choose_node(found, None, False, rank, 4, everything) for rank in range(4)]
    assert [node and node.number for node in at] == [0, 0, 1, 1]
    assert choose_node(found, None, False, 0, 1, everything) is None
    assert choose_node(found, None, False, 2, 3, everything) is None


def test_on_one_node_nothing_changes(tmp_path: Path) -> None:
    found = memory_nodes(tree(tmp_path, {0: "0-15"}, {}))
    assert choose_node(found, 0, True, 0, 1, range(16)) is None
    assert memory_nodes(tmp_path / "none") == ()
    assert choose_node((), None, False, 0, 1, range(16)) is None


@pytest.mark.parametrize("bus", ["00000000:99:00.0", "../../x", "", "00000000:FE:00.0"])
def test_a_device_of_which_linux_tells_nothing_is_next_to_none(tmp_path: Path, bus: str) -> None:
    assert node_of_device(bus, tree(tmp_path, {0: "", 1: "words"}, {"FE": -1})) is None
    assert memory_nodes(tmp_path) == ()  # one without cores, one that is damaged


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_a_list_of_cores_is_read_as_it_is_written(cores: frozenset[int]) -> None:
    assert read_core_list(core_list(cores)) == cores


BOUND = """
import os, threading
from motley.cluster.launcher import bind_process
done = threading.Event()
for _ in range(3):
    threading.Thread(target=done.wait).start()
bind_process({%d})
threads = map(int, os.listdir("/proc/self/task"))
print({frozenset(os.sched_getaffinity(each)) for each in threads})
done.set()
threading.Thread(target=lambda: print(os.sched_getaffinity(0))).start()
"""


def test_all_threads_of_a_process_stay_and_those_that_it_starts() -> None:
    core = max(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", BOUND % core], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{{frozenset({{{core}}})}}", f"{{{core}}}"]
    assert MemoryNode(1, frozenset({core})).words() == f"cores {core} of memory node 1"
