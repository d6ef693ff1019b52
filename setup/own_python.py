"""The environment's Python for a script that another Python has begun.

The own_python.py beside each script that users begin by hand runs this first. The system's Python
has none of the packages: this module then starts the script again with the environment's.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(os.environ.get("MOTLEY_VENV", ROOT / ".venv"))

if find_spec("motley") is None:
    python = VENV / "bin" / "python"
    if not os.access(python, os.X_OK) or Path(sys.prefix).resolve() == VENV.resolve():
        sys.exit(
            f"motley: {sys.executable} has no package motley, and {VENV} is no whole environment; "
            f"make it with: bash {ROOT}/setup/make_env.sh"
        )
    for name in ("PYTHONHOME", "PYTHONPATH"):
        os.environ.pop(name, None)
    os.execv(python, [str(python), *sys.argv])
