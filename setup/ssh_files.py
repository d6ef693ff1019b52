"""What is changed in the ~/.ssh of a host or of this machine: ssh_files.sh, called there."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from motley.cluster.facts import home_folder
from motley.cluster.login import HostKey
from motley.cluster.ssh import Remote
from motley.errors import HostTrouble

LIMIT_S = 20.0  # for all hosts together to answer, or to refuse
_SCRIPT = Path(__file__).with_suffix(".sh").read_text()


def own_key() -> Path:
    """The private key that Motley makes for itself."""
    return home_folder() / ".ssh/id_ed25519_motley"


def this_machine() -> Remote:
    """Where the script runs."""
    return Remote("this machine", None)


def do(remote: Remote, function: str, *words: str) -> list[str]:
    """Call a function of ssh_files.sh on a host.

    Returns:
        The lines that it printed: mostly one for each change.

    Raises:
        HostTrouble: named after what hindered it there.
    """
    done = remote.run(_SCRIPT + '"$@"\n', function, *words)
    if done.code == 0:
        return done.output.splitlines()
    said = (done.errors.strip().splitlines() or [f"status {done.code}, no message"])[-1]
    said = re.sub(r"^motley: \d+: (eval: )?", "", said)  # how dash names a script from stdin
    if any(word in said for word in ("No space", "quota")):
        raise HostTrouble("disk full", f"on {remote.host}: {said}", "make room in the home there")
    if any(word in said for word in ("ermission", "not permitted", "Read-only", "can't cd")):
        raise HostTrouble(
            "home not writable",
            f"on {remote.host}: {said}",
            "see whose the home is and how it is mounted, or ask who administers it",
        )
    raise HostTrouble("failed there", f"on {remote.host}: {said}", "put that right, then again")


def authorized(public: str) -> str:
    """A public key as a line of authorized_keys: a terminal and commands, no forwarding."""
    return f"restrict,pty {public}"


def pinned(keys: Mapping[str, HostKey]) -> list[str]:
    """Host keys by known name, as lines of known_hosts."""
    return [f"{name} {key.kind} {key.base64}" for name, key in keys.items()]


def try_ssh(remote: Remote, hosts: Iterable[str]) -> dict[str, str]:
    """What OpenSSH says on ``remote`` to reaching each host unasked; ``works`` is the best."""
    names = list(hosts)
    lines = do(remote, "try_ssh", *names) if names else []
    said = dict(line.partition(" ")[::2] for line in lines)
    return {host: said.get(host, "no answer") for host in names}
