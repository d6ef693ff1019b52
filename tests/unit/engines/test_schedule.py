"""The rate and the weight decay of each step: cycles, warm-up in steps, a task's own."""

from dataclasses import dataclass, replace

import pytest
import torch
from timm.scheduler import create_scheduler_v2
from torch import nn

from motley.config.options import Config
from motley.engines.schedule import check_schedule, cycle_ends, get_rate, make_schedule
from motley.errors import MotleyError
from motley.plan.length import Length
from motley.tasks.task import Task
from motley.train.command_line import read_config, training_parser


def read(words: str) -> Config:
    return read_config(training_parser(""), words.split())


def optimizer(config: Config) -> torch.optim.Optimizer:
    net = nn.Linear(1, 1)
    groups = [
        {"params": [net.weight], "weight_decay": config.weight_decay},
        {"params": [net.bias], "weight_decay": 0.0, "lr_scale": 0.5},
    ]
    return torch.optim.SGD(groups, lr=config.lr)


def rates(config: Config, length: Length, count: int) -> list[float]:
    made = optimizer(config)
    schedule, found = make_schedule(made, config, length), []
    for step in range(count):
        schedule.step_update(step)
        found.append(get_rate(made))
    return found


@pytest.mark.parametrize("sched", ["cosine", "tanh", "poly"])
@pytest.mark.parametrize("mul", [1.0, 2.0])
def test_cycles_are_timms(sched: str, mul: float) -> None:
    limit, first = 3, 10
    total = first * 3 if mul == 1 else first * 7
    config = read(f"--sched {sched} --epochs {total} --warmup-epochs 0 --lr-cycle-mul {mul} "
                  f"--lr-cycle-limit {limit} --lr-cycle-decay 0.3")  # fmt: skip
    made = optimizer(config)
    theirs, _ = create_scheduler_v2(
        made, sched, num_epochs=first, min_lr=1e-5, cycle_mul=mul, cycle_decay=0.3,
        cycle_limit=limit, decay_rate=1.0, step_on_epochs=False, updates_per_epoch=1,
    )  # fmt: skip
    expected = []
    for step in range(total):
        theirs.step_update(step)
        expected.append(get_rate(made))
    assert rates(config, Length(total, 1, 1), total) == pytest.approx(expected)


@pytest.mark.parametrize(("words", "bounds"), [("0.25 0.75", [5, 15]), ("0.5", 10)])
def test_noise_is_timms_in_epochs(words: str, bounds: int | list[int]) -> None:
    config = read(f"--epochs 20 --warmup-epochs 0 --lr-noise {words} --lr-noise-pct 0.3 --seed 9")
    made = optimizer(config)
    theirs, _ = create_scheduler_v2(made, "cosine", num_epochs=20, min_lr=1e-5)
    noisy, _ = create_scheduler_v2(
        made, "cosine", num_epochs=20, min_lr=1e-5, noise=[float(w) for w in words.split()],
        noise_pct=0.3, noise_seed=9,
    )  # fmt: skip
    plain = rates(replace(config, lr_noise=None), Length(60, 3, 1), 60)
    expected = []
    for step, rate in enumerate(plain):
        factors = []
        for schedule in (theirs, noisy):
            schedule.step(step // 3)
            factors.append(get_rate(made))
        expected.append(rate * factors[1] / factors[0])
    found = rates(config, Length(60, 3, 1), 60)
    assert found == pytest.approx(expected)
    begin = bounds if isinstance(bounds, int) else bounds[0]
    assert found[: 3 * begin] == plain[: 3 * begin] and found[3 * begin] != plain[3 * begin]


def test_a_warm_up_comes_before_the_first_cycle_and_short_runs_have_fewer() -> None:
    config = read("--epochs 14 --warmup-steps 4 --lr-cycle-limit 2 --lr-cycle-decay 0.5 --lr 1")
    found = rates(config, Length(14, 1, 1), 14)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[9] == pytest.approx(0.5) and found[8] < 0.2
    found = rates(replace(config, warmup_lr=0.6), Length(14, 1, 1), 5)
    assert found == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0])
    assert cycle_ends(replace(config, lr_cycle_limit=9), 3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "continued", "warmup"),
    [
        ("", (), 20), ("--warmup-steps 7", (), 7), ("--warmup-steps 900", (), 99),
        ("--warmup-epochs 3", (), 30), ("--warmup-epochs 3 --warmup-steps 7", (), 7),
        ("--warmup-epochs 3 --warmup-steps 7", ("warmup_steps",), 30),
        ("--warmup-epochs 3 --warmup-steps 7", ("warmup_epochs",), 7),
        ("--warmup-steps 7", ("warmup_steps",), 7),
        ("--task text", (), 10), ("--task text --warmup-epochs 3", (), 30),
        ("--task text --warmup-steps 40", (), 40),
    ],
)  # fmt: skip
def test_the_warm_up_is_what_was_typed_last_in_steps_or_epochs(
    words: str, continued: tuple[str, ...], warmup: int
) -> None:
    config = replace(read(f"--epochs 10 {words}"), continued_names=frozenset(continued))
    found = rates(config, Length(10, 10, 1), 100)
    assert found.index(max(found)) == warmup


def test_the_rate_ends_at_a_part_of_itself_and_the_weight_decay_where_it_should() -> None:
    config = read("--epochs 11 --warmup-epochs 0 --min-lr 10% --weight-decay-end 0.2")
    made = optimizer(config)
    schedule, decays = make_schedule(made, config, Length(11, 1, 1)), []
    for step in range(11):
        schedule.step_update(step)
        decays.append([group["weight_decay"] for group in made.param_groups])
    assert decays[0] == [0.05, 0.0] and decays[5] == [pytest.approx(0.125), 0.0]
    assert decays[10] == [pytest.approx(0.2), 0.0]
    schedule.step_update(11)
    assert get_rate(made) == pytest.approx(0.1 * config.lr)
    assert config.as_json()["min_lr"] == "10%"


@dataclass
class Halves(Task):
    """A task whose rate halves each step."""

    def schedule(self, step: float, total: int) -> float:
        """See Task."""
        return 0.5**step if step < total - 1 else -1.0


def test_a_task_sets_the_rate_of_each_step_and_says_what_it_returns() -> None:
    config = replace(Config(), own=(Halves(),), epochs=5, weight_decay_end=0.1)
    assert rates(config, Length(5, 1, 1), 4) == pytest.approx([1e-3, 5e-4, 2.5e-4, 1.25e-4])
    with pytest.raises(MotleyError, match=r"schedule\(4, 5\) of Halves returns -1"):
        rates(config, Length(5, 1, 1), 5)
    typed = replace(config, typed_names=frozenset({"sched"}))
    with pytest.raises(MotleyError, match="--sched has no effect, since schedule"):
        check_schedule(typed)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--sched step --lr-cycle-limit 2", "--lr-cycle-limit has no effect with --sched step"),
        ("--weight-decay 0 --weight-decay-end 0.1", "no effect with --weight-decay 0"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_is_refused(words: str, says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        check_schedule(read(words))
