"""The faults of hosts, found in their reports, and the table of the connection test.

All functions are pure. A row of the table is a property, and a column is a host.
"""

import itertools
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from motley import ROOT
from motley.cluster.gpus import DeviceFacts
from motley.cluster.network import Network, choose_networks
from motley.errors import HostTrouble, MotleyError
from motley.plan.precision import best_precision
from motley.provision.host_report import HostReport
from motley.provision.setup_command import table
from motley.text import INSTALL_TORCH

CLOCK_S = 1.0  # records are merged by time; a step of a lab takes about a second
DISK_MIB = 1024  # a checkpoint of ViT-B/16 with its optimizer takes 1 GB
INODES = 1000
SHM_MIB = 64  # NCCL and data workers pass batches through it; Docker's default

# Files in which a login shell may print text, and a guard that prints it on terminals alone.
_GREETERS = {
    "tcsh": ("~/.tcshrc or ~/.cshrc", "if ($?prompt) echo hello"),
    "csh": ("~/.cshrc", "if ($?prompt) echo hello"),
    "zsh": ("~/.zshenv", "[[ -o interactive ]] && echo hello"),
    "fish": ("~/.config/fish/config.fish", "status is-interactive; and echo hello"),
    "bash": ("~/.bashrc", "case $- in *i*) echo hello ;; esac"),
}


@dataclass(frozen=True)
class Finding:
    """A fault of a host, or a note on it.

    Attributes:
        kind: name of the fault or note, one to three words.
        found: description of the fault or note.
        fix: action by which the user can remove the fault.
        wrong: True: a fault that puts training at risk. False: a note.
    """

    kind: str
    found: str
    fix: str
    wrong: bool = True

    def __str__(self) -> str:
        return f"{self.found}; {self.fix}"


@dataclass(frozen=True)
class Here:
    """The properties of this machine, with which the hosts are compared.

    Attributes:
        machine: CPU architecture, such as "x86_64".
        python: version of Python in this machine's environment.
        packages: versions of the packages in this machine's environment, by name.
        needed: normalized names of the packages that training needs.
        venv: path of the environment.
        root: path of the repository.
    """

    machine: str
    python: str
    packages: Mapping[str, str]
    needed: frozenset[str]
    venv: Path
    root: Path


def normal(name: str) -> str:
    """Return a package's name in the normalized form in which pip compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def differences(report: HostReport, here: Here) -> list[str]:
    """Return the packages whose version differs from this machine's, the most important first.

    An item is a text such as "torch 2.6.0 (here 2.7.0)".
    """
    ours = {normal(name): version for name, version in here.packages.items()}
    theirs = {normal(name): version for name, version in report.packages.items()}
    names = here.needed | {name for name in ours | theirs if name.startswith("nvidia-")}
    ours["python"], theirs["python"] = here.python, report.environment or "none"
    return [
        f"{name} {theirs.get(name, 'absent')} (here {ours.get(name, 'absent')})"
        for name in sorted({*names, "python"}, key=lambda n: (n != "torch", "nccl" not in n, n))
        if theirs.get(name) != ours.get(name)
    ]


def judge(report: HostReport, slots: int, here: Here) -> Iterator[Finding]:
    """Yield all faults of one host, and all notes on it."""
    yield from judge_machine(report, here)
    yield from judge_environment(report, here)
    yield from judge_clock(report)
    yield from judge_room(report)
    yield from judge_login(report)
    yield from judge_gpus(report, slots)


def judge_machine(report: HostReport, here: Here) -> Iterator[Finding]:
    """Yield a Finding for another CPU architecture, and for a missing repository."""
    if report.machine not in (None, here.machine):
        yield Finding(
            "architecture",
            f"its processor is {report.machine}, and this machine's is {here.machine}",
            "remove the host from hosts.txt, since no package runs on both",
        )
    if not report.repository and ROOT:
        yield Finding(
            "no repository",
            f"{here.root} is not there",
            "copy it with: bash setup/sync_cn.sh",
        )
    elif not report.repository:
        yield Finding(
            "no folder",
            f"it lacks the folder {here.root}, in which ranks start and write logs/",
            f"create it with: ssh -- {report.host} mkdir -p {shlex.quote(str(here.root))}",
        )


def judge_environment(report: HostReport, here: Here) -> Iterator[Finding]:
    """Yield a Finding for each difference between the host's Python environment and this machine's.

    All ranks need the same versions of packages, at the same path.
    """
    if report.broken is not None:
        yield Finding(
            "environment broken",
            f"the environment at {here.venv} does not work: {report.broken}",
            "make it again with: bash setup/install_cn.sh",
        )
    elif report.environment is None:
        yield Finding(
            "environment absent",
            f"it lacks the environment {here.venv}, which this machine has",
            "make it with: bash setup/install_cn.sh",
        )
    elif differing := differences(report, here):
        more = f" and {len(differing) - 6} more" if len(differing) > 6 else ""
        yield Finding(
            "versions differ",
            "the versions of its environment differ from this machine's: "
            f"{', '.join(differing[:6])}{more}",
            "ranks with different versions hang or compute different values; install the same "
            "versions with: bash setup/install_cn.sh",
        )


def judge_clock(report: HostReport) -> Iterator[Finding]:
    """Yield a Finding if the host's clock is wrong by more than the error of the measurement."""
    if report.clock_offset_s is None or report.clock_doubt_s is None:
        return
    if abs(report.clock_offset_s) > CLOCK_S + report.clock_doubt_s:
        way = "ahead of" if report.clock_offset_s > 0 else "behind"
        yield Finding(
            "clock off",
            f"its clock is {abs(report.clock_offset_s):,.1f} s {way} this machine's "
            f"(+- {report.clock_doubt_s:.1f} s)",
            "the records of all hosts are merged by time, and make compares the times of files; "
            "ask its administrator to set the clock, best by NTP (timedatectl set-ntp true)",
        )


def judge_room(report: HostReport) -> Iterator[Finding]:
    """Yield a Finding for each full place: the repository's disk, the home, or /dev/shm."""
    place, free = report.place, report.disk_free_mib
    if _full(report.place_write) or (free is not None and free < DISK_MIB):
        remaining = "" if free is None else f", {free:,.0f} MiB are free"
        why = f" ({report.place_write})" if _full(report.place_write) else ""
        yield Finding(
            "disk full",
            f"the disk of {place} is full or nearly{remaining}{why}",
            "a checkpoint takes about 1 GB; free some space, or ask your administrator for a "
            "larger quota",
        )
    elif report.disk_free_inodes is not None and report.disk_free_inodes < INODES:
        yield Finding(
            "disk full",
            f"the disk of {place} has inodes for only {report.disk_free_inodes} more files",
            "remove small files there (df -i, du --inodes)",
        )
    elif report.place_write not in (None, "yes"):
        yield Finding(
            "not ours to write",
            f"you may not write to {place} ({report.place_write})",
            "choose a folder that you may write to with --logs DIR",
            wrong=False,
        )
    if report.home_write not in (None, "yes"):
        fix = {
            "Permission denied": "ask its administrator to give it to you (chown)",
            "Read-only file system": "ask its administrator to mount it writable (mount, dmesg)",
            "No such file or directory": "ask its administrator to create it",
            "HOME is not set": "set it in the login shell of that host, or ask its administrator "
            "to add your user number to the list of users (getent passwd)",
        }.get(report.home_write, "free some space, or ask for a larger quota")
        yield Finding(
            "disk full" if _full(report.home_write) else "home not writable",
            f"no file can be written to your home {report.home or 'folder'} ({report.home_write})",
            f"MPI and ssh keep files in it: {fix}",
        )
    if report.temporary_write not in (None, "yes"):
        yield Finding(
            "disk full" if _full(report.temporary_write) else "temporary folder not writable",
            f"no file can be written to {report.temporary} ({report.temporary_write})",
            "MPI keeps files in it; free some space (df -h, df -i), or set TMPDIR in the login "
            "shell of that host to a folder that you can write to",
        )
    if report.shm_total_mib is not None and report.shm_total_mib < SHM_MIB:
        yield Finding(
            "/dev/shm small",
            f"/dev/shm has {report.shm_total_mib:,.0f} MiB",
            f"data workers and NCCL pass batches through it, and need {SHM_MIB} MiB or more; ask "
            "its administrator to enlarge it (mount -o remount,size=50% /dev/shm)",
        )


def _full(writing: str | None) -> bool:
    return writing is not None and ("space left" in writing or "quota" in writing.lower())


def judge_login(report: HostReport) -> Iterator[Finding]:
    """Yield a Finding if the login shell prints text to a program that runs a command by ssh."""
    if report.chatter.strip():
        shell = Path(report.shell or "bash").name
        files, guard = _GREETERS.get(shell, _GREETERS["bash"])
        first = report.chatter.strip().splitlines()[0][:60]
        yield Finding(
            "chatty login",
            f"its login shell, {shell}, prints text even to programs ({first!r})",
            f"scp, rsync and MPI read that text as data; find where it is printed in {files}, "
            f"and print it only to people: {guard}",
        )


def judge_gpus(report: HostReport, slots: int) -> Iterator[Finding]:
    """Yield a Finding for each unusable GPU, and for slots without a GPU."""
    if report.gpu_error:
        yield Finding(
            "driver fails",
            f"nvidia-smi is there and fails: {report.gpu_error}",
            "ask its administrator to reboot it or to reinstall the driver",
        )
    elif report.devices and len(report.devices) < slots:
        yield Finding(
            "fewer GPUs",
            f"hosts.txt gives it {slots} slots, and it has only {len(report.devices)} GPUs",
            "the ranks without a GPU are left out; lower its slots",
            wrong=False,
        )
    # CUDA 13, and builds of torch for it, have no code for GPUs older than Turing.
    if any(normal(name).endswith("-cu13") for name in report.packages):
        old = [each for each in report.devices if each.capability and each.capability < (7, 5)]
        for each in old:
            assert each.capability
            yield Finding(
                "torch too new",
                f"its torch is built for CUDA 13, which does not support the {each.name} "
                f"(compute capability {each.capability[0]}.{each.capability[1]})",
                "choose a build that supports the oldest GPU with: "
                + ("bash setup/install_cn.sh" if ROOT else INSTALL_TORCH),
            )


def judge_networks(
    reports: Iterable[HostReport],
) -> tuple[Mapping[str, Network], Finding | None]:
    """Return each host's address on the shared subnet, and a Finding if no subnet is shared."""
    result = list(reports)
    names = {number: report.host for number, report in enumerate(result)}
    machines = {number: report.interfaces for number, report in enumerate(result)}
    if len(machines) < 2:
        return {}, None
    try:
        networks = choose_networks(machines, names, {})
    except MotleyError as error:
        cause, _, fix = str(error).rpartition("; ")
        return {}, Finding("no shared subnet", cause, fix)
    return {names[number]: network for number, network in networks.items()}, None


def grouped(findings: Mapping[str, Iterable[Finding]]) -> dict[Finding, list[str]]:
    """Return the hosts that have each Finding, so that a fault of many hosts is printed once."""
    groups: dict[Finding, list[str]] = {}
    for host, each in findings.items():
        for finding in each:
            groups.setdefault(finding, []).append(host)
    return groups


_CELL = 24  # characters; longer text is wrapped
_GAP = 2


def show(
    results: Mapping[str, HostReport | HostTrouble],
    findings: Mapping[str, Iterable[Finding]],
    networks: Mapping[str, Network],
    here: Here,
    width: int,
) -> str:
    """Return the tables of all hosts as a text whose lines have at most ``width`` characters."""
    columns: dict[str, dict[str, list[str]]] = {}
    for host, result in results.items():
        if isinstance(result, HostTrouble):
            row = {"reached": "no", "verdict": result.kind}
        else:
            kinds = [finding.kind for finding in findings.get(host, ()) if finding.wrong]
            row = describe(result, networks.get(host), here)
            row["verdict"] = ", ".join(kinds) or "well"
        columns[host] = {label: _wrap(cell) for label, cell in row.items()}
    labels = list(dict.fromkeys(label for cells in columns.values() for label in cells))
    # A property that no host has needs no row, such as the capability where no host has a GPU.
    labels = [label for label in labels if any(cells.get(label) for cells in columns.values())]
    labels.sort(key=lambda label: label == "verdict")  # the last, whichever host was first
    room = width - max(map(len, labels))
    blocks: list[list[str]] = [[]]
    remaining = room
    for host, cells in columns.items():
        need = _GAP + max(map(len, [host, *itertools.chain.from_iterable(cells.values())]))
        if need > remaining and blocks[-1]:
            blocks.append([])
            remaining = room
        blocks[-1].append(host)
        remaining -= need
    return "\n\n".join(_block(hosts, labels, columns) for hosts in blocks)


def _wrap(cell: str) -> list[str]:
    return textwrap.wrap(cell, _CELL, break_on_hyphens=False)


def _block(
    hosts: list[str], labels: list[str], columns: Mapping[str, Mapping[str, list[str]]]
) -> str:
    rows = []
    for label in labels:
        cells = [columns[host].get(label, []) or [""] for host in hosts]
        for number, lines in enumerate(itertools.zip_longest(*cells, fillvalue=" ")):
            rows.append(["" if number else label, *lines])
    # An empty label is no unknown value.
    return table(["host", *hosts], [[row[0] or " ", *row[1:]] for row in rows])


def describe(report: HostReport, network: Network | None, here: Here) -> dict[str, str]:
    """Return one host's column of the table, by the label of the row. Empty text: unknown."""
    first, newest = next(iter(report.pythons), None), report.newest_python
    python = first or newest
    unfit = "" if first else " (too old)" if newest and newest.version < (3, 11) else " (no venv)"
    speed = None if network is None else report.speeds.get(network.interface)
    return {
        "reached": "yes (this machine)" if report.here else "yes",
        "login shell": Path(report.shell or "").name,
        "clock": _clock(report),
        "CPU": _cpu(report),
        "memory free": _format_share(report.memory_free_mib, report.memory_total_mib),
        "/dev/shm free": _format_share(report.shm_free_mib, report.shm_total_mib),
        "disk free": _format_share(report.disk_free_mib, report.disk_total_mib),
        "Python": ".".join(map(str, python.version)) + unfit if python else "none",
        "repository" if ROOT else "this folder": _repository(report),
        "environment": _environment(report, here),
        "GPU": _join_values(report, lambda gpu: gpu.name) or "none",
        "capability": _join_values(report, _capability),
        "memory node": _join_values(report, _memory_node) if _are_apart(report) else "",
        "driver": report.driver or ("fails" if report.gpu_error else "none"),
        "GPU memory free": _join_values(report, _memory),
        "precision": _join_values(report, _precision) or " ".join(_reasoned(None)),
        "interface": network.interface if network else "",
        "address": network.address if network else "",
        "link": "" if speed is None else f"{speed:,} Mbit/s",
        "InfiniBand": "yes" if report.infiniband else "no",
        "ssh to next": {None: "", True: "yes", False: "no (not needed)"}[report.next_ssh],
    }


def _clock(report: HostReport) -> str:
    if report.here or report.clock_offset_s is None:
        return ""
    return f"{report.clock_offset_s:+.2f} s (+- {report.clock_doubt_s:.2f})"


def _cpu(report: HostReport) -> str:
    name = (report.cpu or "").partition("@")[0]
    for noise in ("(R)", "(TM)", "CPU", "Processor"):
        name = name.replace(noise, "")
    return f"{report.cores or '?'} x {' '.join(name.split()) or '?'}"


def _format_share(free: float | None, total: float | None) -> str:
    if free is None or total is None:
        return ""
    if total >= 10240:
        return f"{free / 1024:,.1f} of {total / 1024:,.1f} GiB"
    return f"{free:,.0f} of {total:,.0f} MiB"


def _repository(report: HostReport) -> str:
    if not report.repository:
        return "absent"
    return {True: "the same folder", False: "a copy", None: "same or a copy"}[report.same_folder]


def _environment(report: HostReport, here: Here) -> str:
    if report.broken is not None:
        return "broken"
    if report.environment is None:
        return "absent"
    names = [each.split()[0] for each in differences(report, here)]
    if not names:
        return "same versions"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"differs: {', '.join(names[:3])}{more}"


def _join_values(report: HostReport, say: Callable[[DeviceFacts], str]) -> str:
    """Return a property of a host's GPUs as a text; if the GPUs differ, with one value for each."""
    values = [say(gpu) for gpu in report.devices]
    if len(set(values)) == 1:
        return f"{len(values)} x {values[0]}" if len(values) > 1 else values[0]
    return ", ".join(f"{gpu.index}: {say(gpu)}" for gpu in report.devices)


def _are_apart(report: HostReport) -> bool:
    """Return True if the host's GPUs are known to be attached to different NUMA nodes."""
    return len({gpu.memory_node for gpu in report.devices}) > 1


def _memory_node(gpu: DeviceFacts) -> str:
    return "?" if gpu.memory_node is None else str(gpu.memory_node)


def _capability(gpu: DeviceFacts) -> str:
    return "{}.{}".format(*gpu.capability) if gpu.capability else "?"


def _precision(gpu: DeviceFacts) -> str:
    return " ".join(_reasoned(gpu.capability)) if gpu.capability else "?"


def _reasoned(capability: tuple[int, int] | None) -> tuple[str, str]:
    name, reason = best_precision(capability)
    return name, f"({reason})"


def _memory(gpu: DeviceFacts) -> str:
    if gpu.memory_total_mib is None or gpu.memory_used_mib is None:
        return "?"
    text = f"{gpu.memory_total_mib - gpu.memory_used_mib:,.0f} of {gpu.memory_total_mib:,.0f} MiB"
    if not gpu.others:
        return text
    held = "?" if gpu.others_mib is None else f"{gpu.others_mib:,.0f} MiB"
    return f"{text}; {held} held by {', '.join(gpu.others)}"
