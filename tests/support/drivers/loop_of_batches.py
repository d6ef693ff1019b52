"""A loop that gets its batches from a function with ``next()``, and ends without leaving the loop.

python tests/support/drivers/loop_of_batches.py '{"stop_at": 3}' OUT.json
"""

import json
import os
import random
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_loop import kill_rank
from torch import Tensor, nn

import motley

STEPS, ACCUMULATE, ROWS = 5, 2, 12


def get_batch(number: int) -> dict[str, Any]:
    """Return rows that depend on the batch's number and on all kinds of random numbers."""
    rows = ROWS if number < STEPS * ACCUMULATE - 1 else ROWS - 5
    shift = number + float(np.random.rand()) + random.random()
    x = torch.rand(rows, 4) + shift / 20
    return {"x": x, "pair": (x.sum(1).numpy(), [x.cos()]), "scale": torch.tensor(0.5), "name": "a"}


def main(case: dict[str, Any], out: Path) -> None:
    if "kill" in case:
        kill_rank(*case["kill"])
    torch.manual_seed(3)
    lab = motley.join(logs=case["logs"], run=case.get("run"))
    assert "RANK" not in os.environ, "the script would form a process group"
    for _ in range(4):  # which ends its processes by a signal
        with get_context("fork").Pool(3) as pool:
            assert pool.map(abs, [-1, 2]) == [1, 2]
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    lab.prepare(model, optimizer)
    batches = lab.batches(get_batch, STEPS * ACCUMULATE, seed=5)
    train = iter(batches)
    held_out = lab.batches(lambda n: torch.full((7, 4), n / 10), 3, train=False)
    lab.resume()
    losses = []
    step = (lab.batch + 1) // ACCUMULATE
    while step < STEPS:
        for _ in range(ACCUMULATE):
            rows = next(train)
            goal, (angle,) = rows["pair"]
            each: Tensor = (model(rows["x"]) - torch.as_tensor(goal)[:, None]).square() + angle
            lab.backward(each.mean() * rows["scale"])
        norm = lab.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += lab.stepped  # which a lost rank makes False
        if lab.stepped:
            losses.append([lab.loss, float(norm)])
        if case.get("stop_at") == step:
            lab.save()
            sys.exit(0)
    total, count = 0.0, 0
    with torch.no_grad():
        for x in held_out:
            total, count = total + float(model(x).sum()), count + len(x)
    total, count = lab.reduce((total, count))
    assert count == 21
    with torch.no_grad():
        seen = lab.reduce(sum(len(rows["x"]) for rows in batches))
    assert seen == STEPS * ACCUMULATE * ROWS - 5
    states = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    result = {"losses": losses, "states": states, "score": total}
    if lab.is_main:
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
