"""The package as pip installs it, outside of any clone."""

import csv
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from project import LIMIT_S, ROOT, environment

Command = Callable[..., str]

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the package, and with what else this one has."""
    source, made = (tmp_path_factory.mktemp(name) for name in ("source", "environment"))
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.txt"):
        shutil.copy2(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", made], check=True, timeout=LIMIT_S
    )
    python = made / "bin" / "python"
    words = ("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    own = subprocess.run(
        [python, *words], check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    (Path(own.stdout.strip()) / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps",
         "--no-build-isolation", "--ignore-installed", source],
        check=True, timeout=LIMIT_S,
    )  # fmt: skip
    return made / "bin" / "motley"


@pytest.fixture
def motley(installed: Path, tmp_path: Path) -> Command:
    """Runs the command in a folder where a folder has the package's name."""
    (tmp_path / "motley").mkdir()
    (tmp_path / "motley" / "__init__.py").write_text("raise SystemExit('not this one')\n")
    shutil.copy2(ROOT / "examples" / "my_task.py", tmp_path / "mine.py")
    own = {name: value for name, value in environment().items() if name != "PYTHONPATH"}

    own["PATH"] = f"{installed.parent}:{own['PATH']}"

    def run(*words: str, ranks: int = 0, fails: bool = False) -> str:
        launcher = ("mpirun", "-np", str(ranks)) if ranks else ()
        done = subprocess.run(
            [*launcher, "motley", *words], cwd=tmp_path, env=own, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == (2 if fails else 0), done.stdout + done.stderr
        assert "not this one" not in done.stderr, done.stderr
        return done.stderr if fails else done.stdout

    return run


def test_a_run_is_kept_watched_reported_and_continued(motley: Command, tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text('task = "mine.py"\nmax-steps = 5\n')
    line = ("mpirun", "-np", "2", "motley", "train", "--config", "options.toml", "--run", "a")
    begun = motley("keep", "--restarts", "1", *line)
    assert "step 5/5" in begun
    assert f"motley keep --restarts 1 {' '.join(line)} --resume auto" in begun
    assert "finished after 5 steps" in motley("watch", "--once")
    motley("report", "logs/a")
    assert (tmp_path / "logs/a/report.html").stat().st_size > 10_000
    assert "checkpoints/step_00000005: whole" in motley("verify", "logs/a")
    motley("export", "logs/a", "--to", "out")
    assert (tmp_path / "out/model.safetensors").exists()
    script = ROOT / "examples" / "my_script.py"
    (tmp_path / "script.py").write_text(script.read_text().replace("my_task", "mine"))
    words = ("--max-steps", "5", "--shares", "3,1", "--run", "b")
    said = motley("run", "script.py", *words, ranks=2)
    assert "records in logs/b" in said
    assert f"motley run script.py {' '.join(words)} --resume auto" in said
    # Its configuration is in the wheel, and its checkpoint is any engine's.
    words = ("--config", "options.toml", "--max-steps", "7", "--run", "a", "--resume", "auto")
    assert "step 7/7" in motley("train", "--stage", "3", *words, ranks=2)


def test_ways_to_train_are_measured(motley: Command, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("localhost\n")
    (tmp_path / "m.toml").write_text(
        'steps = 6\noptions = ["--task", "mine.py"]\n[matrix]\nbatch = 16\n'
    )
    said = motley("baselines", "--matrix", "m.toml", "--repeats", "1")
    assert "pictures: motley plot-baselines baselines/m" in said
    with (tmp_path / "baselines/m/results.csv").open() as file:
        assert [row["outcome"] for row in csv.DictReader(file)] == ["done", "done"]


def test_a_host_is_looked_at_and_what_needs_a_clone_says_so(
    motley: Command, tmp_path: Path
) -> None:
    says = "motley: hosts.txt does not exist; create it with one host per line, as in: "
    missing = motley("check", fails=True)
    assert missing.startswith(says)
    subprocess.run(missing.removeprefix(says), shell=True, cwd=tmp_path, check=True, timeout=9)
    seen = motley("check")
    assert "this folder    the same folder" in seen and "all is well" in seen
    assert "would ask: localhost" in motley("check", "--dry-run")
    assert "motley check --json" in motley("check", "-h")
    for name, way in (("install", "/bin/pip install motley-train=="), ("sync", "with scp")):
        for words, fails in (((), True), (("-h",), False)):
            said = motley(name, *words, fails=fails)
            assert f"{name} works only in a clone" in said and way in said and said.count("\n") == 1
    assert motley("clean").strip() == "nothing is left over"
    assert "hello from rank 1 of 2" in motley("hello", ranks=2)
    assert "the command to run is missing; give one, as in: motley keep mpirun" in motley(
        "keep", fails=True
    )
    assert "motley: no command is given; motley -h lists them" in motley(fails=True)
