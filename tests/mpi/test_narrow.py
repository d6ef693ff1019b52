"""Some of the ranks go on alone, led by another one than before."""

import os
from pathlib import Path

import pytest
from jobs import Jobs

pytestmark = pytest.mark.mpi

NARROW = """
import os
import torch
import torch.distributed as dist
from motley.launch.world import run
from motley.measure.process_group import join_process_group, leave_process_group, shrink_group

def main(world):
    group = join_process_group(world)
    dist.all_reduce(torch.ones(9))
    group = shrink_group(world, group, {1, 2}, {0: "a test", 3: "a test"})
    if group.rank is None:
        print(f"launched {world.rank} is out: {'; '.join(group.describe_left_out())}", flush=True)
        return
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    own = " ".join(os.environ[name] for name in ("RANK", "WORLD_SIZE"))
    print(f"launched {world.rank} is {own}, the sum {total.item():g}", flush=True)
    leave_process_group()

run(main)
"""


def test_those_who_stay_are_a_group_of_their_own(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "narrow.py"
    script.write_text(NARROW)
    done = jobs.fork(4, script)
    assert done.code == 0, done.output
    assert "launched 1 is 0 2, the sum 3" in done.output
    assert "launched 2 is 1 2, the sum 3" in done.output
    host = os.uname().nodename
    for rank in (0, 3):
        assert f"launched {rank} is out: rank 0 on {host}, rank 3 on {host} are" in done.output
