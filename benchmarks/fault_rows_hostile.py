"""Rows of the fault matrix: hostile words, in files that users share, in options, in records."""

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

from fault_job import Job
from fault_places import DDP, Place
from fault_row import Seen, row
from fault_story import BEGIN_S, Story
from result import ROOT

_REFUSED = "refused in one line; nothing runs, nothing is written outside"
_HOSTS = (
    "-oProxyCommand=touch${{IFS}}{0}", "-E{0}", "$(touch${{IFS}}{0})", "a;touch${{IFS}}{0}",
    "a" * 300, "a\x1b]0;{0}\x07",
)  # fmt: skip


@contextmanager
def _nothing_runs(place: Place, seen: Seen) -> Iterator[str]:
    """The name of a file that hostile words would make, wherever they are run."""
    name = f"ran{place.mark}"
    yield name
    ran = [path for path in (*ROOT.glob(f"*{name}*"), *place.folder.rglob(name)) if path.is_file()]
    seen.expect(not ran, f"it was run: {ran}")
    for path in ran:
        path.unlink()


def _one_line(place: Place, seen: Seen, job: Job, *says: str) -> None:
    """A command should refuse, and has said why; of several, the last line stays."""
    code, output = job.wait(60), job.output
    text = [line for line in output.splitlines() if line.startswith("motley: ")]
    seen.said += map(place.tidy, text)
    what = place.tidy(text[-1])[:600] if text else "nothing"
    seen.line = what
    seen.expect(code not in (0, None), f"exit status {code}: {what}")
    seen.expect(len(text) == 1 and "Traceback" not in output, f"{len(text)} lines: {what}")
    seen.expect(what.isprintable(), "control characters in the line")
    for word in says:
        seen.expect(word in what, f"{what} lacks {word!r}")


@row("hostile names in hosts.txt", _REFUSED, quick=True)
def hostile_hosts(place: Place, seen: Seen) -> None:
    hosts = place.folder / "hosts.txt"
    with _nothing_runs(place, seen) as ran:
        line = ("mpirun", "-np", 2, "--hostfile", hosts, "./entry_cn.sh", "--logs", place.logs)
        for name in _HOSTS:
            hosts.write_text(f"localhost slots=1\n{name.format(ran)} slots=1\n")
            keeper = place.command("bash", "setup/keep_training.sh", *line)
            _one_line(place, seen, keeper, "line 2: ", "is not a host name")
            mpirun = place.command(*line)  # which reads it by itself
            seen.expect(mpirun.wait(30) not in (0, None), f"mpirun takes {name!r}")
    seen.expect(not place.logs.exists(), "a run was begun")
    seen.left = place.left()


@row(
    "hostile lines in .deepspeed_env", "values are words, and another line is refused; nothing runs"
)
def hostile_environment(place: Place, seen: Seen) -> None:
    home = place.folder / "home"
    home.mkdir()
    with _nothing_runs(place, seen) as ran:
        lines = [f"A=$(touch {ran})", f"B=`touch {ran}`", f"C=x;touch {ran}", f"D='$(touch {ran})"]
        settings = home / ".deepspeed_env"
        settings.write_text("\n".join(lines))
        story = Story(place, seen, 1, "--max-steps", 8, HOME=str(home))
        seen.expect(story.job.wait(BEGIN_S) == 0, f"refused: {story.job.output[-200:]}")
        story.judge_losses()
        for name in (f"a[$(touch${{IFS}}{ran})]=1", f"x;touch {ran};y=1", f"$(touch {ran})"):
            settings.write_text(f"A=1\n{name}\n")
            job = place.start("y", 1, "--max-steps", 8, HOME=str(home))
            _one_line(place, seen, job, "write it as NAME=VALUE")
    seen.left = place.left()


@row("hostile options: a run, a task, a checkpoint that are paths, a model that is code", _REFUSED)
def hostile_options(place: Place, seen: Seen) -> None:
    (place.folder / "empty").touch()
    with _nothing_runs(place, seen) as ran:
        code = f"__import__('os').system('touch {ran}')"
        for words, says in (
            (("--run", "../../x"), "is a path, and has to be a name"),
            (("--run", f"{place.folder}/x"), "is a path, and has to be a name"),
            (("--resume", "../../../../etc"), "there is no checkpoint"),
            (("--resume", "/dev/zero"), "there is no checkpoint"),
            (("--resume", place.folder / "empty"), "there is no checkpoint"),
            (("--resume", f"$(touch {ran})"), "there is no checkpoint"),
            (("--model", code), "--model"),
            (("--opt", code), "--opt"),
            (("--task", code), "--task"),
            (("--dataset", f"folder;touch {ran}"), "--dataset"),
        ):
            _refused(place, seen, words, says)
    outside = {path.name for path in place.folder.iterdir()}
    seen.expect(outside <= {"t", "empty"}, f"written: {outside}")
    seen.expect(not (place.folder.parent / "x").exists(), "../../x was written")
    seen.left = place.left()


def _refused(place: Place, seen: Seen, words: Sequence[object], says: str) -> None:
    run = () if words[0] in ("--run", "--resume") else ("--run", "x")
    line = ("mpirun", "-np", 1, "--hostfile", "hosts.txt", "./entry_cn.sh", DDP, "--max-steps", 2)
    _one_line(place, seen, place.command(*line, "--logs", place.logs, *run, *words), says)


class _Tags(HTMLParser):
    """Counts tags, and attributes that run something."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts = self.handlers = self.strange = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See HTMLParser."""
        self.scripts += tag == "script"
        self.strange += tag in ("iframe", "object", "b")
        self.handlers += sum(name.startswith("on") for name, _ in attrs)


def _report(place: Place) -> _Tags:
    job = place.command("python", "plots/report.py", place.logs)
    assert job.wait(60) == 0, job.output
    return _Tags(place.logs / "report.html")


@row(
    "a run's name is hostile to shells and browsers", "refused, or a name; nothing runs, no markup"
)
def hostile_run_name(place: Place, seen: Seen) -> None:
    name = "$(touch ran)`touch ran`;touch ran<b onclick=alert(1)>$\\frac{"
    story = Story(place, seen, 1, "--max-steps", 8, run=name)
    code = story.job.wait(BEGIN_S)
    seen.said = [place.tidy(line.text) for line in story.job.said()]
    seen.line = seen.said[-1] if seen.said else f"ended with {code}"
    seen.expect("Traceback" not in story.job.output, "a traceback")
    seen.expect(not any(place.folder.rglob("ran")) and not Path("ran").exists(), "it was run")
    if code == 0:
        tags = _report(place)
        seen.expect(not (tags.handlers or tags.strange), "markup in report.html")
    seen.left = place.left()


@row("hostile words in the records that report.html shows", "no markup in it", quick=True)
def hostile_records(place: Place, seen: Seen) -> None:
    words = "<script>alert(1)</script><b onclick=alert(1)>$\\frac{"
    story = Story(place, seen, 1, "--max-steps", 8)
    assert story.job.wait(BEGIN_S) == 0, story.job.output
    usual = _report(place)
    path = story.folder.path / "run.json"

    def hostile(value: object) -> object:
        if isinstance(value, dict):
            return {key: hostile(each) for key, each in value.items()}
        if isinstance(value, list):
            return [hostile(each) for each in value]
        return f"{value}{words}" if isinstance(value, str) else value

    content = json.loads(path.read_text())
    saved = {key: content[key] for key in ("status", "started", "ended") if key in content}
    path.write_text(json.dumps({**hostile(content), **saved}))  # type: ignore[dict-item]
    story.folder.event("fault", error=words, rank=0, host=words, kind=words)
    result = _report(place)
    same = (result.scripts, result.handlers, result.strange) == (
        usual.scripts, usual.handlers, usual.strange,
    )  # fmt: skip
    seen.expect(same, f"{result.scripts - usual.scripts} scripts, {result.handlers} handlers")
    seen.line = "report.html has the same tags as without them"


@row("a CSV field of 200,000 letters in a GPU log, $\\frac{ in the names of a host and a run",
     "drawn as they are; no traceback", quick=True)  # fmt: skip
def hostile_log(place: Place, seen: Seen) -> None:
    name = r"a$\frac{$b"
    story = Story(place, seen, 1, "--max-steps", 8, run=name)
    assert story.job.wait(BEGIN_S) == 0, story.job.output
    (log,) = story.folder.path.glob("gpu.*.csv")
    rows = list(csv.DictReader(log.open()))
    with log.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writerow({**rows[-1], "CPU_Name": "x" * 200_000})
        writer.writerow({**rows[-1], "Host": r"b$\frac{"})
    for script, made in (("plot_gpu.py", "gpu.png"), ("plot_training.py", "training.png")):
        job = place.command("python", f"plots/{script}", place.logs)
        code = job.wait(60)
        seen.line = place.tidy(job.output.splitlines()[-1]) if job.output else ""
        seen.expect(code == 0 and "Traceback" not in job.output, f"{script}: {job.output[-200:]}")
        picture = story.folder.path / made
        seen.expect(picture.exists() and picture.stat().st_size > 20_000, f"no {made}")
