"""Where the benchmarks are, and the file that each writes: its rows, and what they depend on."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(os.environ.get("MOTLEY_VENV", ROOT / ".venv"))
sys.path.insert(0, str(ROOT / "src"))


def compute_digest(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a result without its own `digest`, which shows later edits by hand."""
    rest = json.dumps({key: content[key] for key in content if key != "digest"})
    text = json.dumps(json.loads(rest), sort_keys=True)  # as it is read again: all keys are text
    return hashlib.sha256(text.encode()).hexdigest()


def write(path: Path, rows: list[dict[str, Any]], started: float, **more: Any) -> None:
    """Write a benchmark's result as JSON.

    Args:
        started: when it began, seconds since the epoch.
        more: what else there is to say of the whole.
    """
    from motley.checkpoint.run import commit, versions  # which loads torch: not for -h

    content = {
        "rows": rows, "versions": versions(), "commit": commit(),
        "command": " ".join(["python", *sys.argv]), "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "seconds": time.time() - started, **more,
    }  # fmt: skip
    content["digest"] = compute_digest(content)
    path.write_text(json.dumps(content, indent=1) + "\n")
