"""A lab of five unshaped hosts, for benchmarks: up, one mpirun job after another, down."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from result import ROOT, VENV

_KEYS = """
set -e
mkdir -p -m 700 .ssh
[ -e .ssh/id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519
cp .ssh/id_ed25519.pub .ssh/authorized_keys
ssh-keyscan -t ed25519 $(cut -d ' ' -f 1 hosts.txt) >.ssh/known_hosts 2>/dev/null
"""
# The checkout is not the lab user's, and a record names the commit that it was made with.
READY = (
    f"cd {ROOT} && export PATH={VENV}/bin:$PATH OMP_NUM_THREADS=1 GIT_CONFIG_COUNT=1 "
    f"GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0={ROOT}"
)
HOSTS = tuple(f"paced{number}" for number in range(1, 6))  # of lab/unshaped.toml


@dataclass(frozen=True)
class BenchLab:
    """A lab that is up; its homes are shared.

    Attributes:
        head: its first host. subnet: that its hosts share, as in 10.97.97.0/24.
    """

    name: str
    head: str
    subnet: str

    @property
    def mpirun(self) -> str:
        """What a job's command begins with."""
        return (
            f"mpirun -x MOTLEY_VENV -x OMP_NUM_THREADS --mca btl_tcp_if_include {self.subnet} "
            f"--prtemca prte_if_include {self.subnet}"
        )

    def do(self, *words: object, stdin: str | None = None, stdout: int | None = None) -> str:
        """A command of lab.sh; what follows ``--`` goes last.

        Args:
            stdout: subprocess.PIPE to get it back.
        """
        command = self._command(words)
        done = subprocess.run(command, cwd=ROOT, input=stdin, text=True, check=False, stdout=stdout)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}")
        return done.stdout or ""

    def on_head(self, script: str) -> str:
        """What a bash script prints on the first host, in the lab user's home."""
        return self.do("exec", self.head, "--", "bash", "-c", script, stdout=subprocess.PIPE)

    def train(
        self,
        *words: object,
        tree: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        keeps: bool = False,
    ) -> Iterator[str]:
        """``mpirun -np 5 ... ./entry_cn.sh WORDS...`` on all hosts: the lines that it prints.

        Args:
            tree: the checkout whose code is run.
            environment: more variables of all ranks.
            keeps: True: setup/keep_training.sh starts it, and again without a lost host.
        """
        exported = " ".join(f"-x {name}={value}" for name, value in (environment or {}).items())
        keeper = "bash setup/keep_training.sh " * keeps
        script = (
            f"{READY} GIT_CONFIG_VALUE_0={tree} && cd {tree} && exec {keeper}{self.mpirun} "
            f"{exported} -np 5 --hostfile ~/hosts.txt ./entry_cn.sh "
            f"{' '.join(map(str, words))}"
        )
        job = subprocess.Popen(
            self._command(("exec", self.head, "--", "bash", "-c", script)),
            cwd=ROOT, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        yield from job.stdout or ()
        if job.wait() != 0:
            raise SystemExit(f"the job ended with status {job.returncode}; see above")

    def records(self, run: str) -> dict[str, Any]:
        """run.json, the steps of the first rank that trained, and events of a run in ~/logs."""

        def lines(name: str) -> list[dict[str, Any]]:
            text = self.on_head(f"cat ~/logs/{run}/{name} 2>/dev/null || true")
            return [json.loads(line) for line in text.splitlines()]

        about = json.loads(self.on_head(f"cat ~/logs/{run}/run.json"))
        first = about["ranks"][0]["rank"]
        return {"run": about, "steps": lines(f"steps.rank{first}.jsonl"),
                "events": lines("events.jsonl")}  # fmt: skip

    def _command(self, words: tuple[object, ...]) -> list[str]:
        given = list(map(str, words))
        at = given.index("--") if "--" in given else len(given)
        return ["bash", "lab/lab.sh", *given[:at], "--name", self.name, *given[at:]]


def unshaped(mbit: float = 10_000, slow: float | None = None) -> str:
    """A profile: lab/unshaped.toml with slower links.

    Args:
        mbit: that each link carries, each way. slow: that the last host's does, if less.
    """
    text = (ROOT / "lab" / "unshaped.toml").read_text().replace("10000", str(mbit))
    # The last table is the last host's.
    return text if slow is None else f"{text}up_mbit = {slow}\ndown_mbit = {slow}\n"


@contextmanager
def bench_lab(profile: str | None = None) -> Iterator[BenchLab]:
    """Make a lab in which the first host may log in to all; take it down whatever happens.

    Args:
        profile: as lab/tesla.toml; default: of hosts without limits.
    """
    profile = profile or unshaped()
    first = tomllib.loads(profile)["host"][0]
    subnet = str(ip_interface(first["address"]).network)
    made = BenchLab(f"bench{os.getpid()}", first["name"], subnet)
    for number in (signal.SIGTERM, signal.SIGINT):  # also where a shell's & has them ignored
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    spinning = None
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(profile)
            file.flush()
            made.do("up", "--profile", file.name)
        made.do("exec", made.head, "--", "bash", stdin=_KEYS)
        spinning = subprocess.Popen([sys.executable, ROOT / "lab" / "lab_awake.py"])
        yield made
    finally:
        if spinning:
            spinning.kill()
            spinning.wait()
        made.do("down")
