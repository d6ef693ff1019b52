"""What ranks did in some steps, on one clock; several runs in one picture; legends that fit."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from forked import run_script
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from project import LIMIT_S, ROOT, environment
from small_runs import START, write_run

from motley.plotting import style
from motley.plotting.plot_runs import draw_runs, read_losses
from motley.plotting.plot_timeline import longest, spans
from motley.plotting.run_steps import read_or_say
from motley.records.run_folder import RunFolder, find_runs


def line(step: int, ends: float, compute: float, wait: float, late: float) -> dict[str, float]:
    """A step that ends after an optimizer's 0.01 s; ``late``: of this host's clock."""
    return {"step": step, "t_data": 0.0, "t_compute": compute, "t_wait": wait, "t_comm": 0.05,
            "t_opt": 0.01, "time": 1e9 + ends + late}  # fmt: skip


def test_clocks_are_laid_over_each_other_where_all_ranks_meet() -> None:
    ends = [1.0, 2.0, 5.0, 6.0]  # the third step was long, for rank 1
    steps = {
        0: [line(n, end, 0.2, 2.0 if n == 2 else 0.1, 0.0) for n, end in enumerate(ends)],
        1: [line(n, end, 2.2 if n == 2 else 0.3, 0.0, 77.0) for n, end in enumerate(ends)],
    }
    found = [vars(span) for span in spans(steps, 1, 4)]
    assert longest(steps[0]) == 2 and {each["step"] for each in found} == {1, 2, 3}
    assert min(each["start"] for each in found) == 0
    at = {(each["rank"], each["step"], each["part"]): (each["start"], each["end"])
          for each in found}  # fmt: skip
    for step in (1, 2, 3):
        met = at[0, step, "t_comm"]
        assert at[1, step, "t_comm"] == pytest.approx(met, abs=1e-6)
        assert at[0, step, "t_wait"][1] == pytest.approx(met[0], abs=1e-6)
    assert at[0, 2, "t_wait"][1] - at[0, 2, "t_wait"][0] == pytest.approx(2.0)


def test_some_steps_of_a_run_are_drawn_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    write_run(tmp_path / "untold", known=False)
    for words in ([], ["--steps", "10:13"]):
        done = run_script("plots/plot_timeline.py", tmp_path, "--out", tmp_path / "out", *words)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out" / "good.timeline.png").stat().st_size > 20_000
    done = run_script("plots/plot_timeline.py", tmp_path / "good", "--steps", "900:910")
    assert done.returncode == 2 and "its last step is 60" in done.stderr
    done = run_script("plots/plot_timeline.py", tmp_path / "good", "--steps", "9")
    assert (
        done.returncode == 2
        and "write FROM:TO, as in 100:104, which draws steps 101 to 104" in done.stderr
    )


def test_runs_are_drawn_together_and_one_without_a_step_is_said(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    done = run_script("plots/plot_runs.py", tmp_path)
    assert done.returncode == 0 and "empty is left out: it holds no training step" in done.stderr
    assert (tmp_path / "runs.png").stat().st_size > 20_000
    done = run_script("plots/plot_runs.py", tmp_path / "empty")
    assert done.returncode == 2 and "train first" in done.stderr


def test_each_task_has_a_row_and_a_run_that_was_stopped_no_gap(tmp_path: Path) -> None:
    for name, task in (("one", "digits"), ("two", "digits"), ("three", "text")):
        write_run(tmp_path / name).update_run(task={"title": task})
    resumed = {"time": START + 3.15, "event": "resume"}
    RunFolder(tmp_path / "one").events_file.write_text(json.dumps(resumed) + "\n")
    found = read_losses(map(read_or_say, find_runs([tmp_path])))
    texts = {text.get_text() for text in draw_runs(found).findobj(Text)}
    seconds = {name: run.loss.seconds[-1] for name, run in found.items()}
    assert {"digits: 2 runs", "text: 1 run"} <= texts
    assert seconds["one"] <= seconds["two"] == pytest.approx(0.16 * 59)
    one = found["one"]
    found["one"] = replace(one, loss=replace(one.loss, joules=7.2))
    figure = draw_runs(found)
    assert "energy of the GPUs that trained (Wh)" in {t.get_text() for t in figure.findobj(Text)}
    columns = [ax for ax in figure.axes if "energy" in ax.get_xlabel()]
    (line,) = columns[0].lines
    assert line.get_xdata()[-1] == pytest.approx(one.loss.samples[-1] * 7.2 / 3600)


def test_a_verdict_is_told_on_a_terminal_and_to_a_program(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name)
    done = run_script("plots/verdict.py", tmp_path)
    assert done.returncode == 0 and done.stdout.count("\n  A step took 0.158 s.\n") == 2
    done = run_script("plots/verdict.py", tmp_path, "--json")
    told = [json.loads(each) for each in done.stdout.splitlines()]
    assert [Path(each["run"]).name for each in told] == ["one", "two"]
    assert all(each["step_s"] == pytest.approx(0.158, abs=0.01) for each in told)
    cut = subprocess.run(
        f"{sys.executable} plots/verdict.py {tmp_path} | true", shell=True, cwd=ROOT,
        env=environment(PYTHONPATH=str(ROOT / "src")), capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert (cut.returncode, cut.stderr) == (0, "")


WORDS = ("loss", "mean of 3 steps", "as many times faster, if all were equal")
CASES = [
    *(([WORDS[n % 3] for n in range(count)], columns) for count in (1, 3, 7) for columns in (1, 2)),
    (["mean of 3 steps of a run with a rather long name"], 2), (["n" * 40, "n", "n" * 9], 2),
]  # fmt: skip


@pytest.mark.parametrize(("labels", "columns"), CASES)
def test_no_legend_is_cut_off_or_lies_over_another(labels: list[str], columns: int) -> None:
    figure = style.new_figure(9, 4)
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        for label in labels:
            ax.plot([0, 1], label=label)
        style.legend_above(ax)
    canvas.draw()
    boxes = [ax.get_legend().get_window_extent(canvas.get_renderer()) for ax in axes]
    assert all(box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert all(box.x1 <= other.x0 for box, other in pairwise(boxes))
