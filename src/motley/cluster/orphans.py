"""The training processes of this user on this machine, and their leftovers of ended jobs.

python -m motley.cluster.orphans                     # print all processes as one line of JSON
python -m motley.cluster.orphans --end 4711:88231    # end process 4711, if it started at tick 88231
"""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from motley import ROOT
from motley.cluster.gpus import GpuProcess, read_gpu_processes
from motley.cluster.launcher import MPIRUN, RANKS, read_launch
from motley.cluster.processes import end, ticks

_MPIRUN = MPIRUN | {"prte"}
_DAEMONS = {"prted", "orted", "slurmstepd"}
# Open MPI 5 names a job after the host and the pid of its mpirun. Open MPI 4.1 and Slurm do not.
# There a rank is recognised by the daemon that is its parent.
_JOB = re.compile(r"\b(?:prterun|prte)-([\w.-]+)-(\d+)@")
_BEGIN = "motley.launch"  # the module that entry_cn.sh runs
_COMMAND = "motley.cli"
_NAMES = ("PMIX_NAMESPACE", "SLURM_JOB_ID")


@dataclass(frozen=True)
class TrainingProcess:
    """A process of this user that belongs to training.

    Attributes:
        pid: process id.
        ticks: start time of the process, in clock ticks since boot. pids are used again, so pid and
            ticks together identify a process.
        age_s: seconds since the process started.
        description: text for the user, such as "rank 3: torch_dist/train_vit.py --run a".
        kind: ``rank``, ``daemon`` or ``mpirun``.
        workers: pid and ticks of each data-loader process of a rank.
        gpu_mib: GPU memory of the process and its workers, MiB; None if no driver reports it.
        head: host and pid of the mpirun that started the process; None if unknown.
        launched: True if a launcher started the process.
        held: True if a launcher is among the living ancestors of the process.
        orphan: True if the parent of the process has ended.
        job: for a rank, the launcher's name for the job.
        size: for a rank, the number of ranks of the job.
    """

    pid: int
    ticks: int
    age_s: float
    description: str
    kind: str
    workers: tuple[tuple[int, int], ...]
    gpu_mib: float | None
    head: tuple[str, int] | None
    launched: bool
    held: bool
    orphan: bool
    job: str = ""
    size: int = 1


@dataclass(frozen=True)
class Survey:
    """The training processes of one machine.

    Attributes:
        node: host name of the machine.
        processes: this user's training processes.
        mpiruns: pids of all mpirun processes of this user.
        others: other processes that hold GPU memory.
    """

    node: str
    processes: tuple[TrainingProcess, ...]
    mpiruns: tuple[int, ...]
    others: tuple[GpuProcess, ...]


def state(process: TrainingProcess, mpiruns: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return the state of a process: ``running``, ``leftover`` or ``unknown``.

    A process is a leftover if the process that started it has ended.

    Args:
        process: the process.
        mpiruns: name of each surveyed machine, with the pids of this user's mpirun processes on it.
    """
    if process.kind == "mpirun":
        return "running"
    if process.head is not None:
        host, pid = process.head
        short = host.partition(".")[0]
        known = [pids for node, pids in mpiruns if node.partition(".")[0] == short]
        if known:  # several, if two machines have the same name
            return "running" if any(pid in pids for pids in known) else "leftover"
        # Daemons of other hosts have no parent in any case.
        return "leftover" if process.kind == "rank" and process.orphan else "unknown"
    if process.held:
        return "running"
    if process.launched:
        return "leftover"
    return "unknown" if process.orphan else "running"  # started by hand


def survey() -> Survey:
    """Return this user's training processes on this machine."""
    gpu = read_gpu_processes()
    own = _own_processes()
    ranks = {pid for pid, each in own.items() if _line(each) is not None}
    workers: dict[int, list[int]] = {}
    for pid in own:
        above = [up for up in _ancestors(pid, own) if up in ranks]
        if above:
            workers.setdefault(above[-1], []).append(pid)
    result = []
    for pid, each in own.items():
        below = workers.get(pid, [])
        if pid in ranks and not any(pid in group for group in workers.values()):
            result.append(_describe(each, "rank", [own[worker] for worker in below], own, gpu))
        elif each["name"] in _MPIRUN | _DAEMONS and _is_own_launcher(pid, each, ranks, own):
            kind = "mpirun" if each["name"] in _MPIRUN else "daemon"
            result.append(_describe(each, kind, [], own, gpu))
    listed = {pid for each in result for pid in (each.pid, *(worker for worker, _ in each.workers))}
    return Survey(
        node=socket.gethostname(),
        processes=tuple(result),
        mpiruns=tuple(pid for pid, each in own.items() if each["name"] in _MPIRUN),
        others=tuple(each for each in gpu or () if each.pid not in listed),
    )


def _own_processes() -> dict[int, dict[str, Any]]:
    """Return the facts about each process of this user, by pid."""
    wanted = ["pid", "ppid", "name", "exe", "cmdline", "cwd", "environ", "create_time", "status"]
    result = {}
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid() and process.pid != os.getpid():
                known = process.as_dict(wanted)
                if known["status"] != psutil.STATUS_ZOMBIE:
                    result[process.pid] = {**known, "ticks": ticks(process.pid)}
        except (psutil.Error, OSError):  # the process has ended
            continue
    return result


def _line(each: Mapping[str, Any]) -> list[str] | None:
    """Return the words of a rank's command line; None for a process that is no rank.

    A rank runs a script of this repository, started by entry_cn.sh, or the command ``motley``.
    Without a clone of the repository, a rank is any script that the Python of this environment
    runs.
    """
    words = each["cmdline"] or []
    for at in range(len(words) - 2):
        if words[at : at + 4] == ["-m", _BEGIN, "-m", _COMMAND]:
            return ["motley", *words[at + 4 :]]
        if words[at : at + 2] == ["-m", _BEGIN]:
            if not ROOT:  # without a clone: any script that this environment's Python runs
                own = Path(words[0]).is_relative_to(sys.prefix)
                return words[at + 2 :] if own else None
            path = (Path(each["cwd"] or "/") / words[at + 2]).resolve()
            own = path.is_relative_to(ROOT)
            return [str(path.relative_to(ROOT)), *words[at + 3 :]] if own else None
    return None


def _ancestors(pid: int, own: Mapping[int, Mapping[str, Any]]) -> Iterator[int]:
    """Yield the pids of a process's ancestors that belong to this user, the parent first."""
    while (pid := own[pid]["ppid"]) in own:
        yield pid


def _is_own_launcher(
    pid: int, each: Mapping[str, Any], ranks: set[int], own: Mapping[int, Mapping[str, Any]]
) -> bool:
    """Return True for a launcher of this environment, or a launcher of one of the ranks."""
    return Path(each["exe"] or "/").is_relative_to(sys.prefix) or any(
        pid in _ancestors(rank, own) for rank in ranks
    )


def _describe(
    each: Mapping[str, Any],
    kind: str,
    workers: list[dict[str, Any]],
    own: Mapping[int, Mapping[str, Any]],
    gpu: Sequence[GpuProcess] | None,
) -> TrainingProcess:
    environ = each["environ"] or {}
    pids = [each["pid"], *(worker["pid"] for worker in workers)]
    held = [None] if gpu is None else [process.mib for process in gpu if process.pid in pids]
    # A daemon has its job in its command line, a rank in a variable.
    job = _JOB.search(
        environ.get("PMIX_NAMESPACE", "") if kind == "rank" else " ".join(each["cmdline"])
    )
    launch, launched = read_launch(environ), any(name in environ for name in RANKS)
    line = _line(each)
    if line is None:
        what = str(each["name"])
    else:
        what = f"rank {launch.rank}: {' '.join(line)}" if launched else " ".join(line)
    return TrainingProcess(
        pid=each["pid"],
        ticks=each["ticks"],
        age_s=max(0.0, time.time() - each["create_time"]),
        description=what,
        kind=kind,
        workers=tuple((worker["pid"], worker["ticks"]) for worker in workers),
        gpu_mib=None if None in held else sum(mib or 0 for mib in held),
        head=(job[1], int(job[2])) if job else None,
        launched=launched,
        held=_held(each["pid"], own),
        orphan=_is_orphan(each["ppid"]),
        job=next((environ[name] for name in _NAMES if name in environ), ""),
        size=launch.size,
    )


def _held(pid: int, own: Mapping[int, Mapping[str, Any]]) -> bool:
    above = [pid, *_ancestors(pid, own)]
    parents = (_name(own[up]["ppid"]) for up in above)  # root owns slurmstepd
    return any(name in _MPIRUN | _DAEMONS for name in parents)


def _is_orphan(parent: int) -> bool:
    # 0 is a parent outside of this container.
    return parent == 1 or _name(parent) == "systemd"  # the user's systemd adopts orphans


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def survey_from_json(text: str) -> Survey:
    """Return the survey that ``python -m motley.cluster.orphans`` has printed.

    Raises:
        ValueError, KeyError or TypeError: the text is no survey.
    """
    fields = json.loads(text)
    result = tuple(
        TrainingProcess(
            **{
                **each,
                "workers": tuple((int(pid), int(start)) for pid, start in each["workers"]),
                "head": (str(each["head"][0]), int(each["head"][1])) if each["head"] else None,
            }
        )
        for each in fields["processes"]
    )
    others = tuple(GpuProcess(**each) for each in fields["others"])
    return Survey(fields["node"], result, tuple(fields["mpiruns"]), others)


def main(words: Sequence[str]) -> None:
    """Print a survey as JSON, or end the processes of ``--end PID:TICKS ...``."""
    if words[:1] == ["--end"]:
        pairs = [word.split(":") for word in words[1:]]
        print(json.dumps(end([(int(pid), int(start)) for pid, start in pairs])))
    else:
        print(json.dumps(asdict(survey())))


if __name__ == "__main__":
    main(sys.argv[1:])
