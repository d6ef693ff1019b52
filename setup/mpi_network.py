"""The subnet that the hosts share, told to MPI, NCCL and DeepSpeed on every host.

Written are three files of ours: the environment's etc/openmpi-mca-params.conf and
etc/prte-mca-params.conf, between two marks, and .deepspeed_env in the repository. The
user's own parameter files go before those of the environment: they are read, never changed.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from cn import ROOT, VENV
from cn_report import HostReport

from motley.launch import Network, choose_networks
from motley.remote import HostTrouble, Remote

# Prints lines of the user's own parameter files that decide about interfaces, as FILE: LINE,
# then puts stdin's three parts, each ended by a line "--", where they belong if it is "write".
_SETTLE = r"""
for file in ~/.openmpi/mca-params.conf ~/.prte/mca-params.conf ~/.pmix/mca-params.conf; do
  grep -H '^[[:space:]]*[a-z_]*if_\(in\|ex\)clude' "$file" 2>/dev/null
done
[ "$1" = write ] || exit 0
part() { while IFS= read -r line && [ "$line" != -- ]; do printf '%s\n' "$line"; done; }
between() { # FILE: what is between our marks becomes stdin
  { sed '/^# motley: begin$/,/^# motley: end$/d' "$1" 2>/dev/null
    echo '# motley: begin'; cat; echo '# motley: end'; } >"$1.$$" && mv "$1.$$" "$1"
}
part | between "$2/etc/openmpi-mca-params.conf" &&
  part | between "$2/etc/prte-mca-params.conf" &&
  part >"$3.$$" && mv "$3.$$" "$3"
"""


@dataclass(frozen=True)
class Shared:
    """What the hosts share.

    Attributes:
        subnet: in CIDR form, as MPI's parameters take it; None where there is one host.
        at: each host's interface and address on it.
        infiniband: all hosts have an adapter.
    """

    subnet: str | None
    at: Mapping[str, Network]
    infiniband: bool


def find_shared(reports: Mapping[str, HostReport]) -> Shared:
    """The subnet on which each host has an address of its own; MotleyError if there is none."""
    interfaces = {number: each.interfaces for number, each in enumerate(reports.values())}
    networks = choose_networks(interfaces, dict(enumerate(reports)), {})
    at = dict(zip(reports, networks.values(), strict=True))
    infiniband = all(each.infiniband for each in reports.values())
    if len(reports) == 1:
        return Shared(None, at, infiniband)
    first = next(iter(reports.values())).interfaces
    address = ipaddress.IPv4Address(networks[0].address)
    subnet = next(each.network for each in first if str(address) == each.address)
    return Shared(str(subnet), at, infiniband)


def parameters(
    report: HostReport, reports: Mapping[str, HostReport], shared: Shared
) -> tuple[list[str], list[str], list[str]]:
    """Lines for Open MPI, for its launcher PRRTE, and for .deepspeed_env on one host.

    A subnet, since interface names differ from host to host. Open MPI 4.1 has its launcher's
    parameter in the first file, under its own name. NCCL takes names alone: those of all hosts
    that read the same file, unless one of them is another network's name on another host.
    """
    if shared.subnet is None:
        return [], [], []
    readers = [each for each in reports.values() if report.same_folder and each.same_folder]
    names = {shared.at[each.host].interface for each in readers or [report]}
    clash = any(
        interface.name in names - {shared.at[each.host].interface}
        for each in readers
        for interface in each.interfaces
    )
    # "=" before the names: these, and not all that begin like them.
    settings = [] if clash else [f"NCCL_SOCKET_IFNAME=={','.join(sorted(names))}"]
    if len(names) == 1:
        settings += [f"GLOO_SOCKET_IFNAME={name}" for name in names]
    if not shared.infiniband:
        settings.append("NCCL_IB_DISABLE=1")
    return (
        [f"btl_tcp_if_include = {shared.subnet}", f"oob_tcp_if_include = {shared.subnet}"],
        [f"prte_if_include = {shared.subnet}"],
        settings,
    )


def settle(remote: Remote, lines: tuple[list[str], list[str], list[str]], write: bool) -> str:
    """Tell a host its :func:`parameters`; returns what the user's own files say otherwise.

    Raises:
        HostTrouble: it cannot be written there.
    """
    text = "".join("".join(f"{line}\n" for line in part) + "--\n" for part in lines)
    words = ("write" if write else "read", VENV, ROOT / ".deepspeed_env")
    done = remote.run(_SETTLE, *words, payload=text.encode())
    if done.code != 0:
        raise HostTrouble(
            "not written",
            f"MPI's parameters cannot be written on {remote.host} ({done.errors.strip()})",
            f"make the environment there yours: bash {ROOT}/setup/install_cn.sh",
        )
    wanted = {line.replace(" ", "") for part in lines[:2] for line in part}
    own = done.output.splitlines()
    return "; ".join(line for line in own if line.partition(":")[2].replace(" ", "") not in wanted)
