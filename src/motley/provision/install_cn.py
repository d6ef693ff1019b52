"""Make the same Python environment, with the same versions, on every host of hosts.txt.

The environment is at the same path on all hosts.

  bash setup/install_cn.sh
  bash setup/install_cn.sh --dry-run            # prints the missing parts of each host
  bash setup/install_cn.sh --python-archive cpython-3.12-install_only.tar.gz
  .venv/bin/pip download uv -r .venv/requirements.lock -d wheels  # with a network
  bash setup/install_cn.sh --offline wheels     # hosts without one

All hosts get a copy of this machine's environment (setup/make_env.sh). The oldest GPU and the
lowest driver of all hosts decide the build of torch. If this machine has another build, the script
replaces it. Hosts that share this folder need nothing more. All other hosts get the files that git
tracks. A host whose Python is not the same 3.X gets a standalone Python, from the network or from
the archive of --python-archive. All these hosts then install, at once, the packages in
.venv/requirements.lock: 6 GB, which takes some minutes. At the end each host imports the packages
and runs a kernel. After an interruption, the same command continues. Only the repository's folder,
the environment and pip's cache are changed.

Options:
  --hostfile FILE   default: the repository's hosts.txt (command motley: the current folder's)
  --python-archive FILE   an install_only archive of python-build-standalone
                    for hosts that need a Python and have no network
  --offline FOLDER  install only the wheels in FOLDER. Without uv among them, pip is used
  --dry-run         print every change, do none

Exit status: 0 all hosts are ready, 1 some host is not, 2 nothing was begun.
"""

import argparse
import functools
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from motley.cluster.ssh import Remote, connect, run_on_all, split
from motley.errors import HostTrouble, MotleyError
from motley.provision.host_report import HostReport, probe_all, token_file
from motley.provision.setup_command import (
    PLACE,
    VENV,
    Parser,
    many,
    print_troubles,
    read_hostfile,
    run,
    run_python,
    table,
)
from motley.provision.sync_cn import differing, send, tracked_files
from motley.text import PINNED

PYPI = "PyPI's"


@dataclass(frozen=True)
class Build:
    """One build of the torch wheels for Linux.

    Attributes:
        name: name of the build's folder at https://download.pytorch.org/whl/. The constant PYPI for
            the build on PyPI.
        oldest: lowest CUDA compute capability for which the build has kernels.
        newest: highest CUDA compute capability for which the build has kernels.
        driver: lowest major version of the NVIDIA driver with which the build works.
        last: last release of torch with this build; empty if new releases still have this build.
    """

    name: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    driver: int
    last: str = ""


# The first build that fits is used: the one with the newest torch. Sources, read on 2026-11-25:
# - capabilities: "PyTorch CUDA Support Matrix" in pytorch's RELEASE.md, releases 2.11 to 2.14
#   (pytorch#164471, #175253, #182849, #197555), and torch.cuda.get_arch_list(). Kernels of one
#   major version run on all later minor ones: sm_60's on 6.1, sm_86's on 8.9, sm_120's on 12.1.
# - ends: cu118 with 2.7 (pytorch#147383), cu128 with 2.11 (#178665), cu126 with 2.14 (#190385).
#   A Maxwell, Pascal or Volta somewhere holds all hosts at 2.14.
# - drivers: CUDA's minor version compatibility, 11.x: 450, 12.x: 525, 13.x: 580
#   (https://docs.nvidia.com/deploy/cuda-compatibility/).
BUILDS = (
    Build(PYPI, (7, 5), (12, 1), 580),
    Build("cu126", (5, 0), (9, 0), 525, last="2.14"),
    Build("cu128", (7, 5), (12, 1), 525, last="2.11"),
    Build("cu118", (5, 0), (9, 0), 450, last="2.7"),
)

# nvidia-smi of drivers before 510 reports no compute capabilities, but names.
_FAMILIES = {
    "GTX 9": (5, 2), "GTX 10": (6, 1), "Tesla P4": (6, 1), "P100": (6, 0), "TITAN X": (6, 1),
    "V100": (7, 0), "TITAN V": (7, 0), "GTX 16": (7, 5), "RTX 20": (7, 5), "T4": (7, 5),
    "A100": (8, 0), "RTX 30": (8, 6), "RTX A": (8, 6), "RTX 40": (8, 9), "H100": (9, 0),
}  # fmt: skip


@dataclass(frozen=True)
class HostGpu:
    """The properties of a GPU that a torch build must fit. ``driver`` is like "535.183.01"."""

    host: str
    name: str
    capability: tuple[int, int] | None
    driver: str


def fits(build: Build, gpu: HostGpu) -> bool:
    """Return True if a build runs on a GPU. Treat a GPU of unknown capability as a new GPU."""
    capability = gpu.capability or get_capability(gpu.name)
    known = capability is None or build.oldest <= capability <= build.newest
    return known and int(gpu.driver.partition(".")[0]) >= build.driver


def get_capability(name: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU by its name; None for an unknown name."""
    result = [capability for part, capability in _FAMILIES.items() if part in name]
    return result[0] if result else None


def choose_build(gpus: Iterable[HostGpu], installed: str) -> tuple[str, str]:
    """Return the name of the torch build that runs on all GPUs, and the reason for the choice.

    Args:
        gpus: GPUs of all hosts.
        installed: torch's version on this machine, such as "2.9.1+cu126". If its build runs on all
            GPUs, this build is chosen.

    Raises:
        MotleyError: no build runs on all GPUs.
    """
    all_gpus = list(gpus)
    here = get_build(installed)
    if not all_gpus:
        return here, "no host has a GPU"
    fitting = [each for each in BUILDS if all(fits(each, gpu) for gpu in all_gpus)]
    if not fitting:
        raise MotleyError(
            "no build of torch supports the GPUs of all hosts "
            f"({'; '.join(map(describe_gpu, all_gpus))}). Remove the host with the oldest or the "
            "newest GPU from hosts.txt, or update the oldest driver"
        )
    best = next((each for each in fitting if each.name == here), fitting[0])
    limits = [gpu for gpu in all_gpus if not fits(BUILDS[0], gpu)] if best != BUILDS[0] else []
    why = f"for {describe_gpu(limits[0])}" if limits else "it runs on every GPU here"
    return best.name, why + (f"; torch {best.last} is its last version" if best.last else "")


def get_build(version: str) -> str:
    """Return the build of a torch version: cu126 for "2.9.1+cu126", PYPI for "2.15.0"."""
    return version.partition("+")[2] or PYPI


def describe_gpu(gpu: HostGpu) -> str:
    """Return a line such as ``ecetesla0: Tesla P4 (6.1), driver 535.183.01``."""
    capability = gpu.capability or get_capability(gpu.name)
    label = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
    return f"{gpu.host}: {gpu.name} ({label}), driver {gpu.driver}"


_VERIFY = "motley.provision.verify_env"
LOCK = VENV / "requirements.lock"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
# Folder on a host, used until its environment is complete.
STAGE = VENV.with_name(f"{VENV.name}-parcels")
INSTALL_S, VERIFY_S = 3600, 300
INSTALL_LIMIT_S = 7200  # seconds that make_env.sh may take on this machine
_printing = threading.Lock()


def main(words: Sequence[str]) -> int:
    """Install the missing parts on all hosts, check that they work, and return the exit code."""
    options = parse(words)
    hosts = [host.name for host in read_hostfile(options)]
    with token_file() as token:
        result = probe_all(hosts, token=token, limit=20)
    reports, troubles = split(result)
    if not reports:
        print_troubles(troubles)
        return 1
    choose_torch(reports.values(), options)
    print(table(("host", "Python", "environment"), [describe(each) for each in reports.values()]))

    work = functools.partial(prepare, reports=reports, options=options)
    ready, failed = split(run_on_all(reports, work, INSTALL_S))
    troubles |= failed
    if ready and not options.dry_run:
        print(f"importing the packages and running a kernel on {', '.join(ready)}")
        verified, failed = split(run_on_all(ready, verify, VERIFY_S))
        troubles |= failed
        if verified:
            rows = [(host, *each) for host, each in verified.items()]
            print(table(("host", "torch", "computes"), rows))
    print_troubles(troubles)
    if not troubles and not options.dry_run:
        print("\nall is well")
    return 1 if troubles else 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options, checked before any host is visited."""
    instead = f"create {VENV} on each host, and in it run: {VENV}/bin/pip install {PINNED}"
    parser = Parser("install_cn", __doc__, instead=instead)
    parser.add_argument("--python-archive", type=Path)
    parser.add_argument("--offline", type=Path)
    options = parser.read(words)
    if not LOCK.exists():
        raise MotleyError(f"{LOCK} is missing; set up this machine first: bash setup/make_env.sh")
    if options.python_archive and not options.python_archive.is_file():
        raise MotleyError(f"--python-archive {options.python_archive} is not a file")
    if options.offline:
        check_wheels(options.offline)
    return options


def check_wheels(folder: Path) -> None:
    """Raise MotleyError unless the folder has a wheel of every version of the lock file."""
    have = {tuple(_plain(part) for part in each.name.split("-")[:2]) for each in folder.glob("*")}
    lines = [line for line in LOCK.read_text().split() if "==" in line]
    missing = [line for line in lines if tuple(map(_plain, line.split("=="))) not in have]
    if missing:
        raise MotleyError(
            f"--offline {folder} lacks {len(missing)} of {len(lines)} packages "
            f"({', '.join(missing[:3])}{(', ...' if len(missing) > 3 else '')}). Download them on "
            f"a machine with a network: {VENV}/bin/pip download uv -r {LOCK} -d {folder}"
        )


def _plain(word: str) -> str:
    return re.sub(r"[-_.]+", "_", word.removesuffix(".tar.gz")).lower()


def choose_torch(reports: Iterable[HostReport], options: argparse.Namespace) -> None:
    """Print the build of torch that runs on all GPUs.

    If this machine has another build, install the printed build on this machine.
    """
    gpus = [
        HostGpu(report.host, device.name, device.capability, report.driver)
        for report in reports
        for device in report.devices
        if report.driver
    ]
    installed = importlib.metadata.version("torch")
    build, why = choose_build(gpus, installed)
    print(f"torch: {build} build, {why}; here is {installed}")
    if build == get_build(installed):
        return
    if options.offline or build == PYPI:
        raise MotleyError(
            f"torch {installed} of this machine does not run on all hosts ({why}). Before "
            f"you run this command again, make this machine's environment with the {build} build: "
            f"rm -rf {VENV}; bash setup/make_env.sh{('' if build == PYPI else f' --torch {build}')}"
        )
    command = ["bash", str(PLACE / "setup/make_env.sh"), "--torch", build]
    if options.dry_run:
        print(f"would run: {' '.join(command)}")
    elif not _ends_well(command):
        raise MotleyError(
            f"the {build} build could not be installed on this machine; the error is above"
        )


def _ends_well(command: Sequence[str]) -> bool:
    """Return True if a program ends with status 0. The program prints its own progress."""
    try:
        return subprocess.run(command, check=False, timeout=INSTALL_LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        hours = INSTALL_LIMIT_S / 3600
        raise MotleyError(
            f"{command[1]} did not end within {hours:.0f} h; check that the network and the disk "
            "answer, and run the same command again"
        ) from None


def describe(report: HostReport) -> tuple[str, str, str]:
    """Return a row of the table that is printed before the installation.

    The cells are the host's name, its Python and its environment.
    """
    if report.same_folder:
        where = "this machine" if report.here else "shares this folder"
        return report.host, report.environment or "-", where
    python = _find_python(report)
    newest = report.newest_python
    has = ".".join(map(str, newest.version)) if newest else "none"
    if not report.environment:
        return report.host, has if python else f"{has}, gets {PYTHON[6:]}", "none yet"
    return report.host, report.environment, "of its own"


def _find_python(report: HostReport) -> str | None:
    """Return the path of the host's Python with this machine's version 3.X; None without one."""
    same = [each.path for each in report.pythons if each.version[:2] == sys.version_info[:2]]
    return same[0] if same else None


def prepare(host: str, reports: dict[str, HostReport], options: argparse.Namespace) -> None:
    """Send the repository's files to a host, and install Python and packages on the host.

    Raises:
        HostTrouble: Python or a package could not be installed.
    """
    report = reports[host]
    if report.same_folder:
        if not report.environment:
            raise HostTrouble(
                "environment broken",
                f"{host} lacks the Python that the environment {VENV} needs "
                f"({report.broken or 'not found'})",
                f"make the environment again with a Python of its own: rm -rf {VENV}; bash "
                "setup/make_env.sh --own-python",
            )
        return
    with connect(host) as remote:
        if options.dry_run:
            missing = differing(remote, PLACE, tracked_files(), PLACE)
            print(f"{host}: would send {many(len(missing), 'file')}, then")
            print(f"{host}: would run: {shlex.join(make_env(report, options))}")
        else:
            bring(remote, report, options)


def make_env(report: HostReport, options: argparse.Namespace) -> list[str]:
    """Return the command that makes the environment on a host."""
    python = _find_python(report)
    words = ["env", f"MOTLEY_VENV={VENV}", f"PYTHON={python or PYTHON}", "bash",
             f"{PLACE}/setup/make_env.sh", "--lock", f"{STAGE}/{LOCK.name}"]  # fmt: skip
    if options.python_archive and not python:
        words += ["--python-archive", f"{STAGE}/{options.python_archive.name}"]
    if options.offline:
        words += ["--wheels", f"{STAGE}/wheels"]
    elif (build := get_build(importlib.metadata.version("torch"))) != PYPI:
        words += ["--torch", build]
    return words


def bring(remote: Remote, report: HostReport, options: argparse.Namespace) -> None:
    """Send the repository's files to a host, and run make_env.sh on the host."""

    def print_line(line: str) -> None:
        with _printing:
            print(f"{remote.host}: {line}")

    sent = send(remote, PLACE, tracked_files(), PLACE)
    print_line(f"{many(len(sent), 'file')} sent" if sent else "files are already the same")
    send(remote, VENV, [LOCK.name], STAGE)
    plain = make_env(report, argparse.Namespace(python_archive=None, offline=None))
    if "is current" in remote.run('"$@"', *plain, "--dry-run").output:
        print_line("environment is current")
        return
    if options.python_archive and not _find_python(report):
        send(remote, options.python_archive.parent, [options.python_archive.name], STAGE)
    if options.offline:
        wheels = sorted(each.name for each in options.offline.iterdir() if each.is_file())
        sent = send(remote, options.offline, wheels, STAGE / "wheels")
        print_line(f"{many(len(sent), 'wheel')} sent")
    done = remote.run('"$@"', *make_env(report, options), limit=INSTALL_S, on_line=print_line)
    if done.code != 0:
        lines = [line for line in done.errors.splitlines() if line.startswith("motley: ")]
        raise HostTrouble(
            "not installed",
            "; ".join(line.removeprefix("motley: ") for line in lines) or done.errors.strip(),
            "correct that, and run the same command again",
        )
    remote.run('rm -rf -- "$1"', STAGE, limit=INSTALL_S)


def verify(host: str) -> tuple[str, str]:
    """Import the packages and run a kernel on each device of a host.

    Returns:
        Two texts. The first is torch's version. The second lists each device's name, precision and
        TFLOP/s, separated by commas.

    Raises:
        HostTrouble: a package cannot be imported, or a kernel fails.
    """
    with connect(host) as remote:
        done = run_python(remote, _VERIFY, limit=VERIFY_S)
    lines = done.output.splitlines()
    if done.code != 0 or not lines:
        last = (done.errors.strip().splitlines() or ["no message"])[-1]
        raise HostTrouble(
            "computation failed",
            f"{host} fails the check of its environment: {last.removeprefix('motley: ')}",
            f"see its whole output with: ssh -- {host} {VENV}/bin/python -m {_VERIFY}",
        )
    result = json.loads(lines[-1])
    return result["torch"], ", ".join(result["kernels"])


if __name__ == "__main__":
    run(main)
