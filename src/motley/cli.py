"""The command ``motley``, which replaces the repository's scripts after ``pip install``.

    mpirun -np 2 motley train --task mine.py --epochs 2
    mpirun -np 2 motley train --task mine.py --stage 3
    mpirun -np 2 motley run mine.py
    motley report logs
    motley watch --once

If all ranks run a command, motley.launch.environment replaces each process with ``python -m
motley.launch``, as entry_cn.sh does. Other commands run in this process.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motley import __version__
from motley.text import PINNED, RUN, did_you_mean


@dataclass(frozen=True)
class Command:
    """A command of ``motley``.

    Attributes:
        module: name of the module whose ``main()`` reads ``sys.argv`` and returns an exit code or
            None; empty for ``motley run``.
        says: one-line description of the command in ``-h``.
        doors: paths of the repository's scripts that run the same module.
        is_launched: True if each rank runs the command.
        visits_hosts: True if the command visits hosts by ssh. motley.provision.setup_command then
            calls the module's ``main(words)``.
        otherwise: command to use if the repository is not cloned. Empty: the command needs no
            clone.
    """

    module: str
    says: str
    doors: tuple[str, ...] = ()
    is_launched: bool = False
    visits_hosts: bool = False
    otherwise: str = ""


def _on_ranks(module: str, says: str, *doors: str) -> Command:
    return Command(f"motley.{module}" if module else "", says, doors, is_launched=True)


def _here(module: str, says: str, *doors: str) -> Command:
    return Command(f"motley.{module}", says, doors)


def _picture(name: str, says: str) -> Command:
    return _here(f"plotting.{name}", says, f"plots/{name}.py")


def _on_hosts(name: str, says: str, otherwise: str = "") -> Command:
    doors = (f"setup/{name}.sh",)
    return Command(f"motley.provision.{name}", says, doors, False, True, otherwise)


GROUPS = {
    "Train a model, and use it": {
        "train": _on_ranks("train.train_model", "train a model on all ranks", *(
            f"{folder}/{name}.py" for folder in ("torch_dist", "deepspeed")
            for name in ("train_vit", "train")
        )),
        RUN: _on_ranks("", "run a script of your own on all ranks"),
        "plan": _on_ranks(
            "train.plan_vit", "split a batch and forecast its speed", "torch_dist/plan_vit.py"
        ),
        "infer": _on_ranks(
            "infer.infer_vit", "predict with a trained model", "torch_dist/infer_vit.py"
        ),
        "predict": _here(
            "infer.predict", "predict images or rows of a table", "torch_dist/predict.py"
        ),
        "generate": _here(
            "infer.generate", "write text with a trained model", "torch_dist/generate.py"
        ),
        "export": _here(
            "infer.export_model", "write a trained model for timm or ONNX", "torch_dist/export.py"
        ),
        "verify": _here(
            "checkpoint.verify_run", "compare a run's files with their hashes",
            "torch_dist/verify.py",
        ),
        "baselines": _here(
            "provision.baselines", "measure ways to train, one after the other",
            "torch_dist/baseline_measure.py",
        ),
    },
    "Look at runs": {
        "watch": _picture("watch", "follow a run in the terminal"),
        "report": _picture("report", "write a page about a run, or about all runs"),
        "verdict": _here(
            "plotting.run_verdict", "print where a run's time went", "plots/verdict.py"
        ),
        "diff": _here("plotting.run_diff", "say how runs differ", "plots/diff.py"),
        "publish": _here("plotting.publish_run", "send a run to a tracker", "plots/publish.py"),
        "traces": _picture("traces", "merge the profiler's traces"),
        "plot-training": _picture("plot_training", "draw a run's curves"),
        "plot-gpu": _picture("plot_gpu", "draw the GPUs of a run"),
        "plot-runs": _picture("plot_runs", "draw several runs beside each other"),
        "plot-timeline": _picture("plot_timeline", "draw the steps of all ranks"),
        "plot-baselines": _picture("plot_baselines", "draw a matrix of baselines"),
    },
    "Share the hosts of hosts.txt": {
        "keep": _on_hosts("keep_training", "start a training again after a host is lost"),
        "leave": _on_hosts("leave_cn", "let a host leave training after its step"),
        "join": _on_hosts("join_cn", "let a host take part again"),
        "clean": _on_hosts("clean_cn", "end your own leftover training processes"),
        "slurm": _on_hosts("slurm_job", "write a batch script of Slurm's, and submit it"),
    },
    "Get these machines ready": {
        "check": _on_hosts("test_cn_connection", "report every host's properties and faults"),
        "ssh": _on_hosts("passwordless_ssh", "let ssh log in to every host by a key"),
        "shell": _on_hosts("change_cn_shell", "change your login shell on every host"),
        "install": _on_hosts(
            "install_cn", "make a clone's environment on every host",
            f"pip install {PINNED}",
        ),
        "sync": _on_hosts("sync_cn", "copy a clone's files to every host", "scp"),
        "stage": _on_hosts("stage_cn", "pack images into one file on each host's disk"),
        "mpi": _on_hosts("test_mpi", "configure MPI for the hosts' network, and test it"),
        "hello": _on_ranks(
            "provision.hello_mpi", "print the host of each rank", "setup/hello_mpi.py"
        ),
        "test-gpu": _on_ranks(
            "provision.test_torch_gpu", "see whether each rank can compute",
            "torch_dist/test_torch_gpu.py",
        ),
        "test-deepspeed": _on_ranks(
            "provision.test_deepspeed", "see whether DeepSpeed works on all ranks",
            "deepspeed/test_deepspeed.py",
        ),
        "completion": _here("completion", "complete commands and options in your shell"),
    },
}  # fmt: skip
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
EXAMPLE = "mpirun -np 2 motley train --epochs 1"
_RUN_EXAMPLE = "mpirun -np 2 motley run mine.py"


def main() -> None:
    """Run the command that the command line names. The console script ``motley`` calls this."""
    words = sys.argv[1:]
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(usage())
        return
    if name == "--version":
        print(f"motley {__version__}")
        return
    if name not in COMMANDS:
        importlib.import_module("motley.launch.process").stop_usage(
            explain(name)
        )  # printed by one rank alone
    if not COMMANDS[name].is_launched:
        sys.exit(run(name, words[1:]))
    begun = find_script(words[1:]) if name == RUN else ["-m", __name__, *words]
    importlib.import_module("motley.launch.environment").start_rank(begun)


def run(name: str, words: Sequence[str]) -> int:
    """Run a command in this process with these words, and return its exit code."""
    sys.argv = [f"motley {name}", *words]
    command = COMMANDS[name]
    main = importlib.import_module(command.module).main
    if command.visits_hosts:
        importlib.import_module("motley.provision.setup_command").run(main)
    return main() or 0


def usage() -> str:
    """Return the text of ``motley -h``, which fits on a screen of 40 lines."""
    width = max(map(len, COMMANDS))
    lines = list[str]()
    for title, group in GROUPS.items():
        lines.append(f"{title}:")
        joined = {
            says: [name for name in group if name.startswith(begins)]
            for begins, says in (("plot-", "pictures"), ("test-", "see what each rank can compute"))
        }
        apart = [name for name in group if not any(name in names for names in joined.values())]
        lines += [f"  {name:<{width}}  {group[name].says}" for name in apart]
        lines += [f"  {', '.join(names)}: {says}" for says, names in joined.items() if names]
    return "\n".join([
        "usage: motley COMMAND [ARGS...]", "",
        "Train one model on unequal machines, exactly, as fast as their sum.", *lines,
        f"example: {EXAMPLE}",
        "motley COMMAND -h describes a command; motley --version prints the version.",
    ])  # fmt: skip


def explain(name: str) -> str:
    """Return the error for a missing or unknown command."""
    result = (
        f"{name} is no command{did_you_mean(name, COMMANDS)}" if name else "no command is given"
    )
    return f"{result}; motley -h lists them, as in: {EXAMPLE}"


def find_script(words: Sequence[str]) -> list[str]:
    """Return the words after ``motley run``; exit if they name no script."""
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(f"usage: motley {RUN} SCRIPT.py [ARGS...]\n\n{COMMANDS[RUN].says}\n\n{_RUN_EXAMPLE}")
        sys.exit(0)
    if not name or name.startswith("-"):
        stop = importlib.import_module("motley.launch.process").stop_usage
        stop(f"the script is missing{name and f' before {name}'}; name it, as in: {_RUN_EXAMPLE}")
    if not Path(name).is_file():  # each host checks its own disk
        print(
            f"motley: the script {name} does not exist on {os.uname().nodename}; name one that "
            f"all hosts have, as in: {_RUN_EXAMPLE}",
            file=sys.stderr,
        )  # fmt: skip
        sys.exit(2)
    return list(words)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
