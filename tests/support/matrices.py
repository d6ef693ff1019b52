"""Matrices of cells to measure, and the command that measures them."""

import subprocess
from pathlib import Path

from forked import run_script
from project import environment

from motley.provision.baselines import known_cells, known_options
from motley.sweep.matrix import KnownNames

KNOWN = KnownNames(known_cells(), known_options())


def matrix_file(folder: Path, text: str) -> Path:
    """A file of that text."""
    path = folder / "m.toml"
    path.write_text(text)
    return path


def measure(*words: object) -> subprocess.CompletedProcess[str]:
    """baseline_measure.py with these words, on which nothing is run."""
    return run_script("torch_dist/baseline_measure.py", *words, variables=environment())
