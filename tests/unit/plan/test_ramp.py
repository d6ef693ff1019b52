"""A batch that grows: read, written, reached in the steps that were asked for."""

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.config.option import batch_size
from motley.errors import MotleyError
from motley.plan.length import Ramp, RampedBatch, growth, make_ramp, read_ramp
from motley.train.command_line import config_from, read_config, training_parser


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5000))
def test_it_grows_evenly_and_then_stays(first: int, by: int, times: int, over: int) -> None:
    ramp = Ramp(first, first + by * times, by, over)
    sizes = [ramp.at(used) for used in range(over + 2)]
    assert sizes[0] == first or over < times  # several at once where there are so few samples
    assert sizes == sorted(sizes) and set(sizes) <= set(ramp.batches())
    assert sizes[over] == sizes[-1] == ramp.most
    assert read_ramp(str(ramp)) == ramp
    used, steps = 0, 0
    while used < over:
        used, steps = used + ramp.at(used), steps + 1
    assert ramp.steps(0, over) == steps


def test_a_batch_that_grows_is_a_number_that_says_so_wherever_it_is_kept() -> None:
    config = read_config(training_parser(""), ["--batch-size", "64:256:32/1K"])
    assert config.batch_size == 256 and make_ramp(config.batch_size) == Ramp(64, 256, 32, 1000)
    saved = json.loads(json.dumps(config.as_json()))
    assert saved["batch_size"] == "64:256:32/1000"
    assert make_ramp(config_from(saved).batch_size) == Ramp(64, 256, 32, 1000)
    for other in (copy.deepcopy(config.batch_size), pickle.loads(pickle.dumps(config.batch_size))):
        assert isinstance(other, RampedBatch) and make_ramp(other) == make_ramp(config.batch_size)
    (said,) = growth(make_ramp(config.batch_size))
    assert said == (
        "the batch grows from 64 to 256 samples, in steps of 32, over the first 1,000 "
        "samples, which are 9 steps"
    )


def test_a_batch_that_does_not_grow_is_as_before() -> None:
    config = read_config(training_parser(""), ["--batch-size", "60"])
    assert config.as_json()["batch_size"] == 60 and type(config.batch_size) is int
    assert {make_ramp(60).at(used) for used in (0, 1, 10**9)} == {60}
    assert list(growth(make_ramp(60))) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64:256", "FIRST:LAST:BY/SAMPLES"), ("64:256:32", "FIRST:LAST"), ("a:b:c/d", "FIRST:LAST"),
        ("64:256:32/1T", "FIRST:LAST"), ("0:64:8/1K", "above 0"), ("64:64:8/1K", "larger last"),
        ("256:64:32/1K", "larger last"), ("64:256:0/1K", "larger last"),
        ("64:256:32/0", "number of samples"),
        ("64:256:50/1K", "do not end at 256; take 214? or 264"), ("64:100:50/9", "take 114"),
    ],
)  # fmt: skip
def test_what_is_no_ramp_is_said(text: str, says: str) -> None:
    with pytest.raises(MotleyError) as caught:
        batch_size(text)
    assert says.replace("214?", "214") in str(caught.value)
