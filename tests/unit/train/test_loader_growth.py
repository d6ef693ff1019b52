"""Loader processes are added where a rank waits for its samples, and only there."""

from collections.abc import Iterator

from motley.data.loader_memory import WINDOW, Growth, LoaderGrowth
from motley.records.training import StepRecord

STEP_S = 0.1


def records(
    waits: Iterator[float] | float, others: float | None = None, first: int = 0
) -> Iterator[StepRecord]:
    """Yield records of steps that wait so many seconds for samples; others: t_wait of each."""
    step = first
    while True:
        waited = waits if isinstance(waits, float) else next(waits)
        yield StepRecord(
            step=step, epoch=0, loss=1.0, lr=0.1, loss_scale=1.0, overflow=False, grad_norm=1.0,
            n_local=8, n_global=8, t_data=waited, t_compute=STEP_S, t_wait=others, t_comm=0.0,
            t_opt=0.0, mem_peak_mib=1.0, samples_per_s=8 / (STEP_S + waited), weight=8.0, time=0.0,
        )  # fmt: skip
        step += 1


def wish(
    growth: LoaderGrowth, steps: Iterator[StepRecord], most: int = 3 * WINDOW
) -> Growth | None:
    """Return what is wished for within so many steps."""
    found = (growth.step(next(steps)) for _ in range(most))
    return next((each for each in found if each), None)


def test_processes_double_while_the_wait_shrinks_and_stop_when_it_does_not() -> None:
    growth, number = LoaderGrowth(1, 12, lambda: 99.0), 1
    for waits, workers in ((0.2, 2), (0.1, 4), (0.05, 8), (0.02, 12)):
        found = wish(growth, records(waits, first=1000 * number))
        assert found and found.workers == workers
        assert abs(found.waited - waits / (waits + STEP_S)) < 1e-9
        growth.take(found.workers, found.waited)
        number += 1
    assert wish(growth, records(0.02, first=10_000)) is None, "no core is left"

    growth = LoaderGrowth(1, 12, lambda: 99.0)
    found = wish(growth, records(0.1))
    assert found
    growth.take(found.workers, found.waited)
    assert wish(growth, records(0.1, first=1000)) is None, "a second process has not helped"
    assert wish(growth, records(0.5, first=2000)) is None, "and a third is not tried"


def test_a_rank_that_does_not_wait_for_input_keeps_its_processes() -> None:
    def rare() -> Iterator[float]:  # one sample in a while takes two seconds
        while True:
            yield from (2.0, *[0.0] * (WINDOW // 2))

    cases = {
        "hardly any wait": records(0.002),
        "slow files now and then": records(rare()),
        "another rank is slower": records(0.1, others=0.12),
    }
    for name, steps in cases.items():
        assert wish(LoaderGrowth(1, 8, lambda: 99.0), steps, 200) is None, name
    assert wish(LoaderGrowth(1, 8, lambda: 0.4), records(0.1), 200) is None, "the host is busy"
    assert wish(LoaderGrowth(2, 2, lambda: 99.0), records(0.1), 200) is None, "--workers 2"


def test_no_more_is_asked_for_where_memory_holds_no_more() -> None:
    growth = LoaderGrowth(2, 8, lambda: 99.0)
    found = wish(growth, records(0.1))
    assert found and found.workers == 4
    growth.take(2, found.waited)
    assert wish(growth, records(0.1, first=1000), 200) is None


def test_a_step_counts_once() -> None:
    growth, steps = LoaderGrowth(0, 1, lambda: 1.0), records(0.1)
    same = next(steps)
    assert [growth.step(same) for _ in range(100)] == [None] * 100
    found = wish(growth, steps)
    assert found and found.workers == 1
