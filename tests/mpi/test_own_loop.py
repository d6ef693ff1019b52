"""Loops of users' own train on several ranks as on one machine, or are refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs
from project import LIMIT_S, ROOT
from results_apart import difference
from turns import count_commits

from motley.membership.survivors import SURVIVE
from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

FUZZER = ROOT / "tests" / "fuzz_loop.py"
LOOP = "tests/support/drivers/plain_loop.py"
BATCHES = "tests/support/drivers/loop_of_batches.py"
CASES = {
    "plain": {},
    "momentum, a cosine": {"opt": "sgd", "schedule": "cosine"},
    "weighted sampler": {"sampler": "weighted", "drop_last": True, "schedule": "onecycle"},
    "batches of one's own": {"sampler": "own", "evaluate": True, "schedule": "plateau"},
    "tokens": {"weight": "tokens"},
    "tokens in pieces": {"weight": "tokens", "micro": 2, "clip": "y"},
    "averages": {"micro": 1, "schedule": "sequence", "parts": ["average", "by_hand"]},
    "accumulation": {"accumulate": 2, "micro": 2},
    "accumulation across epochs": {"accumulate": 2, "rows": 25},
    "two losses": {"losses": 2, "micro": 2},
    "a loss now and then": {"more_every": 3, "micro": 2, "clip": "y"},
    "two losses by tokens": {"losses": 2, "weight": "tokens"},
    "tied and unused": {"parts": ["tied", "unused", "checkpoint"]},
    "experts in fp64": {"parts": ["sometimes", "double"]},
    "frozen at first": {"parts": ["freeze"], "opt": "rmsprop"},
    "a GradScaler": {"scaler": True, "clip": "y", "micro": 3},
    "worker processes": {"workers": 2, "micro": 2},
    "memory that ends": {"most_rows": 2, "weight": "tokens", "micro": 5, "clip": "y"},
    "memory that ends at once": {"most_rows": 1, "evaluate": True},
    "a break": {"break_at": 3, "evaluate": True},
    "fewer rows than ranks": {"batch": 2},
    "a ragged end": {"opt": "adagrad", "rows": 41, "batch": 7},
}


def play(jobs: Jobs, ranks: int, shares: str, case: dict[str, Any]) -> dict[str, Any]:
    """Run the loop of a case, and return its losses, scores and parameters."""
    out = jobs.logs.parent / f"loop-{ranks}-{shares}.json"
    case = {"logs": str(jobs.logs), **case}
    variables = {"MOTLEY_SHARES": shares} if shares else {}
    done = jobs.fork(ranks, LOOP, json.dumps(case), out, **variables)
    assert done.code == 0, done.output
    result: dict[str, Any] = {} if case.get("stop") else json.loads(Path(out).read_text())
    return result


@pytest.mark.turns
@pytest.mark.parametrize("name", CASES)
def test_a_loop_trains_as_on_one_machine(jobs: Jobs, name: str) -> None:
    case = CASES[name]
    bare = play(jobs, 1, "", case | {"bare": True})
    assert bare["losses"]
    assert difference(bare, play(jobs, 3, "5,0,3", case)) < 2e-6


def test_parts_of_a_model_train_as_on_one_machine_and_continue_as_whole_ones(jobs: Jobs) -> None:
    case = {"micro": 2, "weight": "tokens", "clip": "y", "evaluate": True, "augment": True,
            "parts": ["tied", "sometimes"], "run": "kept"}  # fmt: skip
    whole = play(jobs, 1, "1", case | {"run": "whole"})
    fsdp = case | {"strategy": "fsdp"}
    assert difference(whole, play(jobs, 3, "5,0,3", fsdp | {"run": "parts"})) < 2e-6
    play(jobs, 3, "5,0,3", fsdp | {"save_at": 3, "stop": True})
    rest = play(jobs, 2, "1,2", case)
    for name in ("scores", "norms"):
        whole[name] = whole[name][-len(rest[name]) :]
    assert difference(whole, rest) < 2e-6
    play(jobs, 2, "1,2", case | {"run": "again", "save_at": 5, "stop": True})
    rest = play(jobs, 3, "2,1,2", fsdp | {"run": "again"})
    for name in ("scores", "norms"):
        whole[name] = whole[name][-len(rest[name]) :]
    assert difference(whole, rest) < 2e-6


@pytest.mark.parametrize("more", [{}, {"micro": 8, "clip": "y"}, {"most_rows": 4}])
def test_batch_norms_over_groups_do_not_depend_on_the_shares(
    jobs: Jobs, more: dict[str, Any]
) -> None:
    case = {"parts": ["norm"], "batch": 12, "rows": 41, "evaluate": True, "opt": "sgd", **more}
    if not more:  # a group of all rows is torch's own batch norm
        bare = play(jobs, 1, "", case | {"bare": True, "rows": 36})
        assert difference(bare, play(jobs, 3, "1,1,2", case | {"rows": 36, "bn_group": 12})) < 2e-6
    one = play(jobs, 1, "1", case | {"bn_group": 4})
    assert difference(one, play(jobs, 3, "5,0,3", case | {"bn_group": 4})) < 2e-6


def test_batches_of_a_function_do_not_depend_on_the_ranks(jobs: Jobs) -> None:
    def play(ranks: int, shares: str, **case: Any) -> dict[str, Any]:
        out = jobs.logs.parent / f"batches-{ranks}-{shares}.json"
        case = {"logs": str(jobs.logs), "run": f"{ranks}-{shares}", **case}
        variables = {"MOTLEY_SHARES": shares} if shares else {}
        done = jobs.fork(ranks, BATCHES, json.dumps(case), out, **variables)
        assert done.code == 0, done.output
        result: dict[str, Any] = {} if "stop_at" in case else json.loads(out.read_text())
        return result

    one = play(1, "1")
    assert difference(one, play(3, "5,0,3")) < 2e-6
    steps = (jobs.logs / "3-5,0,3" / "steps.rank0.jsonl").read_text().splitlines()
    assert len(steps) == len(one["losses"])  # the last one too
    alone = play(1, "")
    assert difference(one, alone) < 2e-6  # among them the losses, each of several batches
    play(3, "1,1,1", run="stopped", stop_at=3)
    rest = play(2, "1,2", run="stopped")
    assert difference(one | {"losses": one["losses"][3:]}, rest) < 2e-6


def test_a_lost_rank_costs_no_batch_of_a_function(jobs: Jobs) -> None:
    case, out = {"logs": str(jobs.logs)}, jobs.logs.parent / "out.json"
    kept = []
    for ranks, shares, more in ((1, "1", {}), (3, "5,2,3", {"kill": (2, 5, 0)})):
        words = json.dumps(case | {"run": shares} | more)
        done = jobs.fork(ranks, BATCHES, words, out, **SURVIVE, MOTLEY_SHARES=shares)
        kept.append(json.loads(out.read_text()))
        assert ("2 of 3 ranks continue" in done.output) == bool(more), done.output
    assert difference(*kept) < 2e-6


def test_other_loops_find_nothing() -> None:
    seed = f"{count_commits()}"
    words = [sys.executable, FUZZER, "--count", "8", "--seed", seed]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_loop_without_a_launcher_is_the_bare_one_to_the_bit(jobs: Jobs) -> None:
    case = {"clip": "y", "schedule": "cosine", "evaluate": True, "parts": ["dropout"],
            "augment": True, "workers": 1}  # fmt: skip
    assert play(jobs, 1, "", case) == play(jobs, 1, "", case | {"bare": True})


def test_random_numbers_of_rows_do_not_depend_on_the_shares(jobs: Jobs) -> None:
    case = {"augment": True, "workers": 0}
    one = play(jobs, 1, "1", case)
    assert difference(one, play(jobs, 3, "1,0,6", case | {"workers": 2})) < 2e-6
    assert difference(one, play(jobs, 2, "1,1", case | {"micro": 1})) < 2e-6


@pytest.mark.parametrize("save_at", [3, 4])  # within an epoch, and at its end
def test_a_stopped_loop_continues_on_other_ranks(jobs: Jobs, save_at: int) -> None:
    case = {"opt": "sgd", "schedule": "onecycle", "augment": True, "parts": ["average"],
            "evaluate": True, "run": "kept"}  # fmt: skip
    whole = play(jobs, 3, "5,0,3", case | {"run": "whole"})
    play(jobs, 3, "5,0,3", case | {"save_at": save_at, "stop": True})
    rest = play(jobs, 2, "1,2", case | {"micro": 2})
    whole["scores"] = whole["scores"][-len(rest["scores"]) :]
    assert difference(whole, rest) < 2e-6
    assert len(rest["losses"]) == 8


# The first rank, before the sum; another one, after it, which is followed by an evaluation, while
# rank 1 has no device and waits; and after a sum that one of the others has not finished, and that
# it needs to clip the gradient.
@pytest.mark.parametrize(
    ("kill", "left_out"), [((0, 2, 0), None), ((3, 3, 1), 1), ((2, 3, 3), None)]
)
def test_a_lost_rank_costs_no_step(
    jobs: Jobs, kill: tuple[int, int, int], left_out: int | None
) -> None:
    case = {"schedule": "onecycle", "augment": True, "parts": ["average", "norm"],
            "evaluate": True, "clip": "y", "bn_group": 2, "dtype": "float64"}  # fmt: skip
    whole = play(jobs, 1, "1", case)
    out, case = jobs.logs / "out.json", case | {"logs": str(jobs.logs), "run": "lost"}
    ranks = 3 if left_out is None else 4
    done = jobs.run(ranks, LOOP, json.dumps(case | {"kill": kill, "left_out": left_out}), out,
                    **SURVIVE, MOTLEY_SHARES="5,2,3")  # fmt: skip
    assert done.code == 0 and f"{ranks - 1} of {ranks} ranks continue" in done.output, done.output
    assert difference(whole, json.loads(out.read_text())) < 2e-6
    events = [each["event"] for each in RunFolder(jobs.logs / "lost").read_events()]
    quiet = ("silent", "heard_again")  # as a busy machine may make a rank
    assert [each for each in events if each not in quiet] == ["lost", "regroup", "finished"]


def test_an_error_in_the_loop_ends_all_ranks_and_is_the_last_word(jobs: Jobs) -> None:
    out = jobs.logs / "out.json"
    done = jobs.run(2, LOOP, json.dumps({"logs": str(jobs.logs), "parts": 5}), out)
    assert done.code == 1 and done.seconds < 60
    assert "motley: rank " in done.output and "TypeError" in done.output, done.output


@pytest.mark.parametrize("save_at", [3, 4])
def test_a_loop_without_a_launcher_continues_to_the_bit(jobs: Jobs, save_at: int) -> None:
    case = {"scaler": True, "schedule": "cosine", "parts": ["dropout"], "augment": True}
    bare = play(jobs, 1, "", case | {"bare": True})
    play(jobs, 1, "", case | {"save_at": save_at, "stop": True, "run": "kept"})
    assert play(jobs, 1, "", case | {"run": "kept"}) == bare


REFUSED = {
    "a group of its own": "remove init_process_group()",
    "allow": "the known name is batch_norm",
    "twice": "keep the lab that the first call returned",
    "data": "the data differs between ranks: rows is 17 on rank 1",
    "model": "the model differs between ranks: 0.weight is",
    "batch norm": 'motley.join(allow=["batch_norm"])',
    "DDP": "give lab.prepare() the model inside",
    "no model": "2 of the 2 parameters of SGD belong to no model",
    "LBFGS": "use an optimizer without a closure",
    "an iterator": "pass the DataLoader itself",
    "a stream": "give lab.loader() a data set with len() and [index]",
    "no length": "give the sampler a __len__()",
    "no batches": "give it the batch size that a single machine would use",
    "prepared loader": "pass it to lab.loader()",
    "outside": "call it inside that loop",
    "rows": "take its mean over the rows first",
    "NaN": "the loss of rank 1 on",
    "weight": "give the sum of the weights of the piece's rows",
    "reduction": 'neither "mean" nor "sum"',
    "rates": ": 0.05): call the scheduler on all ranks",
    "inside": "join the two data sets",
    "a parameter": "call lab.prepare(model, optimizer) again",
    "exit": "let all ranks leave the loop after the same batch",
    "clipped": "use lab.clip_grad_norm_() to clip it",
    "steps apart": "use lab.batch in that condition",
    "bare backward": "write lab.backward(loss) instead of loss.backward()",
    "bare backward too": "use lab.clip_grad_norm_() to clip it",
    "no optimizer": "in place of an update of your own",
    "another optimizer": "pass it too, as in `lab.prepare(model, optimizer)`",
    "ahead": "call next() on the loader after lab.backward()",
    "several ahead": 'or call backward(loss, reduction="sum") if each loss is divided',
    "a huge order": "num_samples=1_000_000",
    "uneven batches": "batch 1 of lab.batches() has 3 rows, and batch 0 has 4",
    "no rows": "return tensors whose dimension 0 counts the rows",
    "strategy": "give ddp or fsdp",
    "changed rows": "change the rows inside the function",
    "fsdp: bare backward": "write lab.backward(loss) instead of loss.backward()",
    "fsdp: model": "the model differs between ranks: 0.weight is",
    "fsdp: no model": "2 of the 2 parameters of SGD belong to no model",
    "fsdp: NaN": "the loss of rank 1 on",
    "fsdp: a parameter": "call lab.prepare(model, optimizer) again",
    "fsdp: clipped": "use lab.clip_grad_norm_() to clip it",
    "fsdp: another optimizer": "pass it too, as in `lab.prepare(model, optimizer)`",
    "fsdp: skipping": "the forward pass did not call 1",
    "fsdp: scalar": "give it the shape [1]",
    "fsdp: shared": "share only parameters that are outside of the blocks",
    "fsdp: average": "average the parameters after lab.prepare()",
    "fsdp: whole tensors": "or an optimizer such as AdamW or SGD",
    "fsdp: scaler": "lab.autocast() has a loss scale that all ranks share",
    "fsdp: powersgd": "give exact, bf16 or fp16",
}


@pytest.mark.turns
@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_in_a_loop_is_named(jobs: Jobs, case: str) -> None:
    script = "tests/support/drivers/loop_refusals.py"
    variables = {"MOTLEY_SHARES": "1,1", "MOTLEY_LOGS": str(jobs.logs)}
    done = jobs.fork(2, script, case, jobs.logs.parent / "store", **variables)
    assert done.code != 0 and REFUSED[case] in done.output, done.output
    assert "motley" in done.output.splitlines()[-1] and done.seconds < 60
