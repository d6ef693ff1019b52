"""From a password to keys on all hosts; ``bash setup/passwordless_ssh.sh -h`` says the rest."""

import shutil
import socket
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from cn import (
    Parser,
    ask_all,
    need_terminal,
    print_troubles,
    read_hostfile,
    run,
    table,
    try_password,
)
from ssh_files import LIMIT_S, authorized, do, own_key, pinned, this_machine, try_ssh
from ssh_host_keys import confirm, match_all
from ssh_mesh import make_mesh, remove

from motley.cluster.facts import user_name
from motley.cluster.login import HostKey, UnknownHostKey, read_login
from motley.cluster.ssh import Remote, connect, run_on_all, split
from motley.errors import HostTrouble, MotleyError

HERE, OPEN, KEYED, CLOSED = "this machine", "already done", "key there already", "needs the key"
States = dict[str, str | HostTrouble]


def parse(words: Sequence[str]) -> Namespace:
    """The options, checked before anything begins."""
    parser = Parser("passwordless_ssh")
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
    """How a host lets us in now: HERE, OPEN, KEYED or CLOSED; raises HostTrouble."""
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
    """The host keys to pin; a host whose key is not right becomes a trouble."""
    shown = {host: s.key for host, s in states.items() if isinstance(s, UnknownHostKey)}
    if not shown:
        return {}
    if not options.known_hosts:
        if options.dry_run:
            states |= dict.fromkeys(shown, "host key to be confirmed")
        return confirm(shown, options.dry_run)
    found, troubles = split(match_all(shown, options.known_hosts))
    states |= troubles
    return found


def log_in(hosts: Sequence[str]) -> dict[str, Remote | HostTrouble]:
    """Ask for the password and log in with it, to all at once."""
    print("The password goes to these hosts alone, once, and is kept nowhere.")
    users = {host: read_login(host).user for host in hosts}
    return try_password(users, lambda password, host: connect(host, password), LIMIT_S)


def install(remote: Remote, public: str) -> str:
    """Put our key into a host that let the password in, unless its home has it already."""
    host = remote.host
    try:
        connect(host, key=own_key()).close()
        return KEYED  # its home is that of a host before
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
            f"our key is in ~/.ssh/authorized_keys on {host}, which refuses it all the same",
            "ask who administers it whether sshd takes keys (PubkeyAuthentication) and from "
            "that file (AuthorizedKeysFile)",
        ) from None
    return "key installed"


def install_all(states: States) -> str:
    """Bring our key to the hosts that need it, one by one since homes may be shared.

    Returns:
        Our public key.
    """
    here = this_machine()
    public = do(here, "make_key", f"motley {user_name()}@{socket.gethostname()}")[-1]
    closed = [host for host, state in states.items() if state == CLOSED]
    remotes, troubles = split(log_in(closed) if closed else {})
    states |= troubles
    # Written first: it is also the list of the hosts where --remove must look.
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
    """Print what would be done."""
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
        print("would let every host in to every other: a key on each, unless homes are shared")


def check(states: States) -> dict[str, str]:
    """Reach every host by OpenSSH, as mpirun will; what fails becomes its state."""
    met = split(states)[0]
    reached = try_ssh(this_machine(), [h for h, s in met.items() if s not in (HERE, CLOSED)])
    for host, said in reached.items():
        if said != "works":
            states[host] = HostTrouble(
                "ssh fails", f"ssh to {host} says: {said}", f"try: ssh -v -- {host}"
            )
    return reached


def report(states: States, reached: dict[str, str]) -> int:
    """Print the table; the exit status."""
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
    """See who needs a key, bring it there, see that it works."""
    options = parse(words)
    hosts = [host.name for host in read_hostfile(options)]
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            raise MotleyError(f"{program} is not on this machine; install OpenSSH's client")
    if options.remove:
        return remove(options.dry_run)
    states: States = ask_all(hosts, look, LIMIT_S)
    if all(state == HERE for state in states.values()):
        print(f"{', '.join(hosts)}: this machine; nothing is to be done")
        return 0
    pins = choose_host_keys(states, options)
    states |= run_on_all(pins, lambda host: look(host, pins[host]), LIMIT_S)
    if options.dry_run:
        plan(states, pins, options.mesh)
        return report(states, {})
    if CLOSED in states.values():
        need_terminal("the password", "nothing was changed; run this from one")
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
