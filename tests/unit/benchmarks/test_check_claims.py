"""The check of claims: the repository passes, and each kind of bad input is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

CLAIMS = """
max_commits = 1

[code]
step = ["src/step.py"]

[results."speed.json"]
hardware = "1 GPU"
code = ["step"]

[[tables]]
section = "speed"
file = "speed.json"
peer = "bare loop"
runs = "2 runs"
figures = [
  ["speed", "compiled", 'get("rate", mode="motley") / get("rate", mode="bare")', ".2f times"],
]

[[claims]]
page = "README.md"
text = "makes {speed} times the images/s of a bare loop"

[[exceptions]]
pages = ["README.md"]
text = "after 15 s"
reason = "the default of a timeout"
"""
README = "Motley makes 1.25 times the images/s of a bare loop. A silent rank is lost after 15 s.\n"
ROWS = [{"mode": "bare", "rate": 80.0}, {"mode": "motley", "rate": 100.0, "spread": 0.01}]
SHOWN = (
    "| compiled | **1.25 times** | bare loop | 1.0%, 2 runs | 1 GPU | 2026-11-01 | `python b.py` |"
)


def check(root: Path, *options: str | Path) -> tuple[int, str]:
    """Run the check on a repository. Return its exit status and what it prints."""
    line = [sys.executable, ROOT / "benchmarks/check_claims.py", "--root", root, *options]
    done = subprocess.run(line, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one result, one figure and one claim, without git."""
    content = {"rows": ROWS, "date": "2026-11-01", "command": "python b.py --json out.json"}
    for name, text in {
        "README.md": README,
        "src/step.py": "",
        "benchmarks/claims.toml": CLAIMS,
        "benchmarks/README.md": "<!-- table: speed -->\n<!-- end of table -->\n",
        "benchmarks/results/speed.json": json.dumps(content),
        "benchmarks/results/SHA256SUMS": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code, said = check(tmp_path, "--record", tmp_path / "benchmarks/results/speed.json", "--write")
    assert code == 0, said
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text that stands once in a file."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new), encoding="utf-8")


def commit(root: Path) -> None:
    """Change the measured code, and commit all."""
    append(root, "step = 1\n")


def append(root: Path, line: str) -> None:
    """Append a line to the measured code, and commit all."""
    with (root / "src/step.py").open("a") as file:
        file.write(line)
    git = ["git", "-C", root, "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Change the step"]):
        subprocess.run([*git, *words], check=True)


def test_every_figure_of_the_repository_is_covered_and_right() -> None:
    code, said = check(ROOT)
    assert code == 0, said


def test_the_table_is_written_and_ages_need_git(root: Path) -> None:
    assert SHOWN in (root / "benchmarks/README.md").read_text()
    code, said = check(root)
    assert code == 0 and "ages were not checked: this folder has no git repository" in said


@pytest.mark.parametrize(
    ("page", "old", "new", "named"),
    [
        ("README.md", "1.25", "1.35", "1.35 is 1.25 in benchmarks/results/speed.json (speed)"),
        ("README.md", "A silent", "Runs last 3 ms. A silent", "README.md:1: 3 is not covered"),
        ("README.md", "a bare loop", "a loop", "README.md lacks a claim"),
        ("README.md", "after 15 s", "soon", "exception 'after 15 s': no page has this text"),
        ("benchmarks/README.md", "1.25 times", "1.35 times", "shows | compiled | **1.35 times**"),
    ],
    ids=["changed", "uncovered", "reworded", "unused exception", "changed table"],
)
def test_a_wrong_page_is_named(root: Path, page: str, old: str, new: str, named: str) -> None:
    edit(root / page, old, new)
    code, said = check(root)
    assert code == 1 and named in said, said


def test_write_corrects_the_pages(root: Path) -> None:
    edit(root / "README.md", "1.25", "1.35")
    edit(root / "benchmarks/README.md", "1.25", "1.35")
    assert check(root, "--write")[0] == 0
    assert (root / "README.md").read_text() == README
    assert SHOWN in (root / "benchmarks/README.md").read_text()


def test_bad_result_files_are_named(root: Path) -> None:
    path = root / "benchmarks/results/speed.json"
    content = path.read_text()
    edit(path, '"2026-11-01"', '"2026-11-28"')
    assert "speed.json was edited by hand" in check(root)[1]
    path.write_text(content[:-1])
    assert "speed.json cannot be read" in check(root)[1]
    path.unlink()
    code, said = check(root)
    assert code == 1 and "speed.json is missing" in said


def test_the_digest_in_a_result_shows_an_edit_even_if_it_is_recorded(root: Path) -> None:
    path = root / "benchmarks/results/speed.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "digest": "of other content"}))
    code, said = check(root, "--record", path)
    assert code == 1 and "does not match the digest in it" in said


def test_a_stale_result_is_named_until_its_entry_and_page_say_so(root: Path) -> None:
    commit(root)
    commit(root)
    append(root, "# A comment changes no speed.\n")
    assert check(root)[0] == 0
    commit(root)
    code, said = check(root)
    assert code == 1 and "speed.json is stale: 2 commits changed the code" in said
    edit(root / "benchmarks/claims.toml", 'code = ["step"]', 'code = ["step"]\nstale = "no GPU"')
    code, said = check(root, "--write")
    assert code == 1 and "say 'not measured since 2026-11-01' in that paragraph" in said
    edit(root / "README.md", "loop.", "loop (not measured since 2026-11-01).")
    code, said = check(root)
    assert code == 0 and "stale by at most 3 commits: benchmarks/results/speed.json: no GPU" in said
    clone = root / "clone"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{root}", clone], check=True)
    assert "ages were not checked: the clone is shallow" in check(clone)[1]
