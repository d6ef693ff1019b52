"""A rank that runs a script, as ``mpirun ... ./entry_cn.sh SCRIPT.py ARGS...`` begins one."""

import os
import pkgutil
import runpy
import subprocess
import sys
from typing import Any, NoReturn

from project import ROOT
from warm.fork import end_with

import motley.launch.world
from motley.launch.ranks import Launched

# What a rank imports sooner or later; DeepSpeed's Muon takes torch's compiler with it, 6 s.
MODULES = (
    "warm.script",
    "motley.train.start",
    "motley.engines.ddp",
    "motley.engines.ddp",
    "motley.engines.fsdp",
    "motley.engines.local_sgd",
    "motley.engines.zero_engine",
    "sklearn.datasets",
    "sklearn.datasets.data",
    "sklearn.datasets.descr",
    "sklearn.model_selection",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "jinja2.ext",
    # What torch, torchvision and DeepSpeed import when they are used.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.triton_ops",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torchvision.transforms.v2",
    *(
        found.name
        for room in ("config", "data", "tasks", "comm", "engines", "train")
        for found in pkgutil.walk_packages([str(ROOT / "src/motley" / room)], f"motley.{room}.")
    ),
)


class Again(subprocess.Popen):  # type: ignore[type-arg]
    """A script that starts itself once more gets a fork in place of a Python that imports torch."""

    def __init__(self, command: Any, *others: Any, **named: Any) -> None:
        self._forked = command == [sys.executable, *sys.argv]
        if not self._forked:
            super().__init__(command, *others, **named)
            return
        self.args, self.returncode, self._child_created = command, None, False
        self.pid = os.fork()
        if self.pid == 0:
            run_again(named["env"])

    def wait(self, timeout: float | None = None) -> int:
        """See Popen."""
        if not self._forked:
            return super().wait(timeout)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run_again(environment: dict[str, str]) -> NoReturn:
    """Be the script's own process, in this fork."""
    os.environ.clear()
    os.environ |= environment
    end_with(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))


def main(launched: Launched, given: dict[str, Any]) -> None:
    """Run a script with its options, ``words``, in the repository's root, where ``variables`` are
    set."""
    os.chdir(ROOT)
    os.environ |= given["variables"]
    script, *_ = sys.argv = given["words"]
    sys.path.insert(0, str((ROOT / script).parent))
    motley.launch.world.ranks_of_launch = lambda: launched
    subprocess.Popen = Again  # type: ignore[misc]
    runpy.run_path(script, run_name="__main__")
