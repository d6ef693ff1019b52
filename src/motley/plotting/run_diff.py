"""Print the differences of runs in options, versions, machines, plan and results.

    python plots/diff.py logs/A logs/B
    python plots/diff.py logs/                       # all runs there, one column each

The command prints a row for each value that differs between the runs, and for each result. A dash
stands for a value that a run does not have. The exit code is 0, or 2 if there are fewer than two
runs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.plotting import command
from motley.records.run_folder import RunFolder, find_runs

_OWN = ("logs", "run", "resume")  # options that name a run, and change nothing
_WIDEST = 32  # characters of a value
_RESULTS = "results"


def describe_run(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Return the facts of a run, such as options and results, by section and name."""
    run = folder.read_run()
    config = {name: value for name, value in run.get("config", {}).items() if name not in _OWN}
    plan, task = run.get("plan") or {}, run.get("task") or {}
    ranks = run.get("ranks") or ()
    return {
        "options": {f"--{name.replace('_', '-')}": value for name, value in config.items()},
        "code": {"commit": run.get("commit"), **(run.get("versions") or {})},
        "machines": {
            f"rank {each['rank']}": f"{each['host']}, {each['device']}, {each['precision']}"
            for each in ranks
        },
        "training": {
            "title": task.get("title"), "parameters": (run.get("model") or {}).get("numbers"),
            "samples of each rank": plan.get("counts"), "wire": plan.get("wire"),
            "last step": run.get("last_step"),
        },
        _RESULTS: {"status": run.get("status"), **(run.get("result") or {})},
    }  # fmt: skip


def list_rows(runs: list[Mapping[str, Mapping[str, Any]]]) -> list[tuple[str, str, list[str]]]:
    """Return one row for each fact that differs between runs, and one for each result.

    A row is the section of the fact, its name, and the value of each run.
    """
    rows = []
    for section in dict.fromkeys(each for run in runs for each in run):
        names = dict.fromkeys(name for run in runs for name in run.get(section, {}))
        for name in names:
            values = [run.get(section, {}).get(name) for run in runs]
            if section == _RESULTS or any(each != values[0] for each in values):
                rows.append((section, name, list(map(format_value, values))))
    return rows


def format_value(value: Any) -> str:
    """Return a value as text, cut to the largest width of a column."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def print_differences(paths: list[Path]) -> int:
    """Print the differences of all runs under the paths, and return the exit code."""
    # In the order of the command line, and each once.
    folders = list({folder.path: folder for path in paths for folder in find_runs([path])}.values())
    if len(folders) < 2:
        found = ", ".join(str(each.path) for each in folders) or "none"
        raise MotleyError(
            f"two runs are needed, and {found} was found; name the folders of two runs, as in "
            "logs/A logs/B"
        )
    rows = list_rows([describe_run(each) for each in folders])
    heads = [format_value(each.path.resolve().name) for each in folders]
    widths = [max(len(head), *(len(values[at]) for _, _, values in rows))
              for at, head in enumerate(heads)]  # fmt: skip
    first = max(len(name) for _, name, _ in rows)
    shown = ""
    for section, name, values in [("", "", heads), *rows]:
        if section != shown:
            print(f"{section}:")
            shown = section
        cells = "  ".join(f"{value:<{width}}" for value, width in zip(values, widths, strict=True))
        print(f"  {name:<{first}}  {cells}".rstrip())
    return 0


def main() -> int:
    """Compare the runs on the command line, and return the exit code."""
    return command.run_script(__doc__ or "", print_differences, draws=False)
