"""The repository that is tested, its scripts, and its environment."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DDP = "torch_dist/train_vit.py"
ZERO = "deepspeed/train_vit.py"
# Seconds after which a started process hangs. At the lowest priority it may take ten times as long
# as alone, and a slow machine doubles that.
LIMIT_S = 480


def venv() -> Path:
    """The project's environment."""
    return Path(os.environ.get("MOTLEY_VENV", ROOT / ".venv"))


def environment(**extra: str) -> dict[str, str]:
    """This environment with the project's on PATH; how many threads is for entry_cn.sh to say."""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**own, "PATH": f"{venv() / 'bin'}:{os.environ['PATH']}", **extra}


def copy_repository(folder: Path) -> None:
    """Copy what git tracks, or would, as it is now."""
    git = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
