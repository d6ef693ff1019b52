"""The plot scripts on small real records: pictures, exit codes, broken files."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from forked import run_script
from matplotlib.image import imread
from matplotlib.text import Text
from matrices import KNOWN
from project import ROOT
from small_runs import START, write_gpu_log, write_lab_log, write_run

from motley import records
from motley.cluster.hostfile import Host
from motley.errors import MotleyError
from motley.live.verdict import run_verdict
from motley.plotting import plot_gpu, plot_training, style
from motley.plotting.plot_gpu import read_folder
from motley.records.costs import read_training
from motley.records.run_folder import RunFolder
from motley.records.training import others_ready
from motley.sweep.matrix import PRESETS, read_matrix
from motley.sweep.results import BaselineFolder
from motley.sweep.table import read_rows


def texts_of(run: Path) -> list[str]:
    """All that the picture of a run's training says."""
    training = read_training(RunFolder(run))
    colours = style.host_colours({worker["host"] for worker in training.run["ranks"]})
    figure = plot_training.draw_run(training, colours)
    return [text.get_text() for text in figure.findobj(Text)]


def assert_picture(path: Path) -> None:
    assert path.stat().st_size > 20_000, path
    assert imread(path)[..., :3].std() > 0.05, f"{path} is blank"


def test_gpu_pictures_of_our_logs_and_of_the_labs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "logs" / "run")
    write_gpu_log(run, "a", gpu=True)
    write_gpu_log(run, "b", gpu=False)
    (run.path / "gpu.c.csv").write_text("this,is,no\nlog,of,GPUs\n")
    lab = tmp_path / "logs" / "5_GPUs" / "p1_b16_e10"
    write_lab_log(lab)

    done = run_script("plots/plot_gpu.py", tmp_path / "logs")

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(lab / "gpu.png"), str(run.path / "gpu.png")]
    assert_picture(lab / "gpu.png")
    assert_picture(run.path / "gpu.png")
    assert len(done.stderr.splitlines()) == 1
    assert "gpu.c.csv is not a GPU log" in done.stderr


def test_a_pause_of_a_resumed_run_is_left_out_and_marked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_gpu_log(run, "a", gpu=False)
    log = run.gpu_file("a")
    head, *rows = log.read_text().splitlines()
    late = [row.replace("2025-11-21", "2025-11-23") for row in rows]  # of 20 s each
    assert late != rows
    log.write_text("\n".join([head, *rows, *late]) + "\n")
    (series,) = plot_gpu.to_series(read_folder([log]), style.host_colours(["a"]))
    assert series.seconds.tolist() == [2.0 * number for number in range(20)]
    figure = plot_gpu.draw_folder("run", [series])
    said = [text.get_text() for text in figure.findobj(Text)]
    assert "a pause, left out" in said
    assert "time since the first sample, pauses left out (s)" in said
    line = next(line for line in figure.axes[0].lines if len(line.get_xdata()) > 10)
    assert np.isnan(line.get_ydata()).sum() == 1  # no line leads over it


def test_training_pictures_whole_failed_and_cut_short(tmp_path: Path) -> None:
    write_run(tmp_path / "logs" / "good")
    write_run(tmp_path / "logs" / "cut", status="failed", known=False)
    with (tmp_path / "logs" / "cut" / "steps.rank1.jsonl").open("a") as file:
        file.write('{"step": 60, "lo')
    RunFolder(tmp_path / "logs" / "not_begun").create()
    RunFolder(tmp_path / "logs" / "not_begun").write_run({"status": "failed"})

    done = run_script("plots/plot_training.py", tmp_path / "logs", "--out", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert "line 61 is cut short" in done.stdout + done.stderr
    assert "not_begun is left out: it holds no training step" in done.stderr
    assert len(list((tmp_path / "out").iterdir())) == 2
    assert_picture(tmp_path / "out" / "good.training.png")
    assert_picture(tmp_path / "out" / "cut.training.png")


def test_training_picture_says_what_is_unknown_and_leaves_it_out(tmp_path: Path) -> None:
    write_run(tmp_path / "good")
    write_run(tmp_path / "cut", status="failed", known=False)
    good, cut = texts_of(tmp_path / "good"), texts_of(tmp_path / "cut")
    assert "810 images/s\ngood: vit_digits on digits, 2 ranks, final top-1 70.0 %" in good
    assert any("\ncut (failed): " in text for text in cut)
    assert "rank 1 - b\nCPU, fp32, 20 samples" in good
    assert {"compute", "communication", "waiting for the slowest rank"} <= set(good)
    assert not {"communication", "waiting for the slowest rank"} & set(cut)
    assert any("communication not separable from compute" in text for text in cut)


def test_the_title_and_the_verdict_of_a_resumed_run_agree(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    ranks = run.read_run()["ranks"]
    run.update_run(
        groups=[{"step": 0, "ranks": ranks}, {"step": 30, "ranks": ranks}],
        plan={"wire": "exact", "forecast": {"global_batch": 40, "limit_s": 0.1, "step_s": 0.15}},
    )
    training = read_training(run)
    for lines in training.steps.values():
        for line in lines[:30]:  # the first launch was slower
            line["samples_per_s"] = 100.0
    fraction = run_verdict(training).fraction
    assert fraction == pytest.approx(253 * 0.1 / 40)
    said = plot_training.story(training)
    assert said == f"810 images/s, {fraction:.0%} of the sum of all devices, since step 31"
    assert "learning rate" in texts_of(run.path)


def test_a_smaller_last_batch_of_an_epoch_is_no_dip_of_the_rate(tmp_path: Path) -> None:
    training = read_training(write_run(tmp_path / "run"))
    for line in training.lead[19::20]:  # a third of the time for a tenth of the samples
        line |= {"n_global": 4, "weight": 12.8, "samples_per_s": 75.0}
    ax = style.new_figure(6, 4).subplots()
    plot_training.draw_rate(ax, training)
    drawn = np.asarray(ax.lines[0].get_ydata())
    assert len(drawn) == 57 and drawn.min() == 250 * 128 / 40
    assert ax.lines[0].get_label() == "images/s, without an epoch's smaller last batch"


def test_training_picture_of_many_ranks_has_three_of_the_others(tmp_path: Path) -> None:
    run = write_run(tmp_path / "wide")
    ready = [0.1 + rank / 1000 for rank in range(70)]
    (run.path / "steps.rank1.jsonl").unlink()
    told = run.read_steps()[0]
    (run.path / "steps.rank0.jsonl").unlink()
    with run.steps(0) as lines:
        for line in told:
            others = others_ready(ready, [2] * 70, range(70)) if line["step"] else None
            lines.write({**line, "others_ready": others, "time": START + 2.0 * line["step"]})
    run.update_run(ranks=[{"rank": rank, "host": f"n{rank // 8}"} for rank in range(70)])
    texts = texts_of(run.path)
    assert "last of 69 others\nmost often rank 69 - n8 (100%)" in texts
    assert "first of 69 others\nmost often rank 1 - n0 (100%)" in texts
    assert "median: 810" in texts  # of 40 samples that count 128 together
    assert "mean, evaluations and saves included: 64" in texts


@pytest.mark.parametrize("script", ["plot_gpu.py", "plot_training.py"])
def test_nothing_to_draw_is_one_line_and_exit_code_2(script: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        done = run_script(f"plots/{script}", folder)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("motley: ")
        assert "train first, for example: mpirun" in done.stderr


def test_modules(tmp_path: Path) -> None:
    """Imports stay light, colours differ and last, loads of ``88.0%`` are read per GPU."""
    write_lab_log(tmp_path / "lab")
    code = """
import json, pathlib, sys
from motley.plotting import plot_gpu, plot_training, style
series = plot_gpu.to_series(
    plot_gpu.read_folder([pathlib.Path(sys.argv[1])]), style.host_colours(["rank 0", "rank 1"])
)
print(json.dumps({
    "modules": [name for name in ("torch", "mpi4py") if name in sys.modules],
    "twenty": style.host_colours(f"node{i}" for i in range(20)),
    "same": style.host_colours(["b", "a", "b"]) == style.host_colours(["a", "b"]),
    "loads": {one.label: one.values("load", 100).tolist() for one in series},
    "lines": len({(one.look["color"], one.look["linestyle"]) for one in series}),
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "lab" / "metrics.csv"], capture_output=True,
        text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["modules"] == []
    assert list(found["twenty"]) == [f"node{i}" for i in range(20)]
    assert len(set(found["twenty"].values())) == 20
    assert found["same"]
    assert found["loads"] == {
        f"rank {rank}: GPU {gpu} (Tesla P4)": pytest.approx([88.0] * 5)
        for rank in range(2)
        for gpu in range(2)
    }
    assert found["lines"] == 4


def test_baselines_are_drawn_and_what_failed_is_shown(tmp_path: Path) -> None:
    hosts = (Host("a"), Host("b"))
    matrix = read_matrix(PRESETS["strong"], hosts, KNOWN)
    folder = BaselineFolder(tmp_path / "strong")
    folder.claim(matrix)
    for cell in (*matrix.references, *matrix.cells):
        run = write_run(folder.attempt(cell, 0).path)
        run.update_run(plan={"forecast": {"limit_s": 0.4 / cell.hosts}})
        folder.output(cell, 0).write_text("")
        folder.end(cell, 0, 0, 5.0)
    folder.output(matrix.cells[0], 1).write_text("motley: rank 0 on a: CUDA out of memory")
    folder.end(matrix.cells[0], 1, 1, 5.0)
    rows = read_rows(folder)
    assert [row.outcome for row in rows] == ["done", "out of memory", "done"]
    assert rows[2].limit_samples_per_s == pytest.approx(128 / 0.2)
    assert rows[2].comm_s == pytest.approx(0.03) and rows[2].spread is None
    assert rows[2].mean_samples_per_s == pytest.approx(40 / 0.16)
    assert rows[2].mean_rate == "250 images/s"
    (folder.attempt(matrix.cells[1], 0).path / "steps.rank0.jsonl").open("a").write('{"step": 6')
    done = run_script("plots/plot_baselines.py", tmp_path, "--out", tmp_path / "pictures")
    assert done.returncode == 0 and "is cut short" in done.stdout, done.stderr
    assert_picture(tmp_path / "pictures" / "strong.baselines.png")


def test_the_labs_old_folders_give_a_scaling_picture(tmp_path: Path) -> None:
    for gpus in (1, 3, 5):
        write_lab_log(tmp_path / f"{gpus}_GPUs" / "p1_b16_e5")
    (tmp_path / "4_GPUs" / "p1_b16_e5").mkdir(parents=True)
    (tmp_path / "4_GPUs" / "p1_b16_e5" / "metrics.csv").write_text("nothing,known\n1,2\n")
    done = run_script("plots/plot_baselines.py", tmp_path)
    assert done.returncode == 0 and "4_GPUs" in done.stderr, done.stderr
    assert_picture(tmp_path / "strong_scaling.png")
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run_script("plots/plot_baselines.py", empty)
    assert done.returncode == 2 and "measure first" in done.stderr


@pytest.mark.turns
@pytest.mark.parametrize("script", ["plot_gpu.py", "plot_training.py", "report.py"])
def test_names_that_look_like_formulas_are_drawn_as_they_are(script: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "logs" / r"a$\frac{$b")
    write_gpu_log(run, r"host$\frac{$", gpu=True)
    done = run_script(f"plots/{script}", tmp_path / "logs", "--out", tmp_path / "out")
    assert done.returncode == 0 and not done.stderr, done.stderr
    for path in (tmp_path / "out").glob("*.png"):
        assert_picture(path)


def test_half_a_million_values_are_smoothed_at_once_and_as_by_a_convolution() -> None:
    values = 1e6 + np.random.default_rng(3).normal(size=3000)
    values[[5, 6, 7, 8, 9, 999]] = np.nan
    known = np.isfinite(values)
    ones = np.ones(5)
    counts = np.convolve(known, ones, "same")
    sums = np.convolve(np.where(known, values, 0.0), ones, "same")
    due = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    assert style.smooth(values, 5) == pytest.approx(due, rel=1e-12, nan_ok=True)
    begun = time.process_time()
    style.smooth(np.ones(500_000), 12_501)
    assert time.process_time() - begun < 1  # a convolution takes 5 s


_READERS = (
    "plot_training.py", "plot_runs.py", "plot_timeline.py", "report.py", "verdict.py",
    "watch.py --once", "publish.py --to mlflow",
)  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ('{"status": "fin', "is damaged: "), ({"ranks": [5]}, "its ranks is not a list of objects"),
        ({"facts": 7}, "its facts is not a list"),
        ({"plan": {"forecast": 3}}, "its forecast is not an object"),
        ({"result": {"top1": "high"}}, "its result holds a string"),
    ],
)  # fmt: skip
def test_each_reader_names_a_damaged_run_json(
    damage: str | dict[str, object], said: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")
    text = damage if isinstance(damage, str) else json.dumps(damage)
    run.run_file.write_text(text)
    with pytest.raises(MotleyError, match=re.escape(f"{run.run_file} is damaged")):
        records.load(run.path)
    for reader in _READERS if isinstance(damage, str) else ("watch.py --once",):
        script, *words = reader.split()
        done = run_script(f"plots/{script}", run.path, *words)
        told = " ".join((done.stdout + done.stderr).split())  # a screen breaks long lines
        assert "Traceback" not in told, told
        assert said in told and f"{run.run_file} is damaged" in told, (reader, told)
        assert "write {} into it" in told
    run.run_file.write_text("{}")
    assert len(records.load(run.path).steps["step"]) == 120


def test_a_damaged_run_hides_no_other_in_a_report(tmp_path: Path) -> None:
    write_run(tmp_path / "good", status="running")  # and nobody holds its lock
    write_run(tmp_path / "bad").path.joinpath("run.json").write_text("")
    done = run_script("plots/report.py", tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert f"{tmp_path / 'bad' / 'run.json'} is damaged" in done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "run.json is damaged" in page and ">stopped<" in page and ">running<" not in page
