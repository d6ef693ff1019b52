"""A lab of hosts that reach each other by ssh, and jobs of one rank a host there."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs import processes_of, wait_until
from lab_door import Door, lab_up
from project import ROOT, venv

NAMES = ("still0", "still1", "still2")
FOURTH = "still3"  # of which few tests know
PROFILE = "".join(
    f'[[host]]\nname = "{name}"\naddress = "10.97.96.{number}/24"\n'
    for number, name in enumerate((*NAMES, FOURTH), 1)
)

# When mpirun looks after a cut cable: after Motley, as make_env.sh sets it, or before.
LATE, EARLY = (10, 5, 4), (5, 2, 3)

MARKS = (
    "motley.launch",
    "prte",
    "ssh -o BatchMode",
    "motley.membership.reaper",
)  # in their command lines

RUN = """
export PATH={venv}/bin:$PATH OMP_NUM_THREADS=1
cd {root} && {before} mpirun --host {hosts} -x MOTLEY_VENV -x OMP_NUM_THREADS \\
  --prtemca oob_tcp_keepalive_time {time} --prtemca oob_tcp_keepalive_intvl {interval} \\
  --prtemca oob_tcp_keepalive_probes {probes} ./entry_cn.sh {words} 2>&1 | cat >~/{name}.out
echo ${{PIPESTATUS[0]}}
"""


@contextlib.contextmanager
def still_lab() -> Iterator[Door]:
    """The lab, up."""
    with lab_up(PROFILE, keys=True) as door:
        yield door


class LabJob:
    """A job of the lab, one rank a host."""

    def __init__(
        self, lab: Door, name: str, keepalive: tuple[int, int, int], hosts: Sequence[str],
        words: str, begun: str, before: str = "",
    ) -> None:  # fmt: skip
        self.lab, self.home, self.name = lab, lab.home(NAMES[0]), name
        when = dict(zip(("time", "interval", "probes"), keepalive, strict=True))
        text = RUN.format(
            venv=venv(),
            root=ROOT,
            name=name,
            words=words,
            hosts=",".join(hosts),
            before=before,
            **when,
        )
        self.process = lab.start("exec", NAMES[0], "--", "bash", "-c", text)
        self.begun = self.home / begun

    def begin(self) -> "LabJob":
        """Wait for its first steps."""
        wait_until(self.begun.exists, 90)
        return self

    @property
    def said(self) -> list[str]:
        """Motley's own lines; mpirun writes zeros between its own."""
        text = (self.home / f"{self.name}.out").read_text(errors="replace").replace("\0", "")
        return [line for line in text.splitlines() if line.startswith("motley: ")]

    @property
    def faults(self) -> list[str]:
        """What was recorded."""
        path = self.home / f"{self.name}.faults"
        return path.read_text().splitlines() if path.exists() else []

    def wait(self, limit: float) -> int:
        """mpirun's status."""
        output, _ = self.process.communicate(timeout=limit)
        return int(output.splitlines()[-1])

    def left(self, host: str = "") -> list[int]:
        """What is left of it, on one host or on all."""
        user = self.home.stat().st_uid
        found = []
        for pid in (pid for mark in MARKS for pid in processes_of(mark)):
            with contextlib.suppress(FileNotFoundError):
                if Path(f"/proc/{pid}").stat().st_uid == user and host in ("", host_of(pid)):
                    found.append(pid)
        return found


def host_of(pid: int) -> str:
    """The lab's host that a process is on, as its kernel calls it."""
    uname = ["nsenter", "-t", str(pid), "-u", "uname", "-n"]
    return subprocess.run(uname, capture_output=True, text=True).stdout.strip()
