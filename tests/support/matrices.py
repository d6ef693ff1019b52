"""Matrices of cells to measure, and the command that measures them."""

import subprocess
import sys
from pathlib import Path

from baseline_measure import known_cells, known_options
from project import ROOT, environment

from motley.sweep.matrix_file import Known

KNOWN = Known(known_cells(), known_options())


def matrix_file(folder: Path, text: str) -> Path:
    """A file of that text."""
    path = folder / "m.toml"
    path.write_text(text)
    return path


def measure(*words: object) -> subprocess.CompletedProcess[str]:
    """baseline_measure.py with these words."""
    return subprocess.run(
        [sys.executable, "torch_dist/baseline_measure.py", *map(str, words)], cwd=ROOT,
        env=environment(), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
