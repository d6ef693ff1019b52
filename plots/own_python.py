"""The environment's Python for the scripts beside this file: see setup/hand_over.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "setup"))
import hand_over  # noqa: F401

sys.path.pop()
