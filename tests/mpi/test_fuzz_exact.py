"""Cases that were once wrong, each with the history that showed it; and the fuzzer itself."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from forked import run_script
from fuzz.cases import AFTER, Case
from fuzz.play import Played, judged, play
from fuzz.rules import broken_rules
from project import LIMIT_S, ROOT
from turns import count_commits
from warm.ranks import WarmRanks

from motley.errors import MotleyError

pytestmark = pytest.mark.mpi  # they take minutes, though no mpirun

FUZZER = ROOT / "tests" / "fuzz_exact.py"


def zero(stage: int, fault: str | None, **more: object) -> str:
    """Three ranks at a ZeRO stage, and what happens to one in step 2."""
    faults = [{"kind": fault, "step": 2, "rank": 1}] if fault else []
    segment = {
        "engine": f"zero{stage}", "ranks": 3, "shares": [1, 2, 2], "loss_scale": "2^8",
        "faults": faults, **more,
    }  # fmt: skip
    return json.dumps({"segments": [segment]})


DEEPSPEED = {
    **{f"an overflow at ZeRO {stage}": zero(stage, "overflow") for stage in range(4)},
    **{f"memory that ends at ZeRO {stage}": zero(stage, "oom") for stage in range(3)},
    **{f"micro-steps at ZeRO {stage}": zero(stage, None, micro=[2]) for stage in range(4)},
    "from ZeRO 1 to ZeRO 3": """{"recipe":{"clip_grad":0.1},"segments":[
        {"engine":"zero1","ranks":2,"shares":[3,1],"stop":3},
        {"engine":"zero3","ranks":3,"shares":[1,0,4]}]}""",
}
# What the fuzzer has found, or must have.
CASES = {
    "a rank without samples knows of no second call": """{"recipe":{"epochs":3,"save_every":2,
        "eval_images":1,"seed":3,"parts":["twice"],"bn_group":4,"model_ema_decay":0.9},
        "segments":[{"engine":"zero1","ranks":2,"shares":[0,5],"stop":1},
        {"engine":"zero1","ranks":2,"shares":[0,5]}]}""",
    "another batch in mid-run": """{"recipe":{"batch_size":5,"samples":21,"save_every":3},
        "segments":[{"ranks":2,"shares":[3,1],"stop":7},{"changed":{"batch_size":3}}]}""",
    "a finished run, and another batch": """{"recipe":{"batch_size":5,"samples":21},"segments":[
        {"stop":10},{"changed":{"batch_size":3}}]}""",
    "other warm-up": """{"segments":[{"stop":1},{"changed":{"warmup_epochs":0.25}}]}""",
    "a warm-up in epochs in place of one in steps": """{"recipe":{"batch_size":4,"samples":27,
        "epochs":1,"warmup_steps":0},"segments":[{"stop":1},{"changed":{"warmup_epochs":0.25},
        "brief":true}]}""",
    "evaluations between saves, and a lost rank": """{"recipe":{"eval_every":2,"keep_best":"loss",
        "save_every":3,"lr_cycle_limit":2,"clip_grad":0.01,"clip_mode":"value"},"segments":[
        {"ranks":3,"shares":[2,0,1],"stop":4,"faults":[{"kind":"kill","step":3,"rank":2,"call":4}]},
        {"ranks":2,"shares":[1,2],"engine":"fsdp"}]}""",
    "adaptive clipping, and a weight decay that rises": """{"recipe":{"opt":"sgd","clip_grad":0.01,
        "clip_mode":"agc","weight_decay_end":0.3,"warmup_steps":2},"segments":[
        {"ranks":2,"shares":[1,2],"stop":3},{"ranks":3,"shares":[2,1,0],"engine":"zero0"}]}""",
    "weighted classes, and epochs of equally many of each": """{"recipe":{"epochs":3,
        "class_weights":"1,2,0.5,3,0.1,1,4,1,0.7,2","balanced_sampling":true},"segments":[
        {"ranks":3,"shares":[5,0,3],"stop":5},{"engine":"zero2","ranks":2,"shares":[1,3]}]}""",
    "LAMB, resumed": """{"recipe":{"opt":"lamb"},"segments":[{"ranks":2,"shares":[2,1],"stop":2},
        {"ranks":2,"shares":[2,1]}]}""",
    "Lookahead, resumed elsewhere": """{"recipe":{"opt":"lookahead_adamw","epochs":3},"segments":[
        {"ranks":2,"shares":[2,1],"stop":7},{"ranks":3,"shares":[1,2,1],"engine":"zero0"}]}""",
    "MARS at ZeRO 1": """{"recipe":{"opt":"mars"},"segments":[{"engine":"zero1"}]}""",
    "SGD through FSDP": """{"recipe":{"opt":"nesterov"},"segments":[{"engine":"fsdp","ranks":2,
        "shares":[1,2]}]}""",
    "AdamP through FSDP": """{"recipe":{"opt":"adamp"},"segments":[{"engine":"fsdp"}]}""",
    "a cautious AdamW at ZeRO 2": """{"recipe":{"opt":"cadamc","seed":3},"segments":[
        {"engine":"zero2","ranks":2,"shares":[1,1]}]}""",
    "LAMB at ZeRO 0, an overflow": """{"recipe":{"opt":"lamb"},"segments":[{"engine":"zero0",
        "ranks":2,"shares":[1,2],"loss_scale":"2^8",
        "faults":[{"kind":"overflow","step":2,"rank":1}]}]}""",
    "a flipped parameter of the first rank": """{"recipe":{"save_every":1},"segments":[{"ranks":3,
        "shares":[1,1,1],"faults":[{"kind":"flip","step":2,"rank":0}]}]}""",
    "a flipped parameter of two ranks": """{"recipe":{"save_every":1},"segments":[{"ranks":2,
        "shares":[1,1],"faults":[{"kind":"flip","step":2,"rank":0}]}]}""",
    "a flipped moment": """{"recipe":{"save_every":1},"segments":[{"ranks":3,"shares":[1,1,1],
        "faults":[{"kind":"flip","step":2,"rank":2,"call":1}]}]}""",
    "PowerSGD, resumed after a step": """{"recipe":{"save_every":1},"segments":[
        {"ranks":2,"shares":[2,1],"wire":"powersgd:2","stop":1},
        {"ranks":2,"shares":[2,1],"wire":"powersgd:2"}]}""",
    "another split": """{"segments":[{"ranks":2,"shares":[1,1],
        "faults":[{"kind":"replan","step":2,"rank":-1,"counts":[1,7]}]}]}""",
    "a kill between checkpoint and evaluation": """{"segments":[{"ranks":2,"shares":[2,1],
        "faults":[{"kind":"kill","step":2,"rank":-1,"call":21}]},{"ranks":2,"shares":[2,1]}]}""",
    "images that are none": """{"recipe":{"bad_images":["empty","bomb"]},"segments":[
        {"ranks":2,"shares":[1,1]}]}""",
    "MADGRAD in local steps, a rank without samples": """{"recipe":{"opt":"madgradw","save_every":2,
        "seed":2},"segments":[{"ranks":5,"shares":[5,1,4,5,5],"wire":"local:3"}]}""",
    "memory that ends in local steps, heard of in a ragged batch": """{"recipe":{"samples":28},
        "segments":[{"ranks":2,"shares":[3,1],"wire":"local:2",
        "faults":[{"kind":"oom","step":0,"rank":1}]}]}""",
    "micro-batches that a measured plan keeps to": """{"recipe":{"batch_size":11},"segments":[
        {"engine":"zero2","ranks":2,"shares":[],"micro":[7,1]}]}""",
    "LAMB in local steps, a rank without samples": """{"recipe":{"opt":"lamb","batch_size":6,
        "samples":19,"save_every":2},"segments":[{"ranks":2,"shares":[1,1],"wire":"local:2"}]}""",
    "LAMB, resumed for a step that is skipped": """{"recipe":{"opt":"lamb"},"segments":[{"stop":2},
        {"ranks":2,"shares":[1,1],"loss_scale":"2^8","stop":3,
        "faults":[{"kind":"overflow","step":2,"rank":1}]},{}]}""",
    "one number that rounding moves": """{"recipe":{"batch_size":60,"samples":34,"seed":1,
        "weight_decay":0.0,"warmup_epochs":1.0,"min_lr":0.0,"save_every":3,"eval_images":1},
        "segments":[{"engine":"zero0","ranks":3,"shares":[1,1,1]}]}""",
    "AdaHessian, measured": """{"recipe":{"opt":"adahessian"},"segments":[{"ranks":2,
        "shares":[]}]}""",
    "MADGRAD, measured": """{"recipe":{"opt":"madgradw"},"segments":[{"ranks":2,"shares":[]}]}""",
    "drop-out on other ranks": """{"recipe":{"drop":0.1},"segments":[{"ranks":2,"shares":[1,1],
        "stop":3},{"ranks":3,"shares":[1,1,1]}]}""",
    "a thread that cannot send": """{"segments":[{"ranks":3,"shares":[1,2,2],"wire":"powersgd:2",
        "faults":[{"kind":"sender","step":3,"rank":1}]}]}""",
    "a leaf that cannot send": """{"segments":[{"ranks":3,"shares":[1,2,2],"wire":"exact/leaf1",
        "faults":[{"kind":"sender","step":3,"rank":1}]}]}""",
    "nobody is slow under FSDP": """{"segments":[{"engine":"fsdp","ranks":2,"shares":[]}]}""",
    "memory that ends in a ragged batch": """{"recipe":{"batch_size":16,"eval_images":20},
        "segments":[{"faults":[{"kind":"oom","step":1}]}]}""",
    **{f"an overflow first, then ZeRO {stage}": f"""{{"recipe":{{"samples":8}},"segments":[
        {{"loss_scale":"2^8","stop":1,"faults":[{{"kind":"overflow","step":0}}]}},
        {{"engine":"zero{stage}","ranks":2,"shares":[1,1]}}]}}""" for stage in (1, 3)},
    "C-LAMB on three ranks of FSDP": """{"recipe":{"opt":"clamb"},"segments":[{"engine":"fsdp",
        "ranks":3,"shares":[1,1,1]}]}""",
    "AdaHessian at ZeRO 2": """{"recipe":{"opt":"adahessian"},"segments":[{"engine":"zero2"}]}""",
    **{f"Adagrad at ZeRO {stage}": f"""{{"recipe":{{"opt":"adagrad"}},"segments":[
        {{"engine":"zero{stage}","ranks":2,"shares":[1,1]}}]}}""" for stage in (1, 3)},
    "LARS at ZeRO 1": """{"recipe":{"opt":"lars"},"segments":[{"engine":"zero1","ranks":2,
        "shares":[1,1]}]}""",
    "a stranger": """{"segments":[{"ranks":2,"shares":[2,1],
        "faults":[{"kind":"stranger","step":1,"call":0}]}]}""",
    # Parts that real models have.
    "a batch norm in eval mode": """{"recipe":{"parts":["still"],"bn_group":4},"segments":[
        {"ranks":2,"shares":[1,1]}]}""",
    "a batch norm called twice, resumed elsewhere": """{"recipe":{"parts":["twice"],"bn_group":4,
        "samples":22},"segments":[{"ranks":2,"shares":[3,1],"stop":2},
        {"engine":"zero2","ranks":2,"shares":[1,1]}]}""",
    "a batch norm of tokens": """{"recipe":{"batch_size":6,"parts":["tokens"],"bn_group":6}}""",
    "a last group of one sample": """{"recipe":{"batch_size":12,"samples":37,"bn_group":6,
        "parts":["wide","twice"],"model_ema_decay":0.9},"segments":[{"ranks":2,"shares":[1,1]}]}""",
    "a batch norm at ZeRO 2, a rank without samples": """{"recipe":{"batch_size":12,"epochs":1,
        "parts":["twice"],"bn_group":4},"segments":[{"engine":"zero2","ranks":3,
        "shares":[3,2,1]}]}""",
    **{f"two precisions at ZeRO {stage}": f"""{{"segments":[{{"engine":"zero{stage}","ranks":2,
        "shares":[2,1],"precision":["bf16","fp32"]}}]}}""" for stage in (2, 3)},
    "batch norms, resumed on the same ranks": """{"recipe":{"batch_size":9,"parts":["tokens"],
        "bn_group":3},"segments":[{"ranks":3,"shares":[5,3,50],"stop":1},{"ranks":3,
        "shares":[5,3,50]}]}""",
    "a rank that dies with its part of the statistics": """{"recipe":{"batch_size":16,"samples":39,
        "epochs":1,"save_every":3,"parts":["tokens"],"bn_group":4},"segments":[{"ranks":2,
        "shares":[1,1],"stop":3,"faults":[{"kind":"kill","step":2,"call":14}]},{}]}""",
    "a micro-batch of less than a group, measured": """{"recipe":{"batch_size":12,"parts":["stem"],
        "bn_group":6},"segments":[{"ranks":2,"shares":[],"micro":[4,6]}]}""",
    "an optimizer that knows no complex numbers": """{"recipe":{"opt":"clamb","parts":["turned"]},
        "segments":[{"ranks":2,"shares":[]}]}""",
    "experts through FSDP": """{"recipe":{"parts":["experts"],"batch_size":4},"segments":[
        {"engine":"fsdp","ranks":2,"shares":[1,3]}]}""",
    "experts at ZeRO 1": """{"recipe":{"parts":["experts"],"batch_size":4},"segments":[
        {"engine":"zero1","ranks":3,"shares":[1,2,1]}]}""",
    "the average of tied weights": """{"recipe":{"parts":["tied"],"model_ema_decay":0.5},
        "segments":[{"ranks":2,"shares":[1,2]}]}""",
    "two types at ZeRO 1": """{"recipe":{"parts":["wide"]},"segments":[{"engine":"zero1"}]}""",
    "complex numbers without overlap": """{"recipe":{"parts":["turned"]},"segments":[
        {"ranks":2,"shares":[]}]}""",
    "means that a pass moves": """{"recipe":{"parts":["moving"]},"segments":[
        {"ranks":2,"shares":[1,1]}]}""",
    "images of odd sizes": """{"recipe":{"sides":[13,10],"parts":["scalar"]}}""",
    "a resume without options": """{"recipe":{"lr":3e-4,"weight_decay":0.0,"seed":2},"segments":[
        {"ranks":2,"shares":[2,1],"stop":4},{"ranks":2,"shares":[2,1],"brief":true}]}""",
    **{f"a resume after {damage}": json.dumps({"segments":[
        {"ranks": 2, "shares": [2, 1], "stop": 4, "after": [damage]},
        {"ranks": 2, "shares": [2, 1]}]}) for damage in AFTER},
}  # fmt: skip


KNOWN = {name: Case.parse(text) for name, text in {**CASES, **DEEPSPEED}.items()}


def words_of(name: str) -> set[str]:
    """Engines, wires and faults of a case, parts of its model, and whether its run is resumed or
    its files damaged."""
    segments = KNOWN[name].segments
    words = {"resumed"} if len(segments) > 1 else set()
    words |= set(KNOWN[name].recipe.parts)
    for segment in segments:
        words |= {segment.engine, segment.wire.split(":")[0], *(f.kind for f in segment.faults)}
        words |= {"damaged"} if segment.after else set()
    return words


@pytest.mark.turns(shows=words_of)
@pytest.mark.parametrize("name", KNOWN)
def test_what_was_wrong_once_is_exact(ranks: WarmRanks, name: str) -> None:
    assert judged(KNOWN[name], ranks) == []


@pytest.fixture(scope="module")
def right(ranks: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A case in which nothing is wrong."""
    folder = tmp_path_factory.mktemp("right") / "case"
    played = play(Case.parse('{"segments":[{"ranks":2,"shares":[2,1]}]}'), ranks, folder)
    assert broken_rules(played, ranks) == []
    return played


@pytest.mark.parametrize(
    ("recipe", "rule"),
    [
        ({"lr": 1.001e-3}, "schedule"), ({"smoothing": 0.101}, "loss"), ({"seed": 1}, "samples"),
        ({"batch_size": 9}, "steps"), ({"epochs": 3}, "steps"), ({"eval_images": 9}, "evaluations"),
        ({"weight_decay": 0.06}, "checkpoint"),
    ],
)  # fmt: skip
def test_the_fuzzer_sees_a_run_that_is_another(
    ranks: WarmRanks, right: Played, recipe: dict[str, float], rule: str
) -> None:
    other = replace(right.case, recipe=replace(right.case.recipe, **recipe))
    (problem,) = broken_rules(replace(right, case=other), ranks)
    assert problem.split(":")[0] == rule


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not valid JSON"), ('{"segment":[]}', "nearest: segments"),
        ("[]", "a JSON object"),
        ('{"recipe":{"optimizer":"lamb"}}', "recipe has no key 'optimizer'"),
        ('{"segments":[]}', "give one"), ('{"segments":[{"engine":"zero4"}]}', "no engine 'zero4'"),
        ('{"segments":[{"faults":[{"kind":"kil","step":1}]}]}', "nearest: kill"),
        ('{"segments":[{"faults":[{"kind":"kill"}]}]}', "step"),
        ('{"recipe":{"opt":"adamv"}}', "nearest: adam,"),
        ('{"segments":[{"precision":["fp8"]}]}', "no precision 'fp8'"),
        ('{"segments":[{"ranks":0}]}', "give 1 or more"), ('{"segments":{}}', "a list"),
    ],
)  # fmt: skip
def test_a_case_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        Case.parse(text)


def test_a_case_is_written_as_it_is_read() -> None:
    text = '{"recipe":{"opt":"lamb"},"segments":[{"ranks":2,"shares":[1,2],"stop":3}]}'
    assert json.loads(str(Case.parse(text))) == json.loads(text)
    assert Case.parse(str(Case.parse(text))) == Case.parse(text)


def test_the_fuzzer_refuses_no_time() -> None:
    done = run_script("tests/fuzz_exact.py", "--seconds", 0)
    assert done.returncode == 2 and "above 0" in done.stderr


@pytest.mark.slow
@pytest.mark.turns
@pytest.mark.parametrize("seed", [7, count_commits()], ids=["the same cases", "of this commit"])
def test_other_cases_find_nothing(seed: int) -> None:
    words = ("--seconds", "30", "--seed", str(seed))
    done = subprocess.run(
        [sys.executable, str(FUZZER), *words], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-4000:]
