"""plots/watch.py in a terminal, and without one."""

import os
import re
import signal
from itertools import product
from pathlib import Path

import pytest
from forked import run_script
from live_runs import LAB, LiveRun
from pseudo_terminal import PseudoTerminal
from small_runs import write_run

from motley.live.runs import Runs
from motley.plotting.watch_screen import ASCII, BLOCKS, Sort, View, runs_screen, screen

HOSTILE = "<b>\x1b[2Jpwned\u202e"


@pytest.fixture
def live(tmp_path: Path) -> LiveRun:
    run = LiveRun(tmp_path / "logs" / "lab", last_step=4000, compute_s=4.0, samples_s=30.0)
    for _ in range(30):
        run.take_step()
    run.take_samples(others="alice")
    return run


def terminal_of(run: LiveRun, columns: int, lines: int, **extra: str) -> PseudoTerminal:
    return PseudoTerminal("plots/watch.py", run.run.path, columns=columns, lines=lines, **extra)


def test_without_a_terminal_it_is_printed_once(live: LiveRun) -> None:
    for _ in range(5):
        live.take_step(slow={3: 2.0})
    done = run_script("plots/watch.py", live.run.path)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout == run_script("plots/watch.py", live.run.path, "--once").stdout
    told = done.stdout.splitlines()
    assert told[0] == "lab  running  ViT on digits"
    assert "1%" in told[1] and " left  step 35/4,000" in told[1]
    assert any(line.startswith("waits for tesla3 (rank 3): ") for line in told)
    assert sum("RTX 3070" in line and "alice 0.6G" in line for line in told) == 5
    assert "\x1b" not in done.stdout and max(map(len, told)) <= 120


def test_of_several_runs_each_has_a_line(live: LiveRun, tmp_path: Path) -> None:
    write_run(tmp_path / "logs" / "old")
    live.run.run_file.rename(live.run.path / "x")
    (live.run.path / "x").rename(live.run.run_file)
    told = run_script("plots/watch.py", tmp_path / "logs").stdout
    assert told.startswith("2 runs\n") and "old  finished" in told and "lab  running" in told
    assert told.count("RTX 3070") == 5  # of the one that runs


def test_what_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none", "there is no folder"), (tmp_path, "no run under")):
        done = run_script("plots/watch.py", path)
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.startswith(f"motley: {said} {path}: train first")
        assert len(done.stderr.splitlines()) == 1
    run = tmp_path / "making"
    (run / "checkpoints").mkdir(parents=True)
    (run / "steps.rank0.jsonl").write_text('{"step": 0')
    done = run_script("plots/watch.py", run)
    assert done.returncode == 0 and "making  being made" in done.stdout


def test_it_is_live_on_80_by_24_and_names_the_slow_host(live: LiveRun) -> None:
    with terminal_of(live, 80, 24) as terminal:
        shown = terminal.await_frame(lambda text: "no rank waits" in text)
        assert len(shown) <= 24 and max(map(len, shown)) <= 80
        assert all(any(line.startswith(f"   {rank} {host}") for line in shown)
                   for rank, host in enumerate(LAB))  # fmt: skip
        assert "alice 0.6G" in "".join(shown) and shown[-1].startswith("q quit")
        for _ in range(5):
            live.take_step(slow={3: 2.0})
        live.run.event("replan", text="the ranks now take other shares")
        shown = terminal.await_frame(lambda text: "waits for tesla3 (rank 3)" in text, limit=6)
        assert "replan: the ranks now take other shares" in "\n".join(shown)
        terminal.press("\x1b[B\r")  # the first rank's history
        shown = terminal.await_frame(lambda text: "rank 0 on tesla0, RTX 3070" in text, limit=6)
        assert any(line.startswith("waiting") and "█" in line for line in shown)
        terminal.press("\x1bs")  # back, and in another order
        terminal.await_frame(lambda text: "rank host" in text, limit=6)
        terminal.resize(60, 16)
        shown = terminal.await_frame(lambda text: max(map(len, text.split("\n"))) <= 60, limit=6)
        assert len(shown) <= 16 and "tesla3" in "".join(shown)
        terminal.press("q")
        assert terminal.end() == 0
    assert "\x1b[?1049l" in terminal.output and "\x1b[?25h" in terminal.output
    assert any("3" in colour for colour in terminal.colours)


def test_20_columns_no_colours_and_no_unicode_are_enough(live: LiveRun) -> None:
    for _ in range(5):
        live.take_step(slow={3: 2.0})
    with terminal_of(
        live, 20, 24, NO_COLOR="1", PYTHONIOENCODING="ascii", COLUMNS="80"
    ) as terminal:
        shown = terminal.await_frame(lambda text: "waits for tesla3" in text)
        assert len(shown) <= 24 and max(map(len, shown)) <= 20
        assert any("3 tesla3" in line and "#" in line for line in shown)
        os.kill(terminal.job.pid, signal.SIGINT)
        assert terminal.end() == 0
    assert terminal.output.isascii()
    assert not {code for code in terminal.colours if ";3" in code or code.startswith("\x1b[3")}


def test_a_name_of_a_host_draws_nothing(tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "lab", LAB[:2], compute_s=4.0)
    run.run.update_run(ranks=[{"rank": 0, "host": HOSTILE}, {"rank": 1, "host": "b"}])
    run.take_step(slow={0: 3.0})
    run.run.event("drift", text=HOSTILE)
    done = run_script("plots/watch.py", tmp_path)
    assert "waits for <b>?[2Jpwned? (rank 0)" in done.stdout
    assert "\x1b" not in done.stdout and "\u202e" not in done.stdout


def test_the_list_of_runs_has_the_curves_of_loss_and_metrics(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name)
    done = run_script("plots/watch.py", tmp_path)
    curves = re.findall(r"loss (\S+) 0\.3\d+  held-out top1 (\S+) 0\.7  held-out loss", done.stdout)
    assert len(curves) == 2 and all(loss != top1 for loss, top1 in curves)


def test_any_size_of_a_terminal_has_its_lines(live: LiveRun) -> None:
    live.run.update_run(ranks=[
        {"rank": rank, "host": host} for rank, host in enumerate(["日本" * 9, "b" * 60, "c", "d"])
    ])  # fmt: skip
    runs = Runs(live.run.path)
    runs.look(0.0, 0.0)
    now = runs.snapshot("lab", 0.0, rank=2)
    views = (View(), View(rank=3, sort=Sort.WAITED), View(rank=2, history=True))
    for width in (1, 2, 7, 20, 33, 47, 60, 80, 81, 120, 300):
        for height, view in product((2, 3, 7, 12, 24, 60, None), views):
            for lines in (
                screen(now, view, width, height, BLOCKS),
                runs_screen([now, now], view, width, height, ASCII),
            ):
                assert max(line.cell_len for line in lines) <= width, (width, height, lines)
                assert height is None or len(lines) == height, (width, height, lines)
