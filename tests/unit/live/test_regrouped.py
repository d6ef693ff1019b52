"""Readers of a run that has lost a rank, and was resumed on another host after that."""

from pathlib import Path

import pytest
from matplotlib.text import Text
from small_runs import START, write_run

from motley import records
from motley.live.runs import Copies
from motley.live.verdict import run_verdict
from motley.plotting import plot_training, style
from motley.publish.series import NewRecords, Position, step_rows
from motley.records.costs import joules, read_training
from motley.records.gpu_csv import LAB_GPU_COLUMNS
from motley.records.json_files import to_json
from motley.records.run_folder import RunFolder
from motley.records.training import add_group

LOST, RESUMED = 20, 40  # steps of 60


def workers(**hosts: str) -> list[dict[str, object]]:
    return [{"rank": int(rank[1:]), "host": host, "uuid": f"GPU-{host}", "device": "P4"}
            for rank, host in hosts.items()]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Ranks 0 to 2; rank 1 is lost; then rank 2 is on another host, by a job that resumed."""
    run = write_run(tmp_path / "run")
    lines = run.read_steps()[0]
    for rank, end in ((0, 60), (1, LOST), (2, 60)):
        with run.step_file(rank).open("w") as file:
            for line in lines[:end]:
                # Rank 2 computes longer in odd steps, and rank 0 waits for it.
                long = 0.05 * (line["step"] % 2)
                own = {"t_compute": 0.1 + long * (rank == 2), "t_wait": 0.02 + long * (rank != 2)}
                file.write(to_json({**line, **own, "n_global": 40, "samples_per_s": 250}) + "\n")
    groups = add_group([], 0, workers(r0="a", r1="b", r2="c"))
    groups = add_group(groups, LOST, workers(r0="a", r2="c"))
    now = workers(r0="a", r2="d")
    run.update_run(ranks=now, groups=add_group(groups, RESUMED, now), started=START)
    return run


def test_each_step_has_the_host_that_took_it(run: RunFolder) -> None:
    steps = records.load(run.path).steps
    hosts = {(rank, step): host for rank, step, host in
             zip(steps["rank"], steps["step"], steps["host"], strict=True)}  # fmt: skip
    assert {host for (rank, _), host in hosts.items() if rank == 1} == {"b"}
    assert hosts[2, RESUMED - 1] == "c" and hosts[2, RESUMED] == "d"
    training = read_training(run)
    assert [training.worker(rank)["host"] for rank in range(3)] == ["a", "b", "d"]
    new = NewRecords(run.read_steps(), [], [], {}, False, Position())
    rows = step_rows(run.read_run(), new, -1)
    named = {name for row in rows for name in row.values if name.endswith("compute_s")}
    assert named == {f"rank/{rank}/compute_s" for rank in ("0_a", "1_b", "2_c", "2_d")}
    copies = Copies(run, run.read_run(), "b", run.path)
    assert "steps.rank1.jsonl" in copies._offsets  # of a host that has lost its only rank


def test_a_verdict_and_bars_are_of_those_who_train_now(run: RunFolder) -> None:
    training = read_training(run)
    now = training.last_launch()
    assert now is not None and sorted(now.steps) == [0, 2]
    assert {line["step"] for line in now.lead} == {*range(RESUMED, 60)}
    assert run_verdict(training, None).step_s == pytest.approx(0.16)
    figure = plot_training.draw_run(training, style.host_colours("abcd"))
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert not any(text.startswith("rank 1") for text in texts)
    ends = [text for text in texts if text.isdigit() and 100 < int(text) < 300]
    assert len(ends) == 2 and len(set(ends)) == 1, ends  # two ranks of one step


def test_energy_counts_each_gpu_while_it_trained(run: RunFolder) -> None:
    columns = (*LAB_GPU_COLUMNS, "Host", "GPU_UUID", "Power_W")
    for host in "abcd":
        rows = [f"{START + second},0,0,0.1,0,P4,0.5,1,1,2,40,{host},GPU-{host},100"
                for second in range(-1, 11)]  # fmt: skip
        run.gpu_file(host).write_text("\n".join([",".join(columns), *rows]) + "\n")
    # 100 W each: three GPUs for a third of the time, then two.
    assert joules(run, read_training(run).steps) == pytest.approx(100 * (3 + 2 + 2) / 3 / 250)


def test_an_older_run_has_one_group(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    steps = records.load(run.path).steps
    assert {*zip(steps["rank"], steps["host"], strict=True)} == {(0, "a"), (1, "b")}
    training = read_training(run)
    assert training.last_launch() == training
