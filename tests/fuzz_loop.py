"""Draw loops of users' own, and compare each on several ranks with the bare one on one machine.

    python tests/fuzz_loop.py --count 60 --seed 1
    python tests/fuzz_loop.py --count 20 --seed 2 --ranks 2     # two GPUs

A loop may save, stop, and continue on other ranks. The exit status is 1 if any differs. A refusal
counts as right if it names the cause; the refusals are printed.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

from results_apart import difference
from warm.ranks import WarmRanks

_BOUND = 1e-9  # of the difference between two results
_NOISE = 1e-14  # relative change of weights, as rounding makes it in some steps
LOOP = "tests/support/drivers/plain_loop.py"
MODULES = ("warm.script", "motley.library.lab", "motley.engines.fsdp")
PARTS = ("tied", "unused", "sometimes", "double", "checkpoint", "freeze", "average", "by_hand")


def draw(random_state: random.Random) -> dict[str, Any]:
    """Return the features of one loop."""
    choose, chance = random_state.choice, random_state.random
    case: dict[str, Any] = {
        "opt": choose(("adamw", "sgd", "adagrad", "rmsprop")),
        "schedule": choose(("", "cosine", "onecycle", "plateau", "sequence")),
        "sampler": choose(("shuffle", "shuffle", "sequential", "weighted", "own")),
        "batch": random_state.randint(1, 14), "rows": random_state.randint(12, 45),
        "epochs": random_state.randint(1, 3), "drop_last": chance() < 0.2,
        "weight": choose(("", "tokens")), "micro": choose((None, 1, 2, 5)),
        "clip": choose(("", "y")), "losses": choose((1, 1, 2)), "more_every": choose((0, 0, 2, 3)),
        "workers": choose((0, 0, 0, 1, 2)), "scaler": chance() < 0.2, "evaluate": chance() < 0.5,
        "parts": random_state.sample(PARTS, random_state.randint(0, 3)),
        "seed": random_state.randint(0, 99), "dtype": "float64",
    }  # fmt: skip
    if not case["weight"] and chance() < 0.3:
        case["accumulate"] = 2
    if chance() < 0.2:
        case |= {"most_rows": random_state.randint(1, 3), "losses": 1, "more_every": 0,
                 "scaler": False}  # fmt: skip
        case.pop("accumulate", None)
    if chance() < 0.25 and case["sampler"] != "own" and "most_rows" not in case:
        group = random_state.randint(1, 4)
        case |= {"bn_group": group, "micro": None, "batch": group * random_state.randint(1, 4)}
        case["parts"] = [*case["parts"], "norm"]
    if chance() < 0.3:
        case |= {"strategy": "fsdp", "scaler": False, "most_rows": None}
        case["parts"] = [each for each in case["parts"] if each != "average"]
    if case["sampler"] == "own":
        case["rows"] = max(20, case["rows"])
    return case


def draw_shares(random_state: random.Random, most: int) -> tuple[int, str]:
    """Return a number of ranks and their shares."""
    ranks = random_state.randint(1, most)
    shares = [random_state.randint(0, 5) for _ in range(ranks)]
    return ranks, ",".join(map(str, shares if any(shares) else [1] * ranks))


def play(ranks: WarmRanks, case: dict[str, Any], size: int, shares: str, folder: Path) -> Any:
    """Return the result of a loop, or its output if it failed."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    variables = {"MOTLEY_SHARES": shares} if shares else {}
    words = [LOOP, json.dumps({"logs": str(folder / "logs"), **case}), str(out)]
    argument = {"words": words, "variables": variables}
    ended = ranks.run(size, "warm.script:main", argument, folder / "ranks", 120)
    if any(ended.codes) or ended.timed_out:
        return ended.output or f"codes {ended.codes}"
    return json.loads(out.read_text()) if out.exists() else {}


def judge(
    ranks: WarmRanks, most: int, case: dict[str, Any], state: random.Random, folder: Path
) -> str:
    """Return a description of what is wrong with a case; empty if nothing is."""
    start = case
    alone = {"bare": True} if not case.get("bn_group") else {"run": "alone"}
    bare = play(ranks, case | alone, 1, "", folder)
    if isinstance(bare, str):
        return f"the bare loop fails: {bare[-300:]}"
    size, shares = draw_shares(state, most)
    stopped = ""
    if len(bare["losses"]) > 1 and state.random() < 0.4:
        save_at = state.randint(1, len(bare["losses"]) - 1)
        first = play(ranks, case | {"run": "kept", "save_at": save_at, "stop": True}, size, shares,
                     folder)  # fmt: skip
        if isinstance(first, str):
            return _judge_refusal(first, size, shares)
        case, stopped = case | {"run": "kept"}, f"stopped after {save_at} on {shares}, then "
        size, shares = draw_shares(state, most)
    result = play(ranks, case, size, shares, folder)
    if isinstance(result, str):
        return _judge_refusal(result, size, shares)
    for name in ("scores", "norms"):  # the script itself keeps the losses alone
        bare[name] = bare[name][len(bare[name]) - len(result[name]) :]
    apart = difference(bare, result)
    if not apart > _BOUND:
        return ""
    # A loop that diverges enlarges any rounding.
    other = play(ranks, start | alone | {"noise": _NOISE}, 1, "", folder)
    rounding = difference(bare, other) if isinstance(other, dict) else 0.0
    if apart <= rounding:  # NaN explains nothing
        return ""
    return f"{stopped}shares {shares}: {apart:.1e} apart, rounding explains {rounding:.1e}"


def _judge_refusal(output: str, size: int, shares: str) -> str:
    last = next((line for line in reversed(output.splitlines()) if line.startswith("motley:")), "")
    if "Error" in last or "crashed" in last or not last:
        return f"{size} ranks, {shares}: {output[-600:]}"
    print(f"  refused: {last}", flush=True)
    return ""


def main() -> int:
    """Draw loops, and print those that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4, help="most ranks of a loop")
    options = parser.parse_args()
    wrong = 0
    with WarmRanks(MODULES) as ranks:
        for number in range(options.count):
            state = random.Random(f"{options.seed} {number}")
            case = draw(state)
            with tempfile.TemporaryDirectory() as folder:
                text = judge(ranks, options.ranks, case, state, Path(folder))
            if text:
                wrong += 1
                print(f"{number}: {json.dumps(case)}\n  {text}", flush=True)
    print(f"{options.count} loops of seed {options.seed}, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
