"""The command ``motley``: what the doors of the repository do, wherever the package is installed.

    mpirun -np 2 motley train --task mine.py --epochs 2
    mpirun -np 2 motley train --task mine.py --stage 3
    mpirun -np 2 motley run mine.py
    motley report logs
    motley watch --once

Each rank of ``train``, ``run``, ``plan`` and ``infer`` gets the environment that entry_cn.sh gives,
and becomes ``python -m motley.launch``. The other commands run in this process.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from motley import PACKAGE, __version__
from motley.text import RUN, did_you_mean


@dataclass(frozen=True)
class Command:
    """A word behind ``motley``.

    Attributes:
        module: its ``main()`` reads ``sys.argv`` and returns an exit code, or None; empty for RUN.
        says: one line for ``-h``.
        is_launched: each rank runs it.
    """

    module: str
    says: str
    is_launched: bool = False


COMMANDS = {
    "train": Command("motley.train.train_model", "train a model on all ranks", True),
    RUN: Command("", "run a script of your own on all ranks", True),
    "plan": Command("motley.train.plan_vit", "split a batch and forecast its speed", True),
    "infer": Command("motley.infer.infer_vit", "classify images with a trained model", True),
    "export": Command("motley.infer.export_model", "write a trained model for timm or ONNX"),
    "verify": Command("motley.checkpoint.verify_run", "compare a run's files with their hashes"),
    "watch": Command("motley.plotting.watch", "follow a run in the terminal"),
    "report": Command("motley.plotting.report", "write a page about a run, or about all runs"),
    "verdict": Command("motley.plotting.run_verdict", "say where a run's time went"),
    "publish": Command("motley.plotting.publish_run", "send a run to a tracker"),
    "plot-training": Command("motley.plotting.plot_training", "draw a run's curves"),
    "plot-gpu": Command("motley.plotting.plot_gpu", "draw the GPUs of a run"),
    "plot-runs": Command("motley.plotting.plot_runs", "draw several runs beside each other"),
    "plot-timeline": Command("motley.plotting.plot_timeline", "draw the steps of all ranks"),
    "completion": Command("motley.completion", "complete commands and options in your shell"),
    "traces": Command("motley.plotting.traces", "merge the profiler's traces"),
}
EXAMPLE = "mpirun -np 2 motley train --epochs 1"
_RUN_EXAMPLE = "mpirun -np 2 motley run mine.py"
# Variables of another Python, which a module or .bashrc sets, would break the start of this one.
_FOREIGN = ("PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONOPTIMIZE", "PYTHONSAFEPATH", "PYTHONINSPECT")


def main() -> None:
    """Run the command that the command line names; the console script ``motley``."""
    words = sys.argv[1:]
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(usage())
        return
    if name == "--version":
        print(f"motley {__version__}")
        return
    if name not in COMMANDS:
        importlib.import_module("motley.launch.process").stop_usage(explain(name))  # by one rank
    if not COMMANDS[name].is_launched:
        sys.exit(run(name, words[1:]))
    begun = find_script(words[1:]) if name == RUN else ["-m", __name__, *words]
    command = [sys.executable, "-P", "-m", "motley.launch", *begun]
    # The rank stays the launcher's direct child: it asks the kernel to die with its parent.
    os.execve(sys.executable, command, rank_environment(os.environ))


def run(name: str, words: Sequence[str]) -> int:
    """Run a command in this process, as if it had been typed with these words; its exit code."""
    sys.argv = [f"motley {name}", *words]
    return importlib.import_module(COMMANDS[name].module).main() or 0


def usage() -> str:
    """Return the text of ``motley -h``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.says}" for name, command in COMMANDS.items()]
    return "\n".join([
        "usage: motley COMMAND [ARGS...]", "",
        "Train one model on unequal machines, exactly, as fast as their sum.", "",
        *lines, "",
        f"example: {EXAMPLE}",
        "motley COMMAND -h describes a command; motley --version prints the version.",
    ])  # fmt: skip


def explain(name: str) -> str:
    """Return the error for a missing or unknown command."""
    found = f"{name} is no command{did_you_mean(name, COMMANDS)}" if name else "no command is given"
    return f"{found}; choose {', '.join(COMMANDS)}, as in: {EXAMPLE}"


def find_script(words: Sequence[str]) -> list[str]:
    """Return the words behind ``motley run``; end this process if they name no script."""
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(f"usage: motley {RUN} SCRIPT.py [ARGS...]\n\n{COMMANDS[RUN].says}\n\n{_RUN_EXAMPLE}")
        sys.exit(0)
    if not name or name.startswith("-"):
        stop = importlib.import_module("motley.launch.process").stop_usage
        stop(f"the script is missing{name and f' before {name}'}; name it, as in: {_RUN_EXAMPLE}")
    if not Path(name).is_file():  # here; each host says so of its own
        print(
            f"motley: there is no script {name} on {os.uname().nodename}; name one that all hosts "
            f"have, as in: {_RUN_EXAMPLE}",
            file=sys.stderr,
        )  # fmt: skip
        sys.exit(2)
    return list(words)


def rank_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank, as entry_cn.sh sets them."""
    found = {name: value for name, value in given.items() if name not in _FOREIGN}
    # For how long a thread spins for the others before it sleeps; with OpenMP's own 300000 a rank
    # beside other jobs spends its turns on the processor on waiting.
    if not found.get("OMP_WAIT_POLICY"):
        found.setdefault("GOMP_SPINCOUNT", "10000")
    found["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), *filter(None, [found.get("PATH", "")])]
    )
    # Packages of another Python would come before the environment's: Python adds them last.
    found.setdefault("MOTLEY_LAST_FOLDERS", found.get("PYTHONPATH", ""))
    found.pop("PYTHONPATH", None)
    if not PACKAGE.is_relative_to(sys.prefix):  # of a clone
        found["PYTHONPATH"] = str(PACKAGE.parent)
    found["PYTHONUNBUFFERED"] = "1"
    found.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return found


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
