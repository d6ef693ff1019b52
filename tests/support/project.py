"""The repository that is tested, its scripts, and its environment."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DDP = "torch_dist/train_vit.py"
ZERO = "deepspeed/train_vit.py"


def venv() -> Path:
    """The project's environment."""
    return Path(os.environ.get("MOTLEY_VENV", ROOT / ".venv"))


def environment(**extra: str) -> dict[str, str]:
    """This environment with the project's on PATH."""
    return {**os.environ, "PATH": f"{venv() / 'bin'}:{os.environ['PATH']}", **extra}
