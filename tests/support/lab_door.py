"""What the tests of the lab share: its door, and what there is of it on this machine."""

import os
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import Done
from project import LIMIT_S, ROOT, copy_repository, environment, venv

TESLA = ROOT / "lab" / "tesla.toml"
PRIVATE = ROOT / "lab" / "private.toml"
NAMES = [f"ecetesla{number}" for number in range(5)]

# Two hosts with little of everything.
SMALL = """
[defaults]
cpus = 0.3
memory_mib = 96
shm_mib = 8
[[host]]
name = "small1"
address = "10.97.95.1/24"
[[host]]
name = "small2"
address = "10.97.95.2/24"
shell = "tcsh"
"""

_KEYS = """
set -e
mkdir -p -m 700 .ssh
ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519
ssh-keyscan -t ed25519 $(cut -d ' ' -f 1 hosts.txt) >.ssh/known_hosts 2>/dev/null
"""


def need_root() -> None:
    """Skip without root; with CI=true that is a failure."""
    if os.geteuid() != 0:
        message = "not root, so the lab is not tried"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


@dataclass(frozen=True)
class Door:
    """lab/lab.sh for one lab."""

    name: str

    def start(self, *words: object) -> subprocess.Popen[str]:
        """A command of lab.sh, not waited for; what follows ``--`` goes last."""
        given = [str(word) for word in words]
        at = given.index("--") if "--" in given else len(given)
        return subprocess.Popen(
            ["bash", "lab/lab.sh", *given[:at], "--name", self.name, *given[at:]],
            cwd=ROOT, env=environment(MOTLEY_VENV=str(venv())), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *words: object, stdin: str = "", limit: float = LIMIT_S) -> Done:
        """The same, waited for."""
        start = time.monotonic()
        job = self.start(*words)
        try:
            output, _ = job.communicate(stdin, timeout=limit)
        finally:
            job.kill()
        return Done(job.returncode, output, time.monotonic() - start)

    def do(self, *words: object, stdin: str = "", limit: float = LIMIT_S) -> str:
        """The same, which must succeed; its output."""
        done = self.run(*words, stdin=stdin, limit=limit)
        assert done.code == 0, done.output
        return done.output.strip()

    def on(self, host: str, *command: object, **options: str) -> str:
        """A command on a host, as the lab's user."""
        return self.do("exec", host, "--", *command, **options)

    def states(self) -> dict[str, str]:
        """The last column of the status table."""
        rows = self.do("status").splitlines()[2:]
        return {re.split(r"\s{2,}", row)[0]: re.split(r"\s{2,}", row)[-1] for row in rows}

    def home(self, host: str) -> Path:
        """Where the machine has the home of the lab's user on a host."""
        homes = Path("/var/lib/motley-lab", self.name, "homes")
        return next((homes / host if (homes / host).exists() else homes / "shared").iterdir())

    def give(self, host: str, source: Path, name: str) -> None:
        """Copy a file or folder into the user's home on a host."""
        home = self.home(host)
        subprocess.run(["cp", "-rL", source, home / name], check=True)
        owner = home.stat().st_uid
        subprocess.run(["chown", "-Rh", f"{owner}:{owner}", home / name], check=True)

    def give_repository(self, host: str) -> None:
        """Copy this repository into the user's home on a host, as ``motley``."""
        with tempfile.TemporaryDirectory() as folder:
            copy_repository(Path(folder))
            self.give(host, Path(folder), "motley")

    def give_keys(self) -> None:
        """Let the user log in from the first host to all, without a password."""
        hosts = list(self.states())
        home = self.home(hosts[0])
        self.on(hosts[0], "bash", stdin=_KEYS)
        key = (home / ".ssh" / "id_ed25519.pub").read_text().strip()
        let_in = f"mkdir -p -m 700 .ssh; echo '{key}' >>.ssh/authorized_keys"
        homes = hosts if self.home(hosts[-1]) != home else hosts[:1]
        jobs = [self.start("exec", host, "--", "sh", "-c", let_in) for host in homes]
        assert [job.wait(20) for job in jobs] == [0] * len(jobs)

    def password(self) -> str:
        """The lab's user's, on all hosts."""
        return re.findall(r"password (\w+)", self.do("status"))[0]

    def processes(self) -> list[int]:
        """Its processes, by the mark that they carry."""
        mark = f"MOTLEY_LAB={self.name}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found


@contextmanager
def new_door() -> Iterator[Door]:
    """A lab with a name of its own, not up yet; taken down whatever happens."""
    need_root()
    made = Door(f"t{secrets.token_hex(4)}")
    try:
        yield made
    finally:
        made.run("down")


@contextmanager
def lab_up(profile: Path | str, *, keys: bool = False) -> Iterator[Door]:
    """A lab that is up.

    Args:
        profile: a file, or the text of one.
        keys: the user may log in from the first host to all.
    """
    with tempfile.TemporaryDirectory() as folder, new_door() as made:
        if isinstance(profile, str):
            text, profile = profile, Path(folder, "profile.toml")
            profile.write_text(text)
        made.do("up", "--profile", profile)
        if keys:
            made.give_keys()
        yield made


def machine() -> dict[str, object]:
    """What of this machine no lab may change."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    return {
        "accounts": [Path("/etc", name).read_text() for name in ("passwd", "shadow", "group")],
        "mounts": Path("/proc/self/mounts").read_text(),
        "interfaces": re.findall(r"^\d+: ([^:@]+)", links.stdout, re.MULTILINE),
    }


def namespaces(pids: list[int] | None = None) -> set[str]:
    """Namespaces of these processes, or of all that there are."""
    folders = Path("/proc").glob("[0-9]*") if pids is None else [Path(f"/proc/{p}") for p in pids]
    found = set()
    for folder in folders:
        for kind in ("net", "mnt", "uts", "ipc", "pid_for_children"):
            try:
                found.add(str((folder / "ns" / kind).readlink()))
            except OSError:
                continue
    return found


def left_of(door: Door) -> list[object]:
    """All that is there of a lab that should be gone."""
    cgroups = [p for p in Path("/sys/fs/cgroup").rglob(f"*{door.name}*") if p.is_dir()]
    folder = Path("/var/lib/motley-lab", door.name)
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    named = [line for line in mounts if door.name in line]
    return [*door.processes(), *cgroups, *([folder] if folder.exists() else []), *named]
