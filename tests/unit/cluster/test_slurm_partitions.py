"""What sinfo says, as real clusters have it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.cluster.hostfile import read_partitions, seconds_of_slurm
from motley.errors import MotleyError

SAID = """\
gpu|gpu*|up|2-00:00:00|4:00:00|12|64+|gpu:h100:8(S:0-1)
gpu|gpu*|up|2-00:00:00|4:00:00|2|48|gpu:a100:4(S:0-1),gpu:a100_mig:2
long|long|up|infinite|n/a|30|128|(null)
old|old|down|1:00:00|1:00:00|1|4|gpu:1
"""


def test_partitions_are_what_their_weakest_node_is() -> None:
    gpu, long, old = read_partitions(SAID.splitlines())
    assert (gpu.name, gpu.usual, gpu.up, gpu.nodes) == ("gpu", True, True, 14)
    assert (gpu.cores, gpu.gpus, gpu.most_s, gpu.usual_s) == (48, 6, 172800.0, 14400.0)
    assert (long.usual, long.gpus, long.most_s, long.usual_s) == (False, 0, None, None)
    assert (old.up, old.gpus) == (False, 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:15", 1815), ("4:00:00", 14400), ("1-12", 129600), ("2-0:30", 174600),
     ("1-2:3:4", 93784), ("UNLIMITED", None)],
)  # fmt: skip
def test_times_as_slurm_writes_them(text: str, seconds: float | None) -> None:
    assert seconds_of_slurm(text) == seconds


@given(st.text(max_size=12))
def test_what_is_no_time_is_refused(text: str) -> None:
    try:
        seconds = seconds_of_slurm(text)
    except MotleyError as error:
        assert repr(text) in str(error)
    else:
        assert seconds is None or 0 <= seconds < math.inf
