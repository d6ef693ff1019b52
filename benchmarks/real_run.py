"""Runs a training script as a user does, on this machine, and reads its records."""

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from result import ROOT, VENV

_number = itertools.count()


def real_run(ranks: int, script: str, logs: Path, *words: object) -> Path:
    """``mpirun -np RANKS --hostfile hosts.txt ./entry_cn.sh SCRIPT WORDS...``; the run's folder.

    Args:
        logs: a folder of the caller's; each run gets one in it.
    """
    name = f"run{next(_number)}"
    command = [
        "mpirun", "-np", str(ranks), "--hostfile", "hosts.txt", "./entry_cn.sh", script,
        "--logs", str(logs), "--run", name, *map(str, words),
    ]  # fmt: skip
    path = f"{VENV / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
    return logs / name


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
