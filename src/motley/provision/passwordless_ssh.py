"""Let ssh reach every host of hosts.txt by a key, without asking for a password.

mpirun uses ssh, and then reaches these hosts too.

  bash setup/passwordless_ssh.sh                    # asks for the password once
  bash setup/passwordless_ssh.sh --dry-run          # prints what it would do
  bash setup/passwordless_ssh.sh --known-hosts FILE # host keys from its lines

  bash setup/passwordless_ssh.sh --mesh             # also from every host to every other
  bash setup/passwordless_ssh.sh --remove           # undoes all changes, on every host

On this machine, the script makes a key of its own, ~/.ssh/id_ed25519_motley. The
script lists the hosts that need this key at the end of ~/.ssh/config, between "#
motley: begin" and "# motley: end". The script shows the host keys, and then pins
them in ~/.ssh/known_hosts. On each host, the script adds one line to
~/.ssh/authorized_keys (restrict,pty: no forwarding of any kind). Other users
lose the permission to write to ~, and all permissions on ~/.ssh and
authorized_keys, since sshd would otherwise ignore the key. The script does not
touch your own keys, or a host that lets you in already. The script asks for the
password on the terminal, sends the password to the hosts alone, and stores it
nowhere. A second run finishes work that was interrupted, and otherwise changes
nothing.

Options:
  --hostfile FILE   default: the repository's hosts.txt (command motley: the current folder's)
  --known-hosts FILE   accept only the host keys in FILE, without asking. Ask
                    your administrator for the file
  --mesh            also let every host log in to every other host. mpirun does not
                    need this, because it starts all ranks from this machine. If
                    homes are not shared, each host gets a key of its own
  --remove          undo the changes on all hosts that the block in ~/.ssh/config
                    names. Pinned host keys and tightened permissions stay
  --dry-run         print every change, do none

Exit status: 0 every host lets you in by key, 1 some host does not, 2 nothing was
begun.
"""

import re
import shutil
import socket
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from motley.cluster.account import home_folder, user_name
from motley.cluster.login import HostKey, UnknownHostKey, read_login
from motley.cluster.ssh import Remote, connect, host_key, known_keys, run_on_all, split
from motley.errors import HostTrouble, MotleyError
from motley.provision.setup_command import (
    Parser,
    ask,
    ask_all,
    need_terminal,
    print_troubles,
    read_hostfile,
    run,
    table,
    try_password,
)
from motley.text import typed_command

LIMIT_S = 20.0  # seconds in which all hosts together have to answer
# Changes the ~/.ssh of a host or of this machine.
_SCRIPT = Path(__file__).with_name("ssh_files.sh").read_text()


def own_key() -> Path:
    """Return the path of the private key that this script makes."""
    return home_folder() / ".ssh/id_ed25519_motley"


def this_machine() -> Remote:
    """Return a Remote, an object that runs commands on a host, for this machine."""
    return Remote("this machine", None)


def do(remote: Remote, function: str, *words: str) -> list[str]:
    """Call a function of ssh_files.sh on a host.

    Returns:
        The lines that the function printed, mostly one for each change.

    Raises:
        HostTrouble: the function failed. The error names the cause.
    """
    done = remote.run(_SCRIPT + '"$@"\n', function, *words)
    if done.code == 0:
        return done.output.splitlines()
    text = (done.errors.strip().splitlines() or [f"status {done.code}, no message"])[-1]
    text = re.sub(r"^motley: \d+: (eval: )?", "", text)  # how dash names a script from stdin
    if any(word in text for word in ("No space", "quota")):
        raise HostTrouble(
            "disk full",
            f"{remote.host} has no space left in your home: {text}",
            "free some space there",
        )
    if any(word in text for word in ("ermission", "not permitted", "Read-only", "can't cd")):
        raise HostTrouble(
            "home not writable",
            f"{remote.host} does not let you write to your home: {text}",
            "check who owns it and how it is mounted, or ask the administrator",
        )
    raise HostTrouble(
        "change failed",
        f"{remote.host} could not make the change: {text}",
        "correct that, and run the same command again",
    )


def authorized(public: str) -> str:
    """Return a public key as a line of authorized_keys that allows a terminal but no forwarding."""
    return f"restrict,pty {public}"


def pinned(keys: Mapping[str, HostKey]) -> list[str]:
    """Return a line of known_hosts for each host key; ``keys`` has the name in the line."""
    return [f"{name} {key.kind} {key.base64}" for name, key in keys.items()]


def try_ssh(remote: Remote, hosts: Iterable[str]) -> dict[str, str]:
    """Try to reach each host by OpenSSH from ``remote``, without a password.

    Return, for each host, ``works`` or an error message.
    """
    names = list(hosts)
    lines = do(remote, "try_ssh", *names) if names else []
    answers = dict(line.partition(" ")[::2] for line in lines)
    return {host: answers.get(host, "no answer") for host in names}


def confirm(shown: Mapping[str, HostKey], dry_run: bool) -> dict[str, HostKey]:
    """Show the host keys, ask the user if they are right, and return them.

    A dry run does not ask.

    Raises:
        MotleyError: the user did not confirm the host keys.
    """
    print("These host keys are not in ~/.ssh/known_hosts yet; compare them with the right keys:")
    rows = [(host, key.kind, key.fingerprint) for host, key in shown.items()]
    print(table(("host", "type", "fingerprint"), rows))
    if dry_run:
        print("would ask if these keys are right, pin them, and find hosts that need a password")
        return {}
    need_terminal(
        "a yes to the host keys", "give --known-hosts FILE, or run this command in a terminal"
    )
    if not ask("Are they right?"):
        raise MotleyError("host keys not confirmed; nothing was changed")
    return dict(shown)


def match_all(shown: Mapping[str, HostKey], path: Path) -> dict[str, HostKey | HostTrouble]:
    """Check each shown host key by ``--known-hosts FILE``. Return the key or the host's fault."""
    return run_on_all(shown, lambda host: _match(host, shown[host], path), LIMIT_S)


def _match(host: str, shown: HostKey, path: Path) -> HostKey:
    """Return the host's key if ``--known-hosts FILE`` lists it, else raise HostTrouble."""
    try:
        held = known_keys(host, path)
    except (OSError, ValueError) as error:
        raise MotleyError(f"--known-hosts {path} cannot be read: {error}") from None
    if not held:
        raise HostTrouble(
            "host key not listed",
            f"{host} has the key {shown.fingerprint}, and {path} lists no key for "
            f"{read_login(host).known_as}",
            "add its key to the file, or leave out --known-hosts to be asked",
        )
    if shown.kind not in [key.kind for key in held]:
        shown = host_key(host, [key.kind for key in held])
    if shown in held:
        return shown
    expected = next((key for key in held if key.kind == shown.kind), held[0])
    raise HostTrouble(
        "host key differs",
        f"{host} has the key {shown.fingerprint}, but {path} lists {expected.fingerprint}: the "
        "host was reinstalled, or another machine answers at its address",
        "ask its administrator which key is right",
    )


def make_tag(public: str) -> str:
    """Return the comment that marks the keys that ``--mesh`` from this machine has installed."""
    return f"mesh-{public.split()[1][-16:]}"


def make_mesh(hosts: Sequence[str], public: str) -> dict[str, HostTrouble]:
    """Give each host access by key to each other host.

    Args:
        hosts: hosts to which this machine can log in. This machine is among them if hosts.txt names
            it.
        public: the public key of this machine.

    Returns:
        The faults of the hosts that cannot take part, or cannot reach all other hosts.
    """
    members = [host for host in hosts if host != "localhost"]
    met, troubles = split(run_on_all(members, _visit, LIMIT_S))
    remotes = {host: remote for host, (remote, _) in met.items()}
    keys: dict[str, str] = {}
    # One by one, here and below: homes may be shared.
    for host, remote in remotes.items():
        try:
            comment = f"motley {read_login(host).user}@{host} {make_tag(public)}"
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
    """Log in from each host to each other host. Return the faults of hosts whose login fails."""
    text, troubles = split(
        run_on_all(remotes, lambda host: try_ssh(remotes[host], remotes), LIMIT_S)
    )
    for host, answer in text.items():
        if failed := {other: why for other, why in answer.items() if why != "works"}:
            pairs = "; ".join(f"to {other}: {why}" for other, why in failed.items())
            first = next(iter(failed))
            troubles[host] = HostTrouble(
                "mesh incomplete",
                f"{host} cannot log in {pairs}",
                f"see why, on {host}, with: ssh -v -- {first}",
            )
    if remotes and not troubles:
        print(f"mesh: each of {', '.join(remotes)} reaches each other")
    return troubles


def remove(dry_run: bool) -> int:
    """Undo all changes on the hosts in our block of ~/.ssh/config, then on this machine.

    Return the exit status.

    A host that cannot be reached stays in the block. Our key then stays on this machine, for the
    next call.
    """
    here = this_machine()
    hosts = do(here, "block_hosts")
    public = (do(here, "public_key") or [""])[-1]
    if not hosts and not public:
        print(
            f"nothing is left to remove: neither {own_key()} nor our block in ~/.ssh/config exists"
        )
        return 0
    if dry_run:
        for host in hosts:
            print(f"would remove our line from ~/.ssh/authorized_keys on {host}, and its mesh key")
        print(f"would remove {own_key()} and our block of ~/.ssh/config")
        return 0
    head, tag = (public.split()[1], make_tag(public)) if public else ("", "")
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
        again = typed_command("bash setup/passwordless_ssh.sh --remove")
        print(f"\n{own_key()} stays for these hosts; when they answer again: {again}")
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


HERE, OPEN, KEYED, CLOSED = "this machine", "already done", "key there already", "needs the key"
States = dict[str, str | HostTrouble]


def parse(words: Sequence[str]) -> Namespace:
    """Return the options, checked before any host is visited."""
    parser = Parser("passwordless_ssh", __doc__)
    parser.add_argument("--known-hosts", type=Path)
    parser.add_argument("--mesh", action="store_true")
    parser.add_argument("--remove", action="store_true")
    options = parser.parse_args(words)
    if options.remove and (options.mesh or options.known_hosts):
        parser.error("--remove takes neither --mesh nor --known-hosts")
    if options.known_hosts and not options.known_hosts.is_file():
        parser.error(f"--known-hosts {options.known_hosts} is no file")
    return options


def look(host: str, known: HostKey | None = None) -> str:
    """Return the way in which this user can log in to a host now.

    The result is HERE for this machine, and OPEN if ssh works without a password. KEYED: our key
    works, but ~/.ssh/config does not name our key for the host. CLOSED: no key works.

    Raises:
        HostTrouble: the host cannot be reached.
    """
    try:
        with connect(host, known=known) as remote:
            return HERE if remote.here else OPEN
    except HostTrouble as trouble:
        if trouble.kind not in ("key refused", "key locked"):
            raise
    try:
        connect(host, key=own_key(), known=known).close()
        return KEYED  # but the block of ~/.ssh/config is gone
    except HostTrouble:
        return CLOSED


def choose_host_keys(states: States, options: Namespace) -> dict[str, HostKey]:
    """Return the host keys to pin. For a wrong key, store a HostTrouble in ``states``."""
    shown = {host: s.key for host, s in states.items() if isinstance(s, UnknownHostKey)}
    if not shown:
        return {}
    if not options.known_hosts:
        if options.dry_run:
            states |= dict.fromkeys(shown, "host key to be confirmed")
        return confirm(shown, options.dry_run)
    result, troubles = split(match_all(shown, options.known_hosts))
    states |= troubles
    return result


def log_in(hosts: Sequence[str]) -> dict[str, Remote | HostTrouble]:
    """Ask for the password and log in to all hosts at once. Return the connections or faults."""
    print("The password is sent only to these hosts, once, and is not stored.")
    users = {host: read_login(host).user for host in hosts}
    return try_password(users, lambda password, host: connect(host, password), LIMIT_S)


def install(remote: Remote, public: str) -> str:
    """Add our key to a host that accepted the password, unless the user's home there has it.

    Returns:
        The new state of the host.

    Raises:
        HostTrouble: the host still refuses the key.
    """
    host = remote.host
    try:
        connect(host, key=own_key()).close()
        return KEYED  # its home is shared with an earlier host
    except HostTrouble as trouble:
        if trouble.kind != "key refused":
            raise
    for note in do(remote, "authorize", authorized(public)):
        print(f"{host}: {note}")
    try:
        connect(host, key=own_key()).close()
    except HostTrouble as trouble:
        if trouble.kind != "key refused":
            raise
        raise HostTrouble(
            "key ignored",
            f"{host} refuses our key, although it is in ~/.ssh/authorized_keys on {host}",
            "ask its administrator whether sshd accepts keys (PubkeyAuthentication), and reads "
            "that file (AuthorizedKeysFile)",
        ) from None
    return "key installed"


def install_all(states: States) -> str:
    """Add our key to the hosts that need it, one after the other, since homes may be shared.

    Returns:
        Our public key.
    """
    here = this_machine()
    public = do(here, "make_key", f"motley {user_name()}@{socket.gethostname()}")[-1]
    closed = [host for host, state in states.items() if state == CLOSED]
    remotes, troubles = split(log_in(closed) if closed else {})
    states |= troubles
    # Written first, because --remove uses this list of hosts.
    named = [host for host, state in states.items() if state == KEYED]
    if named := [*named, *remotes]:
        for note in do(here, "add_to_block", *named):
            print(f"here: {note}")
    for host, remote in remotes.items():
        try:
            with remote:
                states[host] = install(remote, public)
        except HostTrouble as trouble:
            states[host] = trouble
    return public


def plan(states: States, pins: dict[str, HostKey], mesh: bool) -> None:
    """Print the planned changes."""
    for host, key in pins.items():
        print(f"would pin the host key of {host} in ~/.ssh/known_hosts: {key.fingerprint}")
    closed = [host for host, state in states.items() if state == CLOSED]
    named = [host for host, state in states.items() if state in (CLOSED, KEYED)]
    if closed and not own_key().exists():
        print(f"would make {own_key()}")
    if closed:
        print(f"would ask for the password on {', '.join(closed)}")
        print(f"would add the key to ~/.ssh/authorized_keys on {', '.join(closed)}")
    if named:
        print(f"would name {', '.join(named)} in our block of ~/.ssh/config")
    if mesh:
        print("would let every host log in to every other by a key of its own")


def check(states: States) -> dict[str, str]:
    """Log in to every host by OpenSSH, as mpirun will do. Store each failure in ``states``.

    Returns:
        ``works`` or the error message for each tried host.
    """
    met = split(states)[0]
    reached = try_ssh(this_machine(), [h for h, s in met.items() if s not in (HERE, CLOSED)])
    for host, text in reached.items():
        if text != "works":
            states[host] = HostTrouble(
                "ssh fails",
                f"{host} cannot be reached by ssh: {text}",
                f"see more with: ssh -v -- {host}",
            )
    return reached


def report(states: States, reached: dict[str, str]) -> int:
    """Print the table, and return the exit status."""
    troubles = split(states)[1]
    rows = []
    for host, state in states.items():
        if reached.get(host) == "works":
            ssh = "works"
        elif state == HERE:
            ssh = "not needed"
        else:
            ssh = "no" if host in troubles else "not tried"
        rows.append((host, troubles[host].kind if host in troubles else state, ssh))
    print("\n" + table(("host", "state", "ssh without password"), rows))
    print_troubles(troubles)
    return 1 if troubles else 0


def main(words: Sequence[str]) -> int:
    """Find the hosts that need a key, install the key, check it, and return the exit status."""
    options = parse(words)
    hosts = [host.name for host in read_hostfile(options)]
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            raise MotleyError(f"this machine has no program {program}; install the OpenSSH client")
    if options.remove:
        return remove(options.dry_run)
    states: States = ask_all(hosts, look, LIMIT_S)
    if all(state == HERE for state in states.values()):
        print(f"{', '.join(hosts)}: this machine; there is nothing to do")
        return 0
    pins = choose_host_keys(states, options)
    states |= run_on_all(pins, lambda host: look(host, pins[host]), LIMIT_S)
    if options.dry_run:
        plan(states, pins, options.mesh)
        return report(states, {})
    if CLOSED in states.values():
        need_terminal("the password", "nothing was changed; run this command in a terminal")
    if pins:
        lines = pinned({read_login(host).known_as: key for host, key in pins.items()})
        for note in do(this_machine(), "pin", *lines):
            print(f"here: {note}")
    if options.mesh or CLOSED in states.values() or KEYED in states.values():
        public = install_all(states)
    reached = check(states)
    if options.mesh:
        states |= make_mesh(list(split(states)[0]), public)
    return report(states, reached)


if __name__ == "__main__":
    run(main)
