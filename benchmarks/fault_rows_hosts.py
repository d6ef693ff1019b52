"""Rows of the fault matrix: hosts, daemons and links of a lab that are lost while it trains."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from fault_lab import LabPlace
from fault_places import Place
from fault_row import Seen, row
from fault_story import BEGIN_S, Story
from result import ROOT

from motley.faults import FaultKind

LONG = ("--max-steps", 150)
_NEXT_S = 90.0  # 15 s until it is silent, 25 until mpirun lets go, and a launch on two cores
_GOES_ON = "named in 20 s; goes on without it, no step lost"


def _host_lost(place: Place, seen: Seen, how: str) -> None:
    assert isinstance(place, LabPlace)
    lost = place.hosts[2]
    story = Story(place, seen, 3, *LONG, keep=True).reach(12)
    story.harm(lambda: place.harm(how, lost))
    story.went_on(180, f"rank 2 on {lost}", steps=150, next_s=_NEXT_S)
    seen.expect((seen.first_word_s or 0) <= 25, "the first word took over 25 s")
    gone = [line for line in seen.said if line.startswith(f"keep_training: {lost} is gone")]
    seen.expect(bool(gone), f"keep_training.sh does not say that {lost} is gone")


@row("a host is cut off, under keep_training.sh", _GOES_ON, lab=3)
def host_cut(place: Place, seen: Seen) -> None:
    _host_lost(place, seen, "cut")


@row("a host freezes, under keep_training.sh", _GOES_ON, lab=3)
def host_frozen(place: Place, seen: Seen) -> None:
    _host_lost(place, seen, "freeze")


@row("a host is switched off, under keep_training.sh", _GOES_ON, lab=3)
def host_off(place: Place, seen: Seen) -> None:
    _host_lost(place, seen, "kill")


@row("a host is cut off for 3 s", "nobody notices", lab=3)
def host_cut_briefly(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    story = Story(place, seen, 3, *LONG).reach(12)
    story.harm(lambda: place.harm("cut", place.hosts[2]))
    time.sleep(3)
    place.heal(place.hosts[2])
    story.went_on(60, steps=150, next_s=20)


def _daemon_killed(place: Place, seen: Seen, session: bool) -> None:
    assert isinstance(place, LabPlace)
    lost = place.hosts[2]  # mpirun ends its other sessions from the first on
    story = Story(place, seen, 3, *LONG).reach(12)
    if session:
        result = [p for p, words in place.processes("ssh -o BatchMode").items() if lost in words]
    else:
        result = [pid for pid in place.named("prted") if place.host_of(pid) == lost]
    story.harm(lambda: os.kill(result[0], signal.SIGKILL))
    story.ended(30, lost, word_s=20, host=lost, may_be_0=True)


@row("a host's MPI daemon is killed", "the host whose daemon went, in our line and in run.json",
     lab=3)  # fmt: skip
def daemon_killed(place: Place, seen: Seen) -> None:
    _daemon_killed(place, seen, session=False)


@row("the ssh session to a host is killed", "the host, in our line and in run.json", lab=3)
def ssh_session_killed(place: Place, seen: Seen) -> None:
    _daemon_killed(place, seen, session=True)


@row("mpirun is killed, on a lab", "the launcher is named; status failed, nothing left", lab=3)
def lab_launcher_killed(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 3, *LONG).reach(12)
    story.harm(lambda: os.kill(place.named("prterun")[0], signal.SIGKILL))
    story.ended(30, "the launcher", kind=FaultKind.LAUNCHER_LOST)


def cut_link(place: LabPlace, a: str, b: str) -> None:
    """Neither of two hosts reaches the other; all else goes on. By a wrong hardware address."""
    for here, there in ((a, b), (b, a)):
        ip = f"$(getent hosts {there} | cut -d ' ' -f 1)"
        place.root(
            here, f"ip neigh replace {ip} lladdr 02:00:00:00:00:99 dev eth0 nud permanent",
            undo=f"ip neigh del {ip} dev eth0",
        )  # fmt: skip


@row("the link between two hosts is dead, the head reachable", "the link, named within 30 s",
     lab=3)  # fmt: skip
def link_dead(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    _, a, b = place.hosts
    story = Story(place, seen, 3, *LONG).reach(12)
    story.harm(lambda: cut_link(place, a, b))
    story.ended(60, "link", a, b, word_s=30, kind=FaultKind.LINK_LOST)


@row("the same at an epoch's end, while all evaluate", "the link, named within 30 s", lab=3)
def link_dead_in_evaluation(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    _, a, b = place.hosts
    story = Story(place, seen, 3, *LONG, "--eval-samples", 360).reach(28)
    story.harm(lambda: cut_link(place, a, b))
    story.ended(60, "link", a, b, word_s=30, kind=FaultKind.LINK_LOST, next_launch=False)


@row("the head freezes; the run is resumed from another host meanwhile",
     "refused: by whom it is in use, and how to take over", lab=2)  # fmt: skip
def head_frozen(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    head, other = place.hosts
    story = Story(place, seen, 2, *LONG).reach(12)
    story.harm(lambda: place.harm("freeze", head))
    time.sleep(2)
    words = (*LONG, "--resume", "auto")
    job = place.start("x", 1, *words, head=other, line=f"--host {other}")
    code = job.wait(60)
    seen.said = [place.tidy(line.text) for line in job.said()]
    seen.expect(code not in (0, None), f"exit status {code}")
    if seen.expect(bool(seen.said), "no line of ours"):
        seen.line = seen.said[-1]
        seen.expect(head in seen.line, "the line lacks the host that has it")
    place.restore()
    with suppress(AssertionError):
        story.job.wait(60)
    story.judge_left()
    story.launch_again()


_AHEAD = r"""s/^exec "\$python"/export LD_PRELOAD=%s FAKETIME=+1h DONT_FAKE_MONOTONIC=1\n&/"""
_PLOTS = ("plot_gpu.py", "plot_training.py", "report.py")


@row("a host's clock is an hour ahead", "nobody notices; no duration in the records is negative",
     lab=3)  # fmt: skip
def host_clock_ahead(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    shifting = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    assert shifting, "libfaketime is not there: apt-get install faketime"
    place.other_file(
        place.hosts[1], ROOT / "entry_cn.sh", _AHEAD % str(shifting).replace("/", r"\/")
    )
    story = Story(place, seen, 3, "--max-steps", 60)
    code = story.end(BEGIN_S + 60)
    seen.expect(code == 0, f"exit status {code}")
    seen.expect(not seen.said, f"a word: {seen.said[:1]}")
    place.restore()
    story.judge_records(None, "finished", {})
    story.judge_losses()
    steps = story.folder.read_steps()
    ahead = steps[1][-1]["time"] - steps[0][-1]["time"]
    seen.expect(3590 < ahead < 3610, f"rank 1's clock is {ahead:.0f} s ahead")
    spans = [(name, value) for lines in [*steps.values(), story.folder.read_epochs()]
             for line in lines for name, value in line.items()
             if value is not None and (name.startswith("t_") or name == "seconds")]  # fmt: skip
    spans += [pair for pair in story.folder.read_run()["result"].items() if "second" in pair[0]]
    wrong = [pair for pair in spans if pair[1] < 0 or pair[1] > 600]
    seen.expect(len(spans) > 900 and not wrong, f"durations: {wrong[:3]} of {len(spans)}")
    for script in _PLOTS:
        job = place.command("python", f"plots/{script}", place.logs)
        seen.expect(job.wait(60) == 0, f"{script}: {job.output[-200:]}")
    story.judge_left()


@row("a host is off before the start, under keep_training.sh", "goes on without it, and says so",
     lab=3)  # fmt: skip
def host_off_before(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    lost = place.hosts[2]
    place.harm("kill", lost)
    story = Story(place, seen, 3, "--max-steps", 30, keep=True)
    code = story.end(120)
    seen.expect(code == 0, f"exit status {code}")
    seen.line = seen.said[0] if seen.said else ""
    seen.expect(f"{lost} is gone" in seen.line, "the line lacks the host")
    story.judge_losses()
    place.restore()
    story.judge_left()
