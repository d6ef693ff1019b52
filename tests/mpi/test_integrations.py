"""Loops of other frameworks train on several ranks as on one machine."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs
from project import LIMIT_S, ROOT, environment
from results_apart import difference
from warm.ranks import WarmRanks
from warm.script import MODULES

from motley.membership.survivors import SURVIVE
from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

LOOP = "tests/support/drivers/framework_loop.py"


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "transformers": {
        "ragged": {"rows": 57},
        "resumed in mid-epoch": {"rows": 57, "resume": True},
        "accumulation": {"accumulate": 2, "rows": 53, "epochs": 2},
        "a mean over labels": {"masked": True, "accumulate": 2, "rows": 53, "epochs": 1},
        "smooth labels": {"smooth": 0.1, "rows": 29, "epochs": 2},
    },
    "accelerate": {
        "ragged": {"rows": 57, "save": True},
        "resumed in mid-epoch": {"rows": 57, "resume": True},
        "accumulation": {"accumulate": 2, "rows": 53, "epochs": 2},
        "tokens": {"tokens": True, "rows": 29},
    },
    "lightning": {
        "ragged": {"rows": 57},
        "accumulation": {"accumulate": 2, "rows": 53, "epochs": 2},
        "tokens": {"tokens": True, "rows": 29},
        "manual, from a checkpoint": {"manual": True, "save": True, "rows": 29},
    },
}
SLOW: dict[str, dict[str, Any]] = {
    "transformers": {"slow": 1, "accumulate": 2, "micro": 2},
    "accelerate": {"slow": 1, "micro": 3},
    "lightning": {"slow": 1},
}
# Accelerate by itself draws another order when it resumes.
UNLIKE = {"accelerate": "resumed in mid-epoch"}
FRAMEWORKS = ("peft", "transformers.trainer", "lightning", "torchmetrics")
EXAMPLES = ("detector", "diffusion", "gan", "lightning_module", "lora_three_pcs", "table")


@pytest.fixture(scope="module")
def ranks() -> Iterator[WarmRanks]:
    """Ranks of a process that has imported the frameworks, which takes 4 s of a processor."""
    with WarmRanks([*MODULES, *filter(importlib.util.find_spec, FRAMEWORKS)]) as started:
        yield started


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


def need(framework: str) -> None:
    """Skip the test if a framework is missing."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install {framework}")


@pytest.mark.parametrize("framework", CASES)
def test_a_framework_trains_as_on_one_machine(jobs: Jobs, framework: str) -> None:
    need(framework)
    cases, slow = list(CASES[framework].values()), SLOW[framework]
    bare = play(jobs, framework, 1, "", [case | {"bare": True} for case in [*cases, slow]])
    lab = play(jobs, framework, 3, "5,0,3", cases)
    assert len(bare[0]["losses"]) == 15
    for name, one, other in zip(CASES[framework], bare, lab, strict=False):
        if UNLIKE.get(framework) != name:
            assert difference(one, other) < 2e-6, name
        if name == "resumed in mid-epoch":
            rest = len(other["losses"])
            assert rest == 12
            assert difference(lab[0]["losses"][-rest:], other["losses"]) == 0
            assert difference(lab[0]["states"], other["states"]) == 0
    # The second rank is slow, and its rows move to the first one.
    assert difference(bare[-1:], play(jobs, framework, 2, "", [slow])) < 2e-6
    events = RunFolder(jobs.logs / f"{framework}-2").read_events()
    counts = next(each["counts"] for each in events if each["event"] == "replan")
    assert counts[0] > counts[1], events


# Before the sum of the second batch of a step; in the first one, which the others' gather shows.
@pytest.mark.parametrize("kill", [(0, 3, 0), (2, 4, 2)])
def test_a_rank_that_an_accelerator_loses_costs_no_step(
    jobs: Jobs, kill: tuple[int, int, int]
) -> None:
    case = {"accumulate": 2, "rows": 53, "epochs": 2, "kill": kill}
    bare = play(jobs, "accelerate", 1, "", [case | {"bare": True}])
    out, content = jobs.logs / "out.json", case | {"folder": str(jobs.logs)}
    done = jobs.fork(3, LOOP, "accelerate", json.dumps([content]), out, **SURVIVE,
                     MOTLEY_SHARES="5,2,3")  # fmt: skip
    assert "2 of 3 ranks continue" in done.output, done.output
    assert difference(bare, json.loads(out.read_text())) < 2e-6


@pytest.mark.parametrize(
    ("framework", "words"), [("transformers", "resume_from_checkpoint"), ("lightning", "ckpt_path")]
)
def test_a_lost_rank_ends_the_loop_of_a_trainer(jobs: Jobs, framework: str, words: str) -> None:
    need(framework)
    out, content = jobs.logs / "out.json", {"kill": (1, 3, 0), "folder": str(jobs.logs)}
    done = jobs.fork(2, LOOP, framework, json.dumps([content]), out)
    assert done.code != 0 and words in done.output, done.output


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_two_ranks(jobs: Jobs, name: str) -> None:
    if name == "lightning_module":
        need("lightning")
    done = jobs.fork(2, f"examples/{name}.py", MOTLEY_LOGS=str(jobs.logs))
    assert done.code == 0, done.output


def test_a_search_by_optuna_runs_a_trial_on_all_ranks(jobs: Jobs) -> None:
    need("optuna")
    hosts = jobs.logs.parent / "hosts.txt"
    hosts.write_text("localhost slots=2\n")
    own = {"MOTLEY_LOGS": str(jobs.logs), "HOSTFILE": str(hosts), "TRIALS": "1"}
    done = subprocess.run(
        [sys.executable, "examples/optuna_search.py"], cwd=ROOT, text=True, check=False,
        env=environment(**own), capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0 and "best: lr" in done.stdout, done.stdout + done.stderr


def test_the_iou_of_a_segmentation_is_that_of_one_machine(jobs: Jobs) -> None:
    found = []
    for shares in ("1", "5,0,3"):
        done = jobs.fork(shares.count(",") + 1, "examples/segmentation.py", MOTLEY_SHARES=shares,
                         MOTLEY_LOGS=str(jobs.logs))  # fmt: skip
        found.append(re.findall(r"mean IoU ([.\d]+)", done.output))
    assert len(found[0]) == 3 and float(found[0][-1]) > 0.8
    assert [*map(float, found[0])] == pytest.approx([*map(float, found[1])], abs=2e-4)


def test_what_is_not_exact_is_refused_with_a_line_to_paste(jobs: Jobs) -> None:
    done = jobs.fork(1, "tests/support/drivers/framework_refusals.py",
                     MOTLEY_SHARES="1", MOTLEY_LOGS=str(jobs.logs))  # fmt: skip
    assert done.code == 0, done.output
    lines = [line for line in done.output.splitlines() if line.startswith(("refused", "accepted"))]
    wanted = ["`lab = motley.join()`", "motley.join(micro_batch=4)", "'group_by_length'",
              "output_router_logits = False", "`loss_is_scaled_for_ga = False`", "accepted",
              "rsync", "accelerator.sync_gradients", "lab.accelerate(Accelerator())",
              "accelerate config default", "IterableDataset", "batch norm"]  # fmt: skip
    if importlib.util.find_spec("lightning"):
        wanted += ["accumulate_grad_batches=2", '"weight": 0.0', "sync_grads=False"]
    assert len(lines) == len(wanted), done.output
    for line, words in zip(lines, wanted, strict=True):
        assert words in line
