"""The documentation: commands run as they stand, links lead somewhere, nothing is left out.

Blocks without a name are run, ranks and scripts in forks. Of other names are those that need a lab
or data which this machine has not, and texts.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from forked import run_script
from jobs import Jobs
from project import DDP, LIMIT_S, ROOT, environment

from motley.records.gpu_csv import LAB_GPU_COLUMNS, OUR_GPU_COLUMNS
from motley.records.training import StepRecord

pytestmark = pytest.mark.mpi

DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARITHMETIC.md")),
    *DOCS.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"),
]  # fmt: skip
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MPIRUN = re.compile(r"mpirun -np (\d+) --hostfile hosts.txt ./entry_cn.sh(.*)")
ELSEWHERE = ("export PATH", "bash setup/quickstart.sh")  # which makes an environment anew


def commands(page: Path) -> Iterator[str]:
    """The lines of a page that are run here."""
    for name, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if not name:
            yield from (line for line in block.splitlines() if not line.startswith(ELSEWHERE))


@pytest.mark.parametrize(
    "page",
    [
        "first_hour",
        "your_lab",
        "your_model",
        "your_trainer",
        "which_way",
    ],
)
def test_every_command_runs_as_it_stands(jobs: Jobs, page: str) -> None:
    lines = list(commands(DOCS / f"{page}.md"))
    assert lines
    for line in lines:
        said = line.replace("logs/", f"{jobs.logs}/")  # and not the repository's own
        said = said.replace(" exported", f" {jobs.logs}/exported")
        if found := MPIRUN.fullmatch(said):
            words = shlex.split(found[2])
            script = [] if words and not words[0].startswith("-") else [DDP]
            logs = [] if "infer" in said else ["--logs", jobs.logs]
            variables = {"MOTLEY_LOGS": str(jobs.logs)}  # of a script of one's own
            done = jobs.fork(int(found[1]), *script, *words, *logs, **variables)
            assert done.code == 0, (line, done.output)
            continue
        words = shlex.split(said)
        if "watch.py" in said:
            words.append(str(jobs.logs))  # of logs/, as a rule
        if words[0] == "python":
            ended = run_script(*words[1:], variables=environment())
        else:
            ended = subprocess.run(
                words, cwd=ROOT, text=True, capture_output=True, env=environment(), timeout=LIMIT_S
            )
        assert ended.returncode == 0, (line, ended.stdout, ended.stderr)


def anchors(page: Path) -> set[str]:
    """Of a page's titles, as a forge makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_task_that_is_shown_is_the_one_that_is_there() -> None:
    blocks = BLOCK.findall((DOCS / "your_model.md").read_text(encoding="utf-8"))
    shown = next(text for kind, text in blocks if kind == "python")
    assert shown == (ROOT / "examples" / "my_task.py").read_text(encoding="utf-8")


def test_every_field_is_told_and_every_message_and_public_name() -> None:
    told = set(re.findall(r"`([\w.<>/]+)`", (DOCS / "records.md").read_text(encoding="utf-8")))
    assert {each.name for each in fields(StepRecord)} <= told
    assert {*LAB_GPU_COLUMNS, *OUR_GPU_COLUMNS} <= told
    for page in ("messages", "api"):
        script = DOCS / f"list_{page}.py"
        done = subprocess.run([sys.executable, script, "--check"], timeout=LIMIT_S)
        assert done.returncode == 0, f"make docs/{page}.md anew: python {script}"
