"""Loops of other frameworks train on several ranks as on one machine."""

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs

pytestmark = pytest.mark.mpi

LOOP = "tests/support/drivers/framework_loop.py"


CASES: dict[str, dict[str, Any]] = {
    "plain": {"save": True},
    "ragged": {"rows": 53, "epochs": 3},
    "accumulation": {"accumulate": 2, "rows": 53, "epochs": 3},
}


def play(
    jobs: Jobs, framework: str, ranks: int, shares: str, cases: list[dict[str, Any]]
) -> list[Any]:
    """Train the cases one after another by a framework's loop, and return their results."""
    out = jobs.logs.parent / f"{framework}-{ranks}.json"
    given = [
        case | {"folder": str(jobs.logs.parent / f"{framework}-{ranks}-{number}")}
        for number, case in enumerate(cases)
    ]
    variables = {"MOTLEY_SHARES": shares} if shares else {}
    done = jobs.fork(ranks, LOOP, framework, json.dumps(given), out, **variables)
    assert done.code == 0, done.output
    results: list[Any] = json.loads(Path(out).read_text())
    return results


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two results, relative to numbers above 1."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list):
        assert len(one) == len(other)
        return max((difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    return abs(one - other) / max(1.0, abs(one))


@pytest.mark.parametrize("framework", ["transformers", "accelerate"])
def test_a_framework_trains_as_on_one_machine(jobs: Jobs, framework: str) -> None:
    cases = list(CASES.values())
    bare = play(jobs, framework, 1, "", [case | {"bare": True} for case in cases])
    lab = play(jobs, framework, 3, "5,0,3", cases)
    for name, one, other in zip(CASES, bare, lab, strict=True):
        print(name, {key: difference(one[key], other[key]) for key in one}, len(one["losses"]))
    assert difference(bare, lab) < 2e-6
