"""Print the speed of a run as a part of its limit, the causes of lost time, and faster settings.

    python plots/verdict.py logs/                    # every run
    python plots/verdict.py logs/RUN --json          # for a program: one line per run
    python plots/verdict.py logs/RUN --co2 56        # grams per kWh where it ran, here: in France

The exit code is 0, or 2 if there is nothing to judge.
"""

import argparse
import json
from pathlib import Path

from motley.live.verdict import CO2_PER_KWH, run_verdict
from motley.plotting import command
from motley.plotting.run_steps import read_or_say, title
from motley.records.run_folder import find_runs


def print_verdicts(paths: list[Path], json_lines: bool, co2: float) -> int:
    """Print the verdict of every run, and return the exit code."""
    code = 2
    for folder in find_runs(paths):
        if (training := read_or_say(folder)) is None:
            continue
        verdict = run_verdict(training, co2)
        if json_lines:
            print(json.dumps({"run": str(folder.path), **verdict.as_json()}))
        else:
            print("\n  ".join([title(training), *verdict.sentences()]))
        code = 0
    if code:
        raise command.nothing("run with a step", paths)
    return code


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this script has."""
    parser.add_argument(
        "--json", action="store_true", dest="json_lines", help=("print one line per run")
    )
    add_co2(parser)


def add_co2(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--co2``, the grams of CO2 per kWh of energy."""
    parser.add_argument(
        "--co2", type=float, default=CO2_PER_KWH, metavar="G",
        help=f"grams of CO2 per kWh, default: {CO2_PER_KWH:g}, the world's mean of 2023 (Ember)",
    )  # fmt: skip


def main() -> int:
    """Judge the runs on the command line, and return the exit code."""
    return command.run_script(__doc__ or "", print_verdicts, add_options, draws=False)
