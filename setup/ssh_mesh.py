"""``--mesh`` and ``--remove`` of passwordless_ssh.sh."""

from collections.abc import Sequence

from cn import print_troubles, table
from ssh_files import LIMIT_S, authorized, do, own_key, pinned, this_machine, try_ssh

from motley.cluster.login import HostKey, read_login
from motley.cluster.ssh import Remote, connect, host_key, run_on_all, split
from motley.errors import HostTrouble


def tag_of(public: str) -> str:
    """What marks the keys that were made for the mesh of the key of this machine."""
    return f"mesh-{public.split()[1][-16:]}"


def make_mesh(hosts: Sequence[str], public: str) -> dict[str, HostTrouble]:
    """Let each host in to each other one.

    Args:
        hosts: those that let this machine in; it itself too if it goes by a name.
        public: the key of this machine.

    Returns:
        The hosts that cannot take part, or cannot reach all others.
    """
    members = [host for host in hosts if host != "localhost"]
    met, troubles = split(run_on_all(members, _visit, LIMIT_S))
    remotes = {host: remote for host, (remote, _) in met.items()}
    keys: dict[str, str] = {}
    # One by one, here and below: homes may be shared.
    for host, remote in remotes.items():
        try:
            comment = f"motley {read_login(host).user}@{host} {tag_of(public)}"
            keys[host] = do(remote, "make_key", comment)[-1]
        except HostTrouble as trouble:
            troubles[host] = trouble
    lines = [authorized(key) for key in dict.fromkeys([public, *keys.values()])]
    pins = pinned({host: key for host, (_, key) in met.items()})
    for host in keys:
        try:
            notes = do(remotes[host], "authorize", *lines)
            notes += do(remotes[host], "pin_new", *pins)
            notes += do(remotes[host], "add_to_block", *keys)
        except HostTrouble as trouble:
            troubles[host] = trouble
            continue
        for note in notes:
            print(f"{host}: {note}")
    if len(lines) == 1:
        print("mesh: the home is shared, so every host has the same key already")
    troubles |= _check({host: remotes[host] for host in keys if host not in troubles})
    return troubles


def _visit(host: str) -> tuple[Remote, HostKey]:
    remote = connect(host)
    return remote, remote.key or host_key(host)


def _check(remotes: dict[str, Remote]) -> dict[str, HostTrouble]:
    """Reach each host from each other one."""
    said, troubles = split(
        run_on_all(remotes, lambda host: try_ssh(remotes[host], remotes), LIMIT_S)
    )
    for host, answer in said.items():
        if failed := {other: why for other, why in answer.items() if why != "works"}:
            pairs = "; ".join(f"to {other}: {why}" for other, why in failed.items())
            first = next(iter(failed))
            troubles[host] = HostTrouble(
                "mesh incomplete", f"from {host} {pairs}", f"try there: ssh -v -- {first}"
            )
    if remotes and not troubles:
        print(f"mesh: each of {', '.join(remotes)} reaches each other")
    return troubles


def remove(dry_run: bool) -> int:
    """Undo all, on the hosts that our block names and then here; the exit status.

    A host that is not reached stays in the block, and our key here, for the next time.
    """
    here = this_machine()
    hosts = do(here, "block_hosts")
    public = (do(here, "public_key") or [""])[-1]
    if not hosts and not public:
        print(f"already done: there is neither {own_key()} nor a block of ours in ~/.ssh/config")
        return 0
    if dry_run:
        for host in hosts:
            print(f"would remove our line from ~/.ssh/authorized_keys on {host}, and its mesh key")
        print(f"would remove {own_key()} and our block of ~/.ssh/config")
        return 0
    head, tag = (public.split()[1], tag_of(public)) if public else ("", "")
    states = run_on_all(hosts, connect, LIMIT_S)
    rows, troubles = [], {}
    for host, remote in states.items():
        try:
            state = _leave(remote, head, tag) if public else "our key is gone"
        except HostTrouble as trouble:
            troubles[host], state = trouble, trouble.kind
        rows.append((host, state))
    for note in do(here, "set_block", *troubles):
        print(f"here: {note}")
    if not troubles:
        for note in (do(here, "unauthorize", head, tag) if public else []) + do(here, "remove_key"):
            print(f"here: {note}")
    if rows:
        print("\n" + table(("host", "state"), rows))
    print("Pinned host keys stay in ~/.ssh/known_hosts.")
    print_troubles(troubles)
    if troubles:
        print(
            f"\n{own_key()} stays for these; when they are back: "
            "bash setup/passwordless_ssh.sh --remove"
        )
    return 1 if troubles else 0


def _leave(remote: Remote | HostTrouble, head: str, tag: str) -> str:
    if isinstance(remote, HostTrouble):
        if remote.kind in ("key refused", "key locked"):
            return "already removed"
        raise remote
    if remote.here:
        return "this machine"
    with remote:
        notes = do(remote, "leave", head, tag)
    for note in notes:
        print(f"{remote.host}: {note}")
    return "removed" if notes else "already removed"
