"""Slurm's lists of nodes, and srun's words for some of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.cluster.hostfile import Host, allocated_nodes, expand_nodes, idle_nodes
from motley.errors import MotleyError
from motley.provision.launch_line import hosts_of_step, on_hosts

ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
PREFIX = st.from_regex(r"[a-z]{1,5}", fullmatch=True)


@given(st.lists(st.tuples(PREFIX, st.integers(0, 20), st.integers(0, 5), st.integers(1, 4))))
def test_a_list_is_each_of_its_names_in_order(
    items: list[tuple[str, int, int, int]],
) -> None:
    text = [f"{name}[{low:0{width}d}-{low + more}]" for name, low, more, width in items]
    names = [
        f"{name}{number:0{max(width, len(str(low)))}d}"
        for name, low, more, width in items for number in range(low, low + more + 1)
    ]  # fmt: skip
    assert expand_nodes(",".join(text)) == names


def test_lists_as_slurm_writes_them() -> None:
    assert expand_nodes("login,n[1,3-4,010],r[1-2]c[07-08]-ib") == [
        "login", "n1", "n3", "n4", "n010", "r1c07-ib", "r1c08-ib", "r2c07-ib", "r2c08-ib",
    ]  # fmt: skip
    assert expand_nodes("") == allocated_nodes({}) == []


@pytest.mark.parametrize(
    "text", ["n[1-", "n[1-2", "n]1", "n[2-1]", "n[a-b]", "n[1-99999999]", "-oProxyCommand=x", "a b",
             "n[1-2][$(x)]"]
)  # fmt: skip
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(MotleyError):
        expand_nodes(text)


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        ("srun", (1, 1, 1)),
        ("srun -n 7", (3, 2, 2)),
        ("srun -n2 --mpi=pmix", (1, 1)),
        ("srun --ntasks=4 -N 2", (2, 2)),
        ("srun --ntasks-per-node 2", (2, 2, 2)),
        ("srun --nodelist=n[2-3] --ntasks 4", (2, 2)),
    ],
)
def test_how_many_ranks_a_node_gets(words: str, slots: tuple[int, ...]) -> None:
    found = hosts_of_step(words.split(), ENVIRON)
    assert tuple(host.slots for host in found) == slots
    assert hosts_of_step(words.split(), {}) == ()


def test_the_same_line_without_a_node() -> None:
    line = [
        "srun",
        "-N3",
        "--mpi=pmix",
        "-n",
        "6",
        "-w",
        "n[1-3]",
        "--ntasks-per-node=2",
        "--cpu-bind=none",
    ]
    assert " ".join(on_hosts(line, [Host("n1", 2), Host("n3", 2)])) == (
        "srun --overlap --nodes=2 --ntasks=4 --ntasks-per-node=2 --nodelist=n1,n3 --mpi=pmix "
        "--cpu-bind=none"
    )


@pytest.mark.parametrize(
    ("nodes", "machines", "said"),
    [("n[1-3]", 1, "3 nodes, and ranks run on 1 of them"), ("n[1-3]", 3, ""), ("n[1-3", 1, "")],
)
def test_nodes_that_nobody_uses_are_said(nodes: str, machines: int, said: str) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes}
    found = idle_nodes(machines, environ)
    assert said in found and bool(found) == bool(said)
    assert not idle_nodes(1, {"SLURM_JOB_NODELIST": nodes}), "in no allocation"
