"""Ending well: a failure anywhere ends all in seconds, with one line on the first cause."""

import contextlib
import json
import os
import pty
import random
import re
import select
import shlex
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import Jobs, processes_of, wait_until
from long_runs import LONG, goes_on, rank_process, start, status, steps_done
from project import DDP, ROOT, ZERO, environment

from motley.checkpoint.run import find_run
from motley.config.options import Config
from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi


@pytest.mark.turns
@pytest.mark.parametrize(("script", "rank"), [(DDP, 0), (DDP, 2), (ZERO, 2)])
def test_a_killed_rank_ends_all_and_is_named(jobs: Jobs, script: str, rank: int) -> None:
    job = start(jobs, script)
    os.kill(rank_process(jobs.logs, rank), signal.SIGKILL)
    done = jobs.wait(job, 10)
    assert done.code != 0
    lines = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert f"rank {rank} " in lines[0] and "died without a message" in lines[0]
    # Mpirun may leave the others the time to save what they hold.
    assert all("saved" in line for line in lines[1:]) and len(lines) < 3
    wait_until(lambda: not processes_of(str(jobs.logs)), 3)
    if rank:
        assert status(jobs)["status"] == "failed"
        fault = next(
            e for e in RunFolder(jobs.logs / "long").read_events() if e["event"] == "fault"
        )
        assert fault["rank"] == rank and fault["step"] >= 9


FAILING = """
import os, sys, time, torch.distributed as dist, torch
from motley.errors import MotleyError
from motley.launch.world import run
from motley.measure.process_group import join_process_group

def record(event):
    time.sleep(event["after"])
    open("/dev/full", "w").write(str(event) * 9999)

def main(world):
    join_process_group(world)
    world.supervisor.step = 7
    world.supervisor.on_event = record
    dist.all_reduce(torch.ones(9))
    if world.rank == 1:
        {failure}
    try:
        dist.all_reduce(torch.ones(9))  # the others wait here for rank 1
    except RuntimeError:
        if "no echo" in {failure!r}:
            time.sleep(0.05)
            raise MotleyError("memory ended here") from None
        raise

run(main)
"""


@pytest.mark.turns
@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ("raise ValueError('bad thing')", "rank 1 on .*, step 8: ValueError: bad thing"),
        ("os._exit(0)", "rank 1 on .* died without a message"),
        ("sys.exit(0)", "rank 1 on .* SystemExit"),
        ("os.kill(os.getpid(), 11)", "rank 1 on .*: crashed .*: Segmentation fault; its traceback"),
        ("os.abort()", "rank 1 on .*: crashed in compiled code: Aborted; its traceback above"),
        ("os.abort()  # no echo", "rank 0 on .*, step 8: memory ended here"),
        ("world.supervisor.record_event({'after': 0})", "rank 0 on .*: OSError: .*No space left"),
        # When all are done.
        ("world.supervisor.record_event({'after': 1})", "rank 0 on .*: OSError: .*No space left"),
    ],
)
def test_the_first_cause_is_named_and_not_its_echo(
    jobs: Jobs, tmp_path: Path, failure: str, says: str
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(failure=failure))
    begun = time.monotonic()
    done = jobs.run(2, script)
    assert done.code != 0
    lines = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert len(lines) == 1
    assert re.search(says, lines[0])
    if done.code == 1:  # not by a signal: mpirun's words point to ours
        assert 'in the line above that begins with "motley:"' in done.output
    if "crashed" in says:
        assert "in main" in done.output.partition("Fatal Python error")[2]
    assert time.monotonic() - begun < 40


@pytest.mark.turns
@pytest.mark.parametrize("stop", ["TERM", "HUP", "INT", "INT INT"])
def test_who_stops_a_run_is_told_how_to_continue(jobs: Jobs, stop: str) -> None:
    job = start(jobs, DDP, ranks=2)
    saved = jobs.logs / "long" / "checkpoints"
    wait_until(lambda: any(saved.glob("step_*")), 30)  # of the first epoch
    for name in stop.split():
        job.send_signal(signal.Signals[f"SIG{name}"])  # as Ctrl-C does, to mpirun
        time.sleep(0.1)
    output, _ = job.communicate(timeout=10)
    assert job.returncode != 0
    (line,) = [line for line in output.splitlines() if line.startswith("motley: ")]
    assert re.search(
        r"stopped by Ctrl-C or a signal to the launcher after step \d+; "
        r"the last checkpoint is of step \d+, (and|so no) steps? .*will be repeated; "
        r"continue with: ",
        line,
    )
    begun = [str(word) for word in job.args]
    at = begun.index("--logs")
    again = [*begun[:at], *map(str, LONG), *begun[at : at + 4], "--resume", "auto"]
    assert shlex.split(line.partition("continue with: ")[2]) == again
    wait_until(lambda: not processes_of(str(jobs.logs)), 10)
    run = status(jobs)
    assert run["status"] == "stopped" and run["failure"]["kind"] == "stopped"
    assert [e["event"] for e in RunFolder(jobs.logs / "long").read_events()].count("fault") == 1
    found = find_run(Config(logs=str(jobs.logs), resume="auto"))
    assert found[0] == jobs.logs / "long" and found[1]


def test_a_closed_terminal_does_not_end_what_nohup_keeps(jobs: Jobs) -> None:
    line = ("nohup", "bash", "setup/keep_training.sh", "mpirun", "-np", 2, "--hostfile",
            "hosts.txt", "./entry_cn.sh", DDP, "--logs", jobs.logs, "--run", "long",
            *LONG)  # fmt: skip
    with subprocess.Popen(
        [*map(str, line)], cwd=ROOT, env=environment(), start_new_session=True, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as job:  # fmt: skip
        wait_until(lambda: steps_done(jobs.logs / "long") > 3 or job.poll() is not None, 60)
        os.killpg(job.pid, signal.SIGHUP)  # as a shell does to its jobs when it loses its terminal
        goes_on(lambda: steps_done(jobs.logs / "long"))
        job.send_signal(signal.SIGINT)  # mpirun has no terminal that would send it one
        output, _ = job.communicate(timeout=15)
    assert "stopped by Ctrl-C" in output and job.returncode == 130, output
    last_words = output.partition("stopped by")[2]  # one instruction, if there is a checkpoint
    assert last_words.count("--run long") == last_words.count("continue with") <= 1


def test_last_words_come_to_the_terminal_where_ctrl_c_has_ended_tee(jobs: Jobs) -> None:
    words = ("mpirun", "-np", 2, "--hostfile", "hosts.txt", "./entry_cn.sh", DDP,
             "--logs", jobs.logs, "--run", "long", *LONG)  # fmt: skip
    job = f"{shlex.join(map(str, words))} 2>&1 | tee {jobs.logs.parent / 'log'}"
    line = f"trap : INT; {job}; sleep 2"  # the shell stays, as one does that somebody types into
    pid, screen = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe("bash", ["bash", "-c", line], environment())
    said, deadline = b"", time.monotonic() + 60
    with contextlib.suppress(OSError):  # Linux's word for: nobody has it open any more
        while time.monotonic() < deadline:
            if b"\x03" not in said and steps_done(jobs.logs / "long") > 3:
                os.write(screen, b"\x03")
                said += b"\x03"
            if select.select([screen], [], [], 0.1)[0]:
                said += os.read(screen, 65536)
    os.waitpid(pid, 0)
    os.close(screen)
    assert b"motley: stopped by Ctrl-C" in said.partition(b"\x03")[2], said.decode()
    wait_until(lambda: not processes_of(str(jobs.logs)), 10)


def test_a_signal_to_one_rank_is_not_the_users_stop(jobs: Jobs) -> None:
    job = start(jobs, DDP)
    os.kill(rank_process(jobs.logs, 2), signal.SIGTERM)
    done = jobs.wait(job, 10)
    assert done.code != 0
    (line,) = [line for line in done.output.splitlines() if line.startswith("motley: ")]
    assert "rank 2 on" in line and "stopped by SIGTERM, which was sent to this rank alone" in line
    assert status(jobs)["status"] == "failed"


def test_a_killed_launcher_is_named_and_leaves_nothing(jobs: Jobs) -> None:
    job = start(jobs, DDP, ranks=2)
    maps = Path(f"/proc/{rank_process(jobs.logs, 0)}/maps").read_text()
    files = {Path(path) for path in re.findall(r"/dev/shm/sm_segment\.\S+", maps)}
    assert len(files) == 2 and all(path.exists() for path in files)
    job.kill()
    output, _ = job.communicate(timeout=10)
    (line,) = [line for line in output.splitlines() if line.startswith("motley: ")]
    killed = r"the launcher \(\w+, process \d+ on .*\) was killed, .* after step \d+; "
    assert re.search(killed, line)
    assert line.endswith("continue with --resume auto")
    wait_until(lambda: not processes_of(str(jobs.logs)), 3)
    wait_until(lambda: not any(path.exists() for path in files), 3)
    wait_until(lambda: not list(Path(tempfile.gettempdir()).glob(f"ompi*/pid.{job.pid}")), 3)
    assert not (Path(tempfile.gettempdir()) / f"ompi.{job.pid}").exists()
    run = status(jobs)
    assert run["status"] == "failed" and run["failure"]["kind"] == "launcher lost"


@pytest.mark.slow
def test_ten_kills_at_random_steps_leave_no_trace_in_the_losses(jobs: Jobs) -> None:
    options = (DDP, "--logs", jobs.logs, "--max-steps", 75, "--save-every", 3, "--epochs", 20)
    ranks = (2, *options, "--shares", "2,1", "--micro-batch", 40, "--drop", 0.1)
    unbroken = jobs.fork(*ranks, "--run", "unbroken")
    assert unbroken.code == 0, unbroken.output
    folder = jobs.logs / "broken"
    choose, resume = random.Random(), ()
    with ThreadPoolExecutor(1) as thread:
        for number in range(10):
            target = steps_done(folder) + choose.randint(1, 7)  # the last try's are there still
            here = jobs.logs / f"try{number}"
            job = thread.submit(jobs.fork, *ranks, "--run", "broken", *resume, folder=here)
            wait_until(lambda: steps_done(folder) >= target or job.done(), 60)  # noqa: B023
            assert not job.done(), job.result().output
            os.kill(int((here / f"rank{choose.randrange(2)}.pid").read_text()), 9)
            assert job.result(20).code != 0
            resume = ("--resume", "auto")
    done = jobs.fork(*ranks, "--run", "broken", *resume)
    assert done.code == 0, done.output
    traces = [
        {
            step["step"]: (step["loss"], step["grad_norm"])
            for steps in RunFolder(path).read_steps().values()  # a dead rank has not told its last
            for step in steps
        }
        for path in (jobs.logs / "unbroken", folder)
    ]
    assert traces[0].keys() == set(range(75))
    assert traces[0] == traces[1], "bit-equal"
    weights = [
        json.loads((path / "checkpoints/step_00000075/manifest.json").read_text())
        for path in (jobs.logs / "unbroken", folder)
    ]
    assert weights[0]["model.safetensors"] == weights[1]["model.safetensors"]
