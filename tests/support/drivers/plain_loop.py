"""A plain training loop with the features that people's loops have, bare or with ``motley.join``.

python tests/support/drivers/plain_loop.py '{"opt": "adamw"}' OUT.json
"""

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Sampler, WeightedRandomSampler

import motley
from motley.engines import gradient_sum
from motley.plan.plan import Rank

VOCABULARY, WIDTH = 23, 16


@dataclass
class Loop:
    """The features of one loop. ``bare``: without the library, on one machine."""

    bare: bool = False
    opt: str = "adamw"
    schedule: str = ""
    sampler: str = "shuffle"
    batch: int = 12
    rows: int = 40
    epochs: int = 2
    drop_last: bool = False
    weight: str = ""
    micro: int | None = None
    bn_group: int | None = None
    strategy: str = "ddp"
    clip: str = ""
    clip_norm: float = 0.05
    accumulate: int = 1
    losses: int = 1
    more_every: int = 0  # one more loss in every such batch; 0: in none
    reduction: str = "mean"
    workers: int = 0
    parts: list[str] = field(default_factory=list)
    scaler: bool = False
    evaluate: bool = False
    break_at: int | None = None
    seed: int = 0
    dtype: str = "float32"
    augment: bool = False
    logs: str = "logs"
    run: str | None = None
    save_at: int | None = None  # saves after so many steps
    stop: bool = False  # ends there
    path: str = "auto"  # to resume
    most_rows: int | None = None  # that fit in memory
    kill: list[int] = field(default_factory=list)  # rank, step, place; see kill_rank
    left_out: int | None = None  # rank without a device, as on a host with fewer GPUs than ranks
    noise: float = 0.0  # relative change of the head's initial weights


class Log:
    """The losses of all steps so far, which a checkpoint holds."""

    def __init__(self) -> None:
        self.losses: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


class Bare:
    """The library's methods in a script that does not use it."""

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    epoch, batch, stepped = 0, 0, True
    loss: float | None = None
    zero = False  # whether a step was taken
    _losses = 0.0

    def prepare(self, *objects: Any) -> Any:
        return objects[0] if len(objects) == 1 else objects

    def loader(self, loader: DataLoader[Any], train: bool = True) -> Any:
        return loader if not train else self._count(loader)

    def _count(self, loader: DataLoader[Any]) -> Any:
        bare = self

        class Counted:
            def __len__(self) -> int:
                return len(loader)

            def __iter__(self) -> Iterator[Any]:
                for part in (loader.sampler, loader.batch_sampler):
                    if hasattr(part, "set_epoch"):
                        part.set_epoch(bare.epoch)
                for bare.batch, rows in enumerate(loader):
                    if bare.zero:
                        bare._losses, bare.zero = 0.0, False
                    yield rows

        return Counted()

    def epochs(self, count: int) -> Iterator[int]:
        for self.epoch in range(count):
            yield self.epoch

    def backward(self, loss: Tensor, weight: Any = None, reduction: str = "mean") -> None:
        self._losses += loss.item()
        self.loss = self._losses
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, compute: Any, rows: Any) -> None:
        loss, weight = compute(rows)
        self.backward(loss, weight)

    def clip_grad_norm_(self, parameters: Any, norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, norm)

    def reduce(self, value: Any) -> Any:
        return value

    def resume(self, path: str) -> bool:
        return False

    def register(self, *objects: Any) -> None:
        pass


class Texts(Dataset[Any]):
    """Rows of tokens of different lengths; every row is the same in each run."""

    def __init__(self, rows: int, augment: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        lengths = torch.randint(2, 9, (rows,), generator=generator).tolist()
        self.rows = [
            torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths
        ]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        row = self.rows[index]
        if self.augment:
            shift = int(torch.randint(5, ())) + int(np.random.randint(5)) + random.randrange(5)
            row = (row + shift) % VOCABULARY
        return row


def collate(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


class Longest(Sampler[list[int]]):
    """A batch sampler of the user's own: batches of different sizes, another order each epoch."""

    def __init__(self, rows: int) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.rows))
        random.Random(self.epoch).shuffle(order)
        cuts = [0, 5, 12, 13, self.rows]
        yield from (order[a:b] for a, b in pairwise(cuts))


class Network(nn.Module):
    """A small language model with the parts that a case asks for."""

    def __init__(self, parts: list[str]) -> None:
        super().__init__()
        self.parts = parts
        self.embedding = nn.Embedding(VOCABULARY + 1, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY + 1)
        if "tied" in parts:
            self.head.weight = self.embedding.weight
        if "unused" in parts:
            self.never = nn.Linear(3, 3)
        if "sometimes" in parts:
            self.sometimes = nn.Linear(WIDTH, WIDTH)
        if "double" in parts:
            self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        if "dropout" in parts:
            self.drop = nn.Dropout(0.2)
        if "norm" in parts:
            self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens + 1)
        if "checkpoint" in self.parts:
            x = checkpoint(self.body, x, use_reentrant=False)
        else:
            x = self.body(x)
        if "double" in self.parts:
            x = x + self.shift.to(x)
        if "sometimes" in self.parts and bool((tokens[:, 0] == 3).any()):
            x = torch.where((tokens[:, :1, None] == 3), self.sometimes(x), x)
        if "norm" in self.parts:
            known = (tokens >= 0).to(x)
            x = x + self.norm((x * known[..., None]).sum(1) / known.sum(1)[:, None])[:, None]
        logits: Tensor = self.head(x)
        return logits


def count_loss(logits: Tensor, tokens: Tensor, by: str) -> tuple[Tensor, float | None]:
    """Return the loss, and its weight: tokens count alike, or rows do."""
    targets = (tokens * 7 + 3) % VOCABULARY
    each = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none"
    ).view(tokens.shape)
    known = (tokens >= 0).to(logits)
    if by == "tokens":
        return (each * known).sum() / known.sum(), float(known.sum())
    return ((each * known).sum(1) / known.sum(1)).mean(), None


def compute(model: nn.Module, tokens: Tensor, case: Loop) -> Any:
    """Return the loss and its weight, as a device with little memory does."""
    loss, weight = count_loss(model(tokens), tokens, case.weight)
    if len(tokens) > (case.most_rows or len(tokens)) and not case.bare:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return loss, weight


def make_optimizer(name: str, parameters: list[Any]) -> torch.optim.Optimizer:
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=0.03)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr=3e-3, momentum=0.5)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def make_schedule(name: str, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    schedules = torch.optim.lr_scheduler
    match name:
        case "cosine":
            return schedules.CosineAnnealingLR(optimizer, steps)
        case "onecycle":
            return schedules.OneCycleLR(optimizer, 0.02, total_steps=steps, cycle_momentum=False)
        case "plateau":
            return schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        case "sequence":
            warm = schedules.LinearLR(optimizer, 0.1, 1.0, 3)
            down = schedules.ExponentialLR(optimizer, 0.9)
            return schedules.SequentialLR(optimizer, [warm, down], [3])
    return None


BEFORE_SUM, AFTER_SUM, BACKWARD, AFTER_SUM_OF_SOME = range(4)


def kill_rank(rank: int, step: int, place: int) -> None:
    """Have a rank die in the middle of a step: before or after the sum, or in a backward pass.

    After the sum of some, rank 1 has not finished the sum, and the others have.
    """
    from motley.comm.collectives import all_gather_floats
    from motley.library.step_gate import StepGate

    add_up, backward = StepGate._sum, StepGate.backward
    own = int(os.environ["OMPI_COMM_WORLD_RANK"])

    def die(gate: StepGate, at: int) -> None:
        if own == rank and at == place and gate.piece is not None and gate.piece.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def add_up_or_die(self: StepGate, *args: Any) -> Any:
        die(self, BEFORE_SUM)
        outcome = add_up(self, *args)
        die(self, AFTER_SUM)
        die(self, AFTER_SUM_OF_SOME)
        late = own == 1 and place == AFTER_SUM_OF_SOME and not self.repeats
        if late and self.piece is not None and self.piece.step == step:
            all_gather_floats([0.0], can_leave=True)  # which never ends
        return outcome

    def backward_or_die(self: StepGate, *args: Any) -> None:
        backward(self, *args)
        die(self, BACKWARD)

    StepGate._sum, StepGate.backward = add_up_or_die, backward_or_die  # type: ignore[method-assign]


def leave_out(rank: int) -> None:
    """Let a launched rank have no device to train on."""
    from motley.measure import process_group

    choose = process_group.choose_participants  # type: ignore[attr-defined]

    def choose_others(*words: Any) -> tuple[Rank, ...]:
        return tuple(
            replace(each, reason="no GPU is left for it") if each.rank == rank else each
            for each in choose(*words)
        )

    process_group.choose_participants = choose_others  # type: ignore[attr-defined, assignment]


def main(case: Loop, out: Path) -> None:
    if case.kill:
        kill_rank(*case.kill)
    if case.left_out is not None:
        leave_out(case.left_out)
    gradient_sum._EARLY_BUCKET = 200  # numbers, so that there are several buckets
    torch.set_default_dtype(getattr(torch, case.dtype))
    torch.manual_seed(case.seed)
    np.random.seed(case.seed)
    random.seed(case.seed)
    lab: Any = (
        Bare()
        if case.bare
        else motley.join(
            micro_batch=case.micro,
            bn_group=case.bn_group,
            strategy=case.strategy,
            logs=case.logs,
            run=case.run,
        )
    )
    data = Texts(case.rows, case.augment)
    model = Network(case.parts).to(lab.device)
    with torch.no_grad():
        model.head.weight.mul_(1 + case.noise)
    optimizer = make_optimizer(case.opt, list(model.parameters()))
    steps = (case.rows + 8) * case.epochs if case.batch == 1 else 24 * case.epochs
    schedule = make_schedule(case.schedule, optimizer, steps)
    average = torch.optim.swa_utils.AveragedModel(model) if "average" in case.parts else None
    scaler = torch.amp.GradScaler(lab.device.type, init_scale=2.0**10) if case.scaler else None
    lab.prepare(*(each for each in (model, optimizer, schedule, average, scaler) if each))
    if case.sampler == "own":
        loader = DataLoader(data, batch_sampler=Longest(case.rows), collate_fn=collate)
    else:
        weighted = WeightedRandomSampler([1.0 + i % 3 for i in range(case.rows)], case.rows)
        loader = DataLoader(
            data, batch_size=case.batch, shuffle=case.sampler == "shuffle",
            sampler=weighted if case.sampler == "weighted" else None,
            drop_last=case.drop_last, collate_fn=collate, num_workers=case.workers,
        )  # fmt: skip
    train = lab.loader(loader)
    held_out = lab.loader(DataLoader(Texts(17, False), batch_size=5, collate_fn=collate), False)
    log, norms, scores = Log(), [], []
    lab.register(log)
    lab.resume(case.path)
    losses = log.losses
    step = scaler.step if scaler else lambda optimizer: optimizer.step()
    scaled: Callable[[Tensor], Tensor] = scaler.scale if scaler else lambda loss: loss
    for epoch in lab.epochs(case.epochs):
        if "freeze" in case.parts:
            model.embedding.requires_grad_(epoch > 0)
        for tokens in train:
            tokens = tokens.to(lab.device)
            if case.most_rows:
                lab.step(lambda rows: compute(model, rows, case), tokens)
            more = case.more_every and lab.batch % case.more_every == case.more_every - 1
            for number in range(case.losses + bool(more) if not case.most_rows else 0):
                loss, weight = count_loss(model(tokens), tokens, case.weight)
                loss = loss * (1 + number) / case.accumulate
                lab.backward(scaled(loss), weight=weight)
            if (lab.batch + 1) % case.accumulate:
                continue
            if scaler and case.clip:
                scaler.unscale_(optimizer)
            if case.clip:
                norms.append(float(lab.clip_grad_norm_(model.parameters(), case.clip_norm)))
            step(optimizer)
            if scaler:
                scaler.update()
            if lab.stepped:
                losses.append(lab.loss)
                lab.zero = True
            if average:
                average.update_parameters(model)
            if schedule and case.schedule != "plateau":
                schedule.step()
            if "by_hand" in case.parts and lab.stepped:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + len(losses))
            optimizer.zero_grad()
            if lab.stepped and case.save_at == len(losses):
                lab.save()
                if case.stop:
                    sys.exit(0)
            if case.break_at == len(losses):
                break
        if case.schedule == "plateau":
            schedule.step(1.0 + epoch)
        if case.evaluate:
            total = count = 0.0
            model.eval()
            with torch.no_grad():
                for tokens in held_out:
                    tokens = tokens.to(lab.device)
                    total += float(count_loss(model(tokens), tokens, "")[0]) * len(tokens)
                    count += len(tokens)
            total, count = lab.reduce((total, count))
            scores.append(total / count)
            model.train()
    whole = model.state_dict() if case.bare else lab.state_dict(model)
    states = {name: value.double().flatten().tolist() for name, value in whole.items()}
    if average:
        states |= {
            f"average.{name}": value.double().flatten().tolist()
            for name, value in average.state_dict().items()
        }
    if case.bare or lab.is_main:
        result = {"losses": losses, "scores": scores, "states": states,
                  "norms": [norm for norm in norms if norm],
                  "rate": optimizer.param_groups[0]["lr"]}  # fmt: skip
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Loop(**json.loads(sys.argv[1])), Path(sys.argv[2]))
