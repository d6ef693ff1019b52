"""Ask every host of hosts.txt, at once and within 10 s, if it is ready to train.

The script prints a table with the properties of each host, and every fault with its fix.

  bash setup/test_cn_connection.sh
  bash setup/test_cn_connection.sh --hostfile my_hosts.txt
  bash setup/test_cn_connection.sh --json > lab.json

Nothing stays changed. On each host, the script writes one small file to the
repository's folder and one to your home, to see if that works, and removes both
at once.

Options:
  --hostfile FILE   default: the repository's hosts.txt (command motley: the current folder's)
  --json            print one JSON object instead of the table, as shown below
  --dry-run         print which hosts would be asked, and ask none

Exit status: 0 all hosts are ready, 1 some host is not, 2 no host was asked.

In the JSON object, "hosts" has an entry for each host. The entry is the host's
fault ("trouble"), or the fields of motley.provision.host_report.HostReport,
where null means unknown. "findings" lists faults and notes. A note has "wrong":
false:

  {"well": false,
   "hosts": {"ecetesla0": {"trouble": null, "node": "ecetesla0", "cores": 8, ...},
             "ecetesla1": {"trouble": {"kind": "no answer", "found": "..."}}},
   "findings": [{"hosts": ["ecetesla0"], "kind": "disk full", "found": "...",
                 "fix": "...", "wrong": true}]}
"""

import contextlib
import json
import os
import platform
import re
import shlex
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import Distribution, distributions, requires
from pathlib import Path

from motley import ROOT
from motley.cluster.account import home_folder
from motley.cluster.login import read_login
from motley.cluster.network import Network
from motley.cluster.ssh import split
from motley.errors import HostTrouble, MotleyError
from motley.provision import setup_command
from motley.provision.connection_report import (
    Finding,
    Here,
    grouped,
    judge,
    judge_networks,
    normal,
    show,
)
from motley.provision.host_report import HostReport, probe_all, token_file
from motley.provision.mpi_network import try_networks
from motley.provision.setup_command import PLACE
from motley.text import typed_command

_HERE = "this machine"
LIMIT_S = 8.8  # 10 s without the start of Python


def this_machine() -> Here:
    """Return this machine's properties, with which the hosts are compared."""
    # setuptools puts packages of its own on the path, which no user installed.
    path = [folder for folder in sys.path if not folder.endswith("_vendor")]
    installed = {normal(each.metadata["Name"]): each for each in distributions(path=path)}
    return Here(
        machine=platform.machine(),
        python=platform.python_version(),
        packages={name: each.version for name, each in installed.items()},
        needed=needed_packages(installed),
        venv=setup_command.VENV,
        root=PLACE,
    )


def needed_packages(installed: Mapping[str, Distribution]) -> frozenset[str]:
    """Return the normalized names of the packages that Motley needs, dependencies included."""
    requested = (ROOT / "requirements.txt").read_text().splitlines() if ROOT else None
    remaining = _names(requested or requires("motley-train") or ())
    seen: set[str] = set()
    while remaining:
        name = normal(remaining.pop())
        if name in installed and name not in seen:  # others: for another system or Python
            seen.add(name)
            remaining += _names(installed[name].requires or ())
    return frozenset(seen)


def _names(requirements: Iterable[str]) -> list[str]:
    """Return the package name of each requirement. Skip requirements of extras."""
    result = (re.match(r"[\w.-]+", line) for line in requirements if "extra ==" not in line)
    return [match[0] for match in result if match]


def judge_keys(hosts: Iterable[str]) -> Iterator[Finding]:
    """Yield a Finding for each file in this machine's ~/.ssh that only OpenSSH refuses.

    The library paramiko, which Motley uses, accepts these files.
    """
    folder = home_folder() / ".ssh"
    keys: set[Path] = set()
    with contextlib.suppress(OSError):
        keys = {path for path in folder.glob("id_*") if path.suffix != ".pub"}
    for host in hosts:
        with contextlib.suppress(HostTrouble):
            keys |= {Path(key) for key in read_login(host).keys}
    by_ssh, by_sshd = "ssh and mpirun refuse to use it", "its sshd accepts none of the keys in it"
    for path, others, refused in [
        (folder, "w", by_sshd), (folder / "config", "w", by_ssh),
        *((key, "rwx", by_ssh) for key in sorted(keys)),
    ]:  # fmt: skip
        try:
            result = path.stat()
        except OSError:
            continue
        if result.st_uid == os.getuid() and result.st_mode & (0o022 if others == "w" else 0o077):
            yield Finding(
                "key open" if path in keys else "permissions",
                f"others may {'write to' if others == 'w' else 'read'} {path} "
                f"(mode {stat.S_IMODE(result.st_mode):o}), so {refused}",
                f"close it with: chmod go-{others} {shlex.quote(str(path))}",
            )


def as_json(
    results: Mapping[str, HostReport | HostTrouble], groups: Mapping[Finding, list[str]], well: bool
) -> str:
    """Return the JSON object that ``--json`` prints. The help text describes the object."""
    return json.dumps(
        {
            "well": well,
            "hosts": {
                host: {"trouble": {"kind": result.kind, "found": str(result)}}
                if isinstance(result, HostTrouble)
                else {"trouble": None, **asdict(result)}
                for host, result in results.items()
            },
            "findings": [
                {"hosts": hosts, **asdict(finding), "fix": typed_command(finding.fix)}
                for finding, hosts in groups.items()
            ],
        },
        indent=1,
    )


def try_all(
    reports: Mapping[str, HostReport],
) -> tuple[Mapping[str, Network], Finding | None, str]:
    """Return each host's address on the fastest network, a Finding, and a text.

    The Finding is None unless no network connects all hosts. The text has one sentence on each
    network.
    """
    try:
        networks, words = try_networks(reports)
    except MotleyError as error:
        cause, _, fix = str(error).rpartition("; ")
        return {}, Finding("network cut", cause, fix), ""
    return networks, None, words


def main(words: Sequence[str]) -> int:
    """Ask the hosts, judge the answers, print them, and return the exit code."""
    parser = setup_command.Parser("test_cn_connection", __doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    slots = {host.name: host.slots for host in setup_command.read_hostfile(options)}
    names = list(slots)
    if options.dry_run:
        print(f"would ask: {', '.join(names)}")
        print(f"would write and remove a file in {PLACE} and in ~ on each of these hosts")
        return 0
    start = time.monotonic()
    with token_file() as token:
        results = probe_all(names, token=token, ring=True, limit=LIMIT_S)
    here = this_machine()
    reports, troubles = split(results)
    away = [name for name in names if name not in reports or not reports[name].here]
    findings = {_HERE: list(judge_keys(away)) if away else []}
    for name, report in reports.items():
        findings[name] = list(judge(report, slots[name], here))
    networks, apart = judge_networks(reports.values())
    tried = ""
    if not apart and len(reports) == len(names) and all(r.environment for r in reports.values()):
        networks, apart, tried = try_all(reports)
    if apart:
        for name in reports:
            findings[name].append(apart)
    groups = grouped(findings)
    well = len(reports) == len(names) and not any(each.wrong for each in groups)
    if options.json:
        print(as_json(results, groups, well))
        return int(not well)
    print(show(results, findings, networks, here, setup_command.width()))
    setup_command.print_troubles(troubles)
    for finding in sorted(groups, key=lambda each: not each.wrong):
        named = ", ".join(groups[finding])
        setup_command.print_troubles({named if finding.wrong else f"note on {named}": finding})
    if tried:
        print(f"\n{tried}")
    if well:
        print(f"\nall is well ({time.monotonic() - start:.1f} s)")
    return int(not well)


if __name__ == "__main__":
    setup_command.run(main)
