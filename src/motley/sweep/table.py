"""The table of a matrix, for people (results.md) and for spreadsheets (results.csv). Pure."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from motley.sweep.outcome import DONE
from motley.sweep.results import BaselineFolder
from motley.sweep.rows import Row

_SHOWN = (
    ("cell", "name"), ("hosts", "machines"), ("precision", "precision"), ("batch", "batch"),
    ("micro-batch", "micro_batch"),
    ("median rate", "rate"), ("mean rate", "mean_rate"), ("spread", "spread"),
    ("of limit", "fraction_of_limit"),
    ("efficiency", "efficiency"), ("epoch s", "epoch_s"), ("memory MiB", "memory_mib"),
    ("J/sample", "joules"), ("loss vs fp32", "loss_difference"), ("outcome", "outcome"),
)  # fmt: skip
_FORMS = {
    "spread": "{:.1%}", "fraction_of_limit": "{:.3f}",
    "efficiency": "{:.3f}", "epoch_s": "{:,.1f}", "joules": "{:.3g}", "loss_difference": "{:+.1e}",
}  # fmt: skip


def shown(row: Row) -> list[str]:
    """What a person reads of a row, in the order of :data:`HEAD`."""
    values = [getattr(row, name) for _, name in _SHOWN]
    return [
        "" if value is None else _FORMS.get(name, "{}").format(value)
        for (_, name), value in zip(_SHOWN, values, strict=True)
    ]  # fmt: skip


HEAD = [title for title, _ in _SHOWN]


def markdown(rows: Sequence[Row]) -> str:
    """The table, and below it what failed and how, and what leaks."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in shown(row)) + " |"
              for row in rows]  # fmt: skip
    notes = [
        f"- **{row.name}**: {row.outcome}" + (f" ({row.when})" if row.when else "")
        + f": {row.error}" for row in rows if row.outcome != DONE
    ] + [
        f"- **{row.name}**: memory grows by {row.leak_mib:.3g} MiB a step, to the end of the run"
        for row in rows if row.leak_mib
    ] + [
        f"- **{row.name}**: above the limit, which is of the model before --compile"
        for row in rows if row.is_compiled and (row.fraction_of_limit or 0) > 1
    ]  # fmt: skip
    return "\n".join([*lines, *(["", *notes] if notes else []), ""])


def write_rows(folder: BaselineFolder, rows: Sequence[Row]) -> tuple[Path, Path]:
    """Write results.csv and results.md into the folder."""
    table, text = folder.path / "results.csv", folder.path / "results.md"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row in rows:
            writer.writerow({k: "" if v is None else v for k, v in asdict(row).items()})
    text.write_text(f"{markdown(rows)}\n{folder.configuration()}")
    return table, text
