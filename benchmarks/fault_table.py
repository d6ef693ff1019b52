"""The fault matrix as a page."""

import time
from collections.abc import Sequence
from typing import Any

_HEAD = """# The fault matrix

What `python benchmarks/faults.py` saw on {date}; it was `ok` in {ok} of {all} rows. Seconds are
counted from the fault: to our first word, to the end of the job, to the next step where it goes on
by itself. "Lost" are finished steps that were taken again; "left" are processes and files that
were there 12 s after the end. The machine is shared, so seconds are upper bounds. An empty cell:
the row does not look at that. The lines that a user read are below.

| fault | where | first word | end | next step | lost | left | status | next launch | verdict |
|---|---|---|---|---|---|---|---|---|---|
"""


def table(rows: Sequence[dict[str, Any]], started: float) -> str:
    """Markdown of the result's rows.

    Args:
        started: seconds since the epoch.
    """
    date = time.strftime("%Y-%m-%d", time.gmtime(started))
    ok = sum(row["verdict"] == "ok" for row in rows)
    text = _HEAD.format(date=date, ok=ok, all=len(rows))
    for row in rows:
        remaining = row["left"]
        cells = [
            f"`{row['row']}`: {row['fault']}", row["where"], _seconds(row["first_word_s"]),
            _seconds(row["end_s"]), _seconds(row["next_step_s"]), row["steps_lost"],
            None if remaining is None else ", ".join(remaining) or "nothing", row["status"],
            row["next_launch"], row["verdict"],
        ]  # fmt: skip
        text += "| " + " | ".join(map(_cell, cells)) + " |\n"
    text += "\n## What the user read\n\n"
    for row in rows:
        text += f'- `{row["row"]}`, right is "{row["right"]}":\n  `{_code(row["line"])}`\n'
    return text


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{max(value, 0.0):.1f} s"


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _code(line: str) -> str:
    return line.replace("`", "'") or "(no line)"
