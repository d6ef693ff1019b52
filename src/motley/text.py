"""Text for users: nearest names, lists of names, times, steps, rates, commands."""

import importlib
import io
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from motley import ROOT, __version__

RUN = "run"  # the command of motley that runs a user's script
PINNED = f"motley-train=={__version__}"  # name and version for pip
# For a GPU that is older than PyPI's build of torch, where no script of a clone chooses one.
INSTALL_TORCH = "pip install torch torchvision --index-url https://download.pytorch.org/whl/cu126"
# A rank's command in a clone, or a script there. A path without a folder may be a user's own.
_CLONE_COMMAND = re.compile(
    r"\./entry_cn\.sh(?: (?P<script>[\w./-]+\.py|motley)\b)?"
    r"|(?:\b(?:bash|python) )?(?<![\w./-])(?P<door>(?:the mpirun of )?(?:setup|plots|torch_dist|"
    r"deepspeed)/\w+\.(?:sh|py)|\w+_\w+\.sh|baseline_measure\.py|\.venv/bin/pip|examples/my_task\.py)"
)
CLEAR_LINE = "\r\x1b[2K\x1b[?25h"  # on a terminal: removes a progress bar, and shows the cursor
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MOST_S = 366 * 86400


def escape_unprintable() -> None:
    r"""Make ``print`` write an escape such as ``\xe9`` for a character that its encoding lacks.

    With ``PYTHONIOENCODING=ascii``, printing a path with such a character would raise an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def own_command() -> str:
    """Return the name of the ``motley`` command that runs in this process; empty for a script."""
    program, _, name = sys.argv[0].partition(" ")
    return name if program == "motley" else ""


def typed_command(text: str) -> str:
    """Return a text in which commands have the form that works in this installation.

    Args:
        text: a text with commands of a clone: ``python plots/plot_gpu.py``, ``bash
            setup/clean_cn.sh``, ``./entry_cn.sh torch_dist/plan_vit.py``.

    Returns:
        In a clone, the unchanged text. If the command ``motley`` runs this process, or there is no
        clone, the three commands become ``motley plot-gpu``, ``motley clean`` and ``motley plan``.
    """
    return text if ROOT and not own_command() else _CLONE_COMMAND.sub(_replace_door, text)


def _replace_door(match: re.Match[str]) -> str:
    doors, door = _read_doors(), match["door"]
    if door is None:  # a command of entry_cn.sh
        script = match["script"]
        return doors["torch_dist/train_vit.py"] if not script else doors.get(
            script, script if script == "motley" else f"motley {RUN} {script}"
        )  # fmt: skip
    typed = doors.get(door, match[0])
    # In a clone, another script selects DeepSpeed. With ``motley``, --stage selects it, and has to
    # be left out for torch_dist/train_vit.py.
    ends = not match.string[match.end() :].startswith(" -")
    return f"{typed} without --stage" if door == "torch_dist/train_vit.py" and ends else typed


@cache
def _read_doors() -> dict[str, str]:
    """Return the ``motley`` command for each script of the repository, by path and by file name."""
    result = dict[str, str]()
    for name, command in importlib.import_module("motley.cli").COMMANDS.items():  # imports this
        typed = command.otherwise if command.otherwise and not ROOT else f"motley {name}"
        result |= dict.fromkeys(command.doors, typed)
    if not ROOT:
        result["setup/make_env.sh"] = f"pip install {PINNED}"
        result["the mpirun of setup/make_env.sh"] = str(Path(sys.prefix, "bin", "mpirun"))
        result[".venv/bin/pip"] = "pip"
        result["examples/my_task.py"] = "python -m pydoc motley.Task"
    return result | {Path(door).name: typed for door, typed in result.items()}


def did_you_mean(word: str, known: Iterable[str], most: int = 3, least: float = 0.5) -> str:
    """Return `` (nearest: a, b)`` for the known names most similar to ``word``; may be empty.

    Args:
        word: an unknown name.
        known: the known names.
        most: largest number of names to list.
        least: least similarity from 0 to 1, as in difflib.SequenceMatcher.
    """
    close = get_close_matches(word, list(known), n=most, cutoff=least)
    return f" (nearest: {', '.join(close)})" if close else ""


def name_some(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, and the number of the other names: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def plural(count: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 row`` and ``1,200 rows``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def parse_seconds(text: str) -> int | None:
    """Return the seconds of a time such as 2h or 1h30m; None unless the text is from 1s to 366d."""
    if not re.fullmatch(r"(?:[0-9]{1,6}[dhms])+", text):
        return None
    parts = re.findall(r"([0-9]+)([dhms])", text)
    seconds = sum(int(number) * _UNITS[unit] for number, unit in parts)
    return seconds if 0 < seconds <= _MOST_S else None


def format_step(step: int | None) -> str:
    """Return the name of a step for users, such as ``step 1`` for step 0 of the records.

    None: ``before the first step``.
    """
    return "before the first step" if step is None else f"step {step + 1}"


def format_rate(rate: float) -> str:
    """Return a rate with few digits, such as 1,036 or 9.6 or 0.034, and never 0 for a slow rate."""
    return f"{rate:,.0f}" if rate >= 9.95 or not rate else f"{rate:.2g}"


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: 1:02:03, or 2:03 below one hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
