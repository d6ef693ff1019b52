"""Of which kinds the devices of a job are, and who can talk to whom."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from motley.errors import MotleyError
from motley.measure import process_group
from motley.measure.process_group import ProcessGroup, check_nccl
from motley.plan.plan import Rank


@pytest.mark.parametrize(
    ("makers", "mixed", "kinds"),
    [
        (("NVIDIA", "NVIDIA"), False, "NVIDIA GPUs"),
        (("NVIDIA", ""), True, "GPUs and CPUs"),
        (("AMD", "NVIDIA", "AMD"), True, "NVIDIA GPUs and AMD GPUs"),
        (("AMD", "NVIDIA", ""), True, "NVIDIA GPUs and AMD GPUs and CPUs"),
    ],
)
def test_gpus_of_two_makers_are_two_kinds(makers: tuple[str, ...], mixed: bool, kinds: str) -> None:
    workers = tuple(
        Rank(rank, "a", group_rank=rank, uuid=f"GPU-{rank}", maker=maker)
        for rank, maker in enumerate(makers)
    )
    group = ProcessGroup(0, workers, (), torch.device("cpu"), "gloo")
    assert (group.is_mixed, group.kinds) == (mixed, kinds)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (["2.27.3", "", "2.27.3"], ""),
        (["2.27.3", "RCCL 2.22.3", ""], ""),  # they take gloo
        (["2.27.3", "2.28.1", ""], "2.27.3 on a, 2.28.1 on b"),
        (["2.27.3", "RCCL 2.22.3", "RCCL 2.26.6"], "RCCL 2.22.3 on b, RCCL 2.26.6 on c"),
    ],
)
def test_gpus_of_one_maker_need_one_library(
    monkeypatch: pytest.MonkeyPatch, versions: list[str], said: str
) -> None:
    monkeypatch.setattr(process_group, "nccl_version", lambda: versions[0])
    nodes = [SimpleNamespace(host=host) for host in "abc"]
    world: Any = SimpleNamespace(nodes=nodes, allgather=lambda value: versions)
    if not said:
        check_nccl(world)
        return
    with pytest.raises(MotleyError, match=said):
        check_nccl(world)
