"""Which host keys passwordless_ssh.sh pins: those that the user, or a file, says yes to."""

from collections.abc import Mapping
from pathlib import Path

from cn import ask, need_terminal, table
from ssh_files import LIMIT_S

from motley.cluster.login import HostKey, read_login
from motley.cluster.ssh import host_key, known_keys, run_on_all
from motley.errors import HostTrouble, MotleyError


def confirm(shown: Mapping[str, HostKey], dry_run: bool) -> dict[str, HostKey]:
    """Show the keys and ask; MotleyError without a yes to all. A dry run asks nothing."""
    print("Not in ~/.ssh/known_hosts yet; compare with what their administrator says:")
    rows = [(host, key.kind, key.fingerprint) for host, key in shown.items()]
    print(table(("host", "type", "fingerprint"), rows))
    if dry_run:
        print("would ask whether they are right, pin them, and see who needs a password")
        return {}
    need_terminal("a yes to them", "give --known-hosts FILE, or run this from one")
    if not ask("Are they right?"):
        raise MotleyError("host keys not confirmed; nothing was changed")
    return dict(shown)


def match_all(shown: Mapping[str, HostKey], path: Path) -> dict[str, HostKey | HostTrouble]:
    """Each host's key as ``--known-hosts FILE`` has it, or why it has none."""
    return run_on_all(shown, lambda host: _match(host, shown[host], path), LIMIT_S)


def _match(host: str, shown: HostKey, path: Path) -> HostKey:
    """The key of ``--known-hosts FILE`` that a host proves; HostTrouble if it proves none."""
    try:
        held = known_keys(host, path)
    except (OSError, ValueError) as error:
        raise MotleyError(f"--known-hosts {path} cannot be read: {error}") from None
    if not held:
        raise HostTrouble(
            "host key not listed",
            f"{host} shows the key {shown.fingerprint}, and {path} has none for "
            f"{read_login(host).known_as}",
            "add its line there, or leave out --known-hosts to be asked",
        )
    if shown.kind not in [key.kind for key in held]:
        shown = host_key(host, [key.kind for key in held])
    if shown in held:
        return shown
    expected = next((key for key in held if key.kind == shown.kind), held[0])
    raise HostTrouble(
        "host key differs",
        f"{host} shows the key {shown.fingerprint}, but {path} holds {expected.fingerprint}: it "
        "was reinstalled, or somebody answers in its place",
        "ask who administers it",
    )
