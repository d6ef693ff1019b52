"""Rows of the fault matrix: ranks that are killed, stopped or fail by themselves."""

import os
import re
import signal
import time
from typing import Any

from fault_job import until
from fault_memory import starve
from fault_places import Place
from fault_row import Seen, row
from fault_story import BEGIN_S, Story
from result import ROOT

from motley.faults import FaultKind

FAILING = "tests/support/drivers/failing.py"
SHORT, LONG = ("--max-steps", 60), ("--max-steps", 120)


@row("a rank is killed, under keep_training.sh", "named in 1 s; goes on, no step lost")
def rank_killed(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 3, *LONG, keep=True).reach(12).kill(2)
    story.went_on(90, "rank 2 on", steps=120, next_s=60)
    seen.expect((seen.first_word_s or 0) <= 1.5, "the first word took over 1.5 s")


@row("the kernel's out-of-memory killer ends a rank, under keep_training.sh",
     "named in 1 s, with where to look; goes on, no step lost")  # fmt: skip
def rank_starved(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 3, *LONG, keep=True).reach(12)
    with starve(place.ranks()[2]) as killed:
        story.harm(lambda: until(killed, 30))
        words = ("rank 2 on", "killed", "dmesg.* out-of-memory killer")
        story.went_on(90, *words, steps=120, next_s=60)
    seen.expect((seen.first_word_s or 0) <= 1.5, "the first word took over 1.5 s")


@row("rank 0 is killed", "named in 1 s, ended; no step lost")
def rank_0_killed(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 3, *SHORT).reach(12).kill(0)
    story.ended(10, "rank 0 on", word_s=2, kind=FaultKind.KILLED, rank=0)
    seen.expect((seen.steps_lost or 0) <= 1, "steps were lost")


@row("rank 0 is killed, and then whose number it is, under keep_training.sh",
     "named in 1 s; the last one goes on, no step lost")  # fmt: skip
def rank_0_killed_twice(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 3, *LONG, keep=True).reach(12)
    pids = place.ranks()
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: "2 of 3 ranks continue" in story.job.output, 30)
    time.sleep(1)
    story.harm(lambda: os.kill(pids[1], signal.SIGKILL))
    story.went_on(90, "rank 0 on", "1 of 2 ranks continue", steps=120, next_s=5)
    seen.expect((seen.first_word_s or 0) <= 1.5, "the first word took over 1.5 s")


@row("a rank is stopped for good, under keep_training.sh", "named in 20 s; goes on, no step lost")
def rank_stopped(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 3, *LONG, keep=True).reach(12).kill(2, signal.SIGSTOP)
    story.went_on(90, "rank 2 on .* silent", steps=120, next_s=60)


@row("a rank is stopped for 5 s", "nobody notices")
def rank_paused(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 2, *SHORT).reach(12)
    pid = place.ranks()[1]
    story.kill(1, signal.SIGSTOP)
    time.sleep(5)
    os.kill(pid, signal.SIGCONT)
    story.went_on(40, steps=60, next_s=8)


@row("SIGTERM to one rank alone", "that rank is named, not the user")
def rank_terminated(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 2, *SHORT).reach(12).kill(1, signal.SIGTERM)
    story.ended(10, "rank 1 on", "this rank alone", word_s=2, kind=FaultKind.KILLED, rank=1)


@row("mpirun is killed", "the launcher is named; status failed, nothing left", quick=True)
def launcher_killed(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 2, *SHORT).reach(12)
    story.harm(lambda: os.kill(place.named("prterun", "mpirun")[0], signal.SIGKILL))
    story.ended(20, "the launcher", "was killed", kind=FaultKind.LAUNCHER_LOST)


def _stopped(place: Place, seen: Seen, *numbers: int) -> None:
    """By the user: signals to the launcher."""
    story = Story(place, seen, 2, *SHORT).reach(12)

    def stop() -> None:
        for number in numbers:
            os.kill(place.named("prterun", "mpirun")[0], number)
            time.sleep(0.1)

    story.harm(stop).ended(
        15, "stopped by Ctrl-C", "--resume auto", kind=FaultKind.STOPPED, status="stopped", word_s=3
    )


@row("SIGTERM to mpirun", "stopped by Ctrl-C; status stopped")
def stopped_term(place: Place, seen: Seen) -> None:
    _stopped(place, seen, signal.SIGTERM)


@row("Ctrl-C", "stopped by Ctrl-C; status stopped")
def stopped_once(place: Place, seen: Seen) -> None:
    _stopped(place, seen, signal.SIGINT)


@row("Ctrl-C twice", "stopped by Ctrl-C; status stopped")
def stopped_twice(place: Place, seen: Seen) -> None:
    _stopped(place, seen, signal.SIGINT, signal.SIGINT)


@row("the terminal is closed (SIGHUP)", "stopped by Ctrl-C; status stopped")
def stopped_hangup(place: Place, seen: Seen) -> None:
    _stopped(place, seen, signal.SIGHUP)


@row("its output goes into head -n 12", "ends soon; status stopped, nothing left")
def output_into_head(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 2, "--max-steps", 2400, "--epochs", 300, into="head -n 12")
    until(lambda: len(story.job.lines) >= 12, 90)
    place.remember_segments()
    story.harm(lambda: None).end(60)
    until(lambda: story.folder.read_run().get("status") != "running", 20)
    story.judge_records(FaultKind.STOPPED, "stopped", {})
    story.judge_left()


def _fails(place: Place, seen: Seen, failure: str, limit_s: float, *says: str,
           on: int = 1, **judged: Any) -> None:  # fmt: skip
    """A rank that fails by itself at step 8."""
    driver = ("--fail", failure, "--step", 8, "--on", on)
    story = Story(place, seen, 2, *SHORT, driver=driver, script=FAILING).reach(6)
    story.ended(limit_s, f"rank {on} on", *says, rank=on, **judged)


@row("sys.exit(0) on a rank", "that rank and SystemExit are named")
def rank_sys_exit(place: Place, seen: Seen) -> None:
    _fails(place, seen, "exit", 20, "SystemExit", kind=FaultKind.ERROR)


@row("os._exit(0) on a rank", "that rank is named")
def rank_os_exit(place: Place, seen: Seen) -> None:
    _fails(place, seen, "gone", 20, "died without a message", kind=FaultKind.KILLED)


@row("a segfault on a rank", "that rank, the signal, and where its traceback is")
def rank_segfault(place: Place, seen: Seen) -> None:
    _fails(place, seen, "address", 20, "crashed in compiled code", "traceback above",
           kind=FaultKind.SEGFAULT)  # fmt: skip


@row("a segfault on rank 0", "rank 0, the signal, and where its traceback is", quick=True)
def rank_0_segfault(place: Place, seen: Seen) -> None:
    _fails(place, seen, "address", 20, "crashed in compiled code", "traceback above", on=0,
           kind=FaultKind.SEGFAULT)  # fmt: skip


@row("a rank holds the GIL for good", "that rank is named as silent in 20 s")
def rank_holds_gil(place: Place, seen: Seen) -> None:
    _fails(place, seen, "gil", 40, "silent", kind=FaultKind.HOST_LOST)


@row("a rank has no memory for any micro-batch", "that rank, and less memory is advised")
def rank_no_memory(place: Place, seen: Seen) -> None:
    _fails(place, seen, "memory", 40, "memory", kind=FaultKind.OUT_OF_MEMORY)


@row("a sample of one rank is NaN, under keep_training.sh",
     "that rank and the sample, and to repair it; failed, not started again")  # fmt: skip
def rank_sample_nan(place: Place, seen: Seen) -> None:
    task, path = (ROOT / "examples" / "my_task.py").read_text(), place.folder / "mine.py"
    assert 'return {"x": x' in task
    path.write_text(task.replace('return {"x": x', 'return {"x": x / (item != 137)'))
    words = ("--task", path, "--batch-size", 4000, "--micro-batch", 1000, *SHORT)
    story = Story(place, seen, 2, *words, keep=True)
    code = story.end(BEGIN_S)
    seen.expect(code not in (0, None), f"exit status {code}")
    says = r"rank \d on .* not finite .*'x' in the data of 137; repair or remove it"
    named = [line for line in seen.said if re.search(says, line)]
    seen.expect(len(named) == 1, f"{len(named)} lines name the rank and the sample")
    again = [line for line in seen.said if "does not start it again" in line]
    seen.expect(bool(again) and len(seen.said) == 2, "not one line of each")
    seen.line = named[0] if named else seen.line
    story.judge_records(FaultKind.NOT_FINITE, "failed", {})
    story.judge_left()


@row("a rank's parameter becomes Inf", "that rank is named, and not for its memory")
def rank_parameter_inf(place: Place, seen: Seen) -> None:
    _fails(place, seen, "parameter", 40, "not finite", kind=FaultKind.NOT_FINITE)
    seen.expect("memory" not in seen.line, "the line speaks of memory")


@row("one rank's gradient is Inf once: rank 1's, then rank 2's of another run",
     "that rank is named, and no other; no step lost")  # fmt: skip
def rank_gradient_inf(place: Place, seen: Seen) -> None:
    for rank in (1, 2):
        driver = ("--fail", "gradient", "--step", 8, "--on", rank)
        story = Story(place, seen, 3, *SHORT, run=f"of{rank}", driver=driver, script=FAILING)
        words = (f"rank {rank} on", "this rank's gradient", "--resume auto")
        once = {"next_launch": rank == 2}  # after either it is the same
        story.reach(6).ended(40, *words, kind=FaultKind.DEVICE, rank=rank, **once)
    seen.expect(not seen.steps_lost, "steps were lost")


def _start_stopped(place: Place, seen: Seen, ranks: tuple[int, ...], *says: str) -> None:
    """Ranks that are stopped while they import, which takes them seconds."""
    story = Story(place, seen, 2, *SHORT, MOTLEY_START_TIMEOUT="8")
    assert until(lambda: len(place.ranks()) == 2, 60), "no ranks"
    pids = [place.ranks()[rank] for rank in ranks]
    time.sleep(1.0)
    story.harm(lambda: [os.kill(pid, signal.SIGSTOP) for pid in pids])
    story.ended(40, "not all ranks have started within 8 s", *says, next_launch=False)


@row("a rank is stopped while all start", "named once MOTLEY_START_TIMEOUT is over")
def start_rank_stopped(place: Place, seen: Seen) -> None:
    _start_stopped(place, seen, (1,), "rank 1 on .* is stopped")


@row("all ranks are stopped while they start", "named once MOTLEY_START_TIMEOUT is over")
def start_all_stopped(place: Place, seen: Seen) -> None:
    _start_stopped(place, seen, (0, 1), "rank 0 on .* is stopped")


@row("a rank of an earlier run is still there", "said at launch; ended by clean_cn.sh")
def leftover_rank(place: Place, seen: Seen) -> None:
    linger = ("./entry_cn.sh", "tests/support/drivers/linger.py", "old")
    gone = {"OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "prterun-gone-4711@1"}
    old = place.command("setsid", "-f", *linger, **gone)  # init is its parent, as of a leftover
    assert until(lambda: "lingering old" in old.output, 30), old.output
    (pid,) = place.ranks().values()
    time.sleep(10)  # a younger one may be ending
    story = Story(place, seen, 1, "--max-steps", 30)
    code = story.job.wait(90)
    text = [line for line in story.job.lines if f" {pid}" in line.text]
    seen.expect(code == 0, f"the launch ended with {code}")
    if seen.expect(bool(text), "the launch says nothing of it"):
        seen.line = place.tidy(text[0].text.strip())
        seen.expect("clean_cn.sh" in seen.line, "the line lacks clean_cn.sh")
    clean = place.command("bash", "setup/clean_cn.sh", "--dry-run")
    clean.wait(30)
    listed = "would end" in clean.output and f" {pid}" in clean.output
    seen.expect(listed, f"clean_cn.sh says: {place.tidy(clean.output[-100:])}")
    os.kill(pid, signal.SIGKILL)
    seen.next_launch = "trains" if code == 0 else f"ended with {code}"
    story.judge_left()
