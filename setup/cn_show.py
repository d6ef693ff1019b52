"""The table of the connection test: properties are rows, hosts are columns."""

import itertools
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cn import table
from cn_judge import Finding, Here, differences
from cn_report import HostReport

from motley.cluster.device_facts import DeviceFacts
from motley.cluster.network import Network
from motley.errors import HostTrouble
from motley.plan.precision import best_precision

_CELL = 24  # characters; what is longer goes on in the next line
_GAP = 2


def show(
    results: Mapping[str, HostReport | HostTrouble],
    findings: Mapping[str, Iterable[Finding]],
    networks: Mapping[str, Network],
    here: Here,
    width: int,
) -> str:
    """Tables below each other, each of as many hosts as ``width`` characters hold."""
    columns: dict[str, dict[str, list[str]]] = {}
    for host, result in results.items():
        if isinstance(result, HostTrouble):
            told = {"reached": "no", "verdict": result.kind}
        else:
            kinds = [finding.kind for finding in findings.get(host, ()) if finding.wrong]
            told = describe(result, networks.get(host), here)
            told["verdict"] = ", ".join(kinds) or "well"
        columns[host] = {label: _wrap(cell) for label, cell in told.items()}
    labels = list(dict.fromkeys(label for cells in columns.values() for label in cells))
    # What is known of no host needs no row: the capability where nobody has a GPU.
    labels = [label for label in labels if any(cells.get(label) for cells in columns.values())]
    labels.sort(key=lambda label: label == "verdict")  # the last, whichever host was first
    room = width - max(map(len, labels))
    blocks: list[list[str]] = [[]]
    left = room
    for host, cells in columns.items():
        need = _GAP + max(map(len, [host, *itertools.chain.from_iterable(cells.values())]))
        if need > left and blocks[-1]:
            blocks.append([])
            left = room
        blocks[-1].append(host)
        left -= need
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
    """One host's cells, by label; an empty one is unknown."""
    first, newest = next(iter(report.pythons), None), report.newest_python
    python = first or newest
    unfit = "" if first else " (too old)" if newest and newest.version < (3, 11) else " (no venv)"
    speed = None if network is None else report.speeds.get(network.interface)
    return {
        "reached": "yes (this machine)" if report.here else "yes",
        "login shell": Path(report.shell or "").name,
        "clock": _clock(report),
        "CPU": _cpu(report),
        "memory free": _of(report.memory_free_mib, report.memory_total_mib),
        "/dev/shm free": _of(report.shm_free_mib, report.shm_total_mib),
        "disk free": _of(report.disk_free_mib, report.disk_total_mib),
        "Python": ".".join(map(str, python.version)) + unfit if python else "none",
        "repository": _repository(report),
        "environment": _environment(report, here),
        "GPU": _each(report, lambda gpu: gpu.name) or "none",
        "capability": _each(report, _capability),
        "memory node": _each(report, _memory_node) if _are_apart(report) else "",
        "driver": report.driver or ("fails" if report.gpu_error else "none"),
        "GPU memory free": _each(report, _memory),
        "precision": _each(report, _precision) or " ".join(_reasoned(None)),
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


def _of(free: float | None, total: float | None) -> str:
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


def _each(report: HostReport, say: Callable[[DeviceFacts], str]) -> str:
    """One value for all GPUs where it is the same, else one for each."""
    values = [say(gpu) for gpu in report.devices]
    if len(set(values)) == 1:
        return f"{len(values)} x {values[0]}" if len(values) > 1 else values[0]
    return ", ".join(f"{gpu.index}: {say(gpu)}" for gpu in report.devices)


def _are_apart(report: HostReport) -> bool:
    """Its GPUs are known to be next to several memory nodes."""
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
