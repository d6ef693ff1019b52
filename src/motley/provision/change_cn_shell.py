"""Change your login shell on every host of hosts.txt that allows it.

  bash setup/change_cn_shell.sh                    # to /bin/bash
  bash setup/change_cn_shell.sh --shell /bin/tcsh  # or to another shell
  bash setup/change_cn_shell.sh --dry-run          # prints what it would do

This is optional: Motley and mpirun work under tcsh too. The script shows the shell on each host,
asks for a yes, and asks once for your password, which chsh needs. After the change, the script logs
in to each host again. If that login fails, the script changes the shell back. If a directory
service (LDAP, NIS) keeps your account, nothing is changed. The script needs ssh without a password
(bash setup/passwordless_ssh.sh). Only the account's login shell is changed, through the host's own
chsh.

Options:
  --hostfile FILE   default: the repository's hosts.txt (command motley: the current folder's)
  --shell PATH      default: /bin/bash; must be in each host's /etc/shells
  --dry-run         print every change, do none

Exit status: 0 every host has that shell or needs no change, 1 some host does not, 2 nothing was
begun.
"""

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from motley.cluster.ssh import Remote, connect, run_on_all, split
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

LIMIT_S = 30.0  # seconds for all hosts together
DONE, CHANGE, DIRECTORY = "already done", "change", "kept by a directory"
UNNEEDED = "Motley starts ranks under any shell, tcsh too"

# Argument: the wanted shell. Prints one line: user, present shell, and the facts that hold.
_PROBE = """
user=$(id -un)
shell=$(getent passwd "$user" | cut -d : -f 7)
listed() { grep -qxF -e "$1" /etc/shells 2>/dev/null; }
printf '%s %s' "$user" "${shell:-/bin/sh}"
for name in local root same exists listed listed_now chsh; do
  case $name in
    local) grep -q "^$user:" /etc/passwd ;;
    root) [ "$(id -u)" = 0 ] ;;
    same) [ "${1##*/} $(readlink -f "$1")" = "${shell##*/} $(readlink -f "$shell")" ] ;;
    exists) [ -f "$1" ] && [ -x "$1" ] ;;
    listed) listed "$1" ;;
    listed_now) listed "$shell" ;;
    chsh) command -v chsh >/dev/null ;;
  esac && printf ' %s' "$name"
done
echo
"""


@dataclass(frozen=True)
class Account:
    """The user's account on one host.

    Attributes:
        user: name of the account.
        shell: present login shell of the account.
        facts: words for the statements that are true on the host. Word ``local``: the account is in
            /etc/passwd. Word ``root``: the account is root's. Word ``same``: the present shell is
            the wanted shell, perhaps under another path. Word ``exists``: the host has the wanted
            shell. Word ``listed``: /etc/shells lists the wanted shell. Word ``listed_now``:
            /etc/shells lists the present shell. Word ``chsh``: the host has the program chsh.
    """

    user: str
    shell: str
    facts: frozenset[str]


def decide(account: Account, wanted: str, host: str) -> str:
    """Return the action for an account: DONE, CHANGE, or DIRECTORY for an account in LDAP or NIS.

    Raises:
        HostTrouble: the host does not allow the wanted shell.
    """
    if "same" in account.facts:
        return DONE
    if "local" not in account.facts:
        return DIRECTORY
    needs = {
        "exists": ("no such shell", f"{host} has no {wanted}", "name another shell with --shell"),
        "listed": (
            "shell not allowed",
            f"/etc/shells on {host} does not list {wanted}",
            "name one of the listed shells with --shell",
        ),
        "listed_now": (
            "locked to its shell",
            f"/etc/shells on {host} does not list {account.shell}, and chsh refuses such accounts",
            "ask its administrator",
        ),
        "chsh": ("no chsh", f"{host} has no chsh", "ask its administrator"),
    }
    for fact, (kind, result, fix) in needs.items():
        if fact not in account.facts and not (fact == "listed_now" and "root" in account.facts):
            raise HostTrouble(kind, result, f"{fix}, or keep the shell: {UNNEEDED}")
    return CHANGE


class Visit:
    """A connection to one host, which stays open until a login with the new shell has worked.

    Args:
        host: name of the host.
        wanted: the wanted shell.

    Raises:
        HostTrouble: the host does not answer, or does not allow the wanted shell.
    """

    def __init__(self, host: str, wanted: str) -> None:
        self.host = host
        self.wanted = wanted
        self.remote: Remote = connect(host)
        self.account = self._ask(self.remote)
        self.state = decide(self.account, wanted, host)

    def _ask(self, remote: Remote) -> Account:
        words = remote.run(_PROBE, self.wanted, limit=10).output.split()
        if len(words) < 2:
            raise HostTrouble(
                "account unknown",
                f"{self.host} did not report the login shell of your account",
                f"see it with: ssh -- {self.host} 'getent passwd $USER'",
            )
        return Account(words[0], words[1], frozenset(words[2:]))

    def change(self, password: str) -> str:
        """Change the shell and log in again. If the login fails, change the shell back.

        Raises:
            HostTrouble: the shell was not changed. The attribute ``kind`` is ``password refused``
                if the password is wrong.
        """
        self._chsh(self.wanted, password)
        try:
            self._log_in_again()
        except HostTrouble as trouble:
            old = self.account.shell
            self._chsh(old, password)
            raise HostTrouble(
                "shell restored",
                f"{self.host} could not be used with {self.wanted} ({trouble}), so the login "
                f"shell is {old} again",
                "see what ~/.bashrc and other start-up files do without a terminal: ssh -- "
                f"{self.host} {self.wanted} -c true",
            ) from None
        return "changed"

    def _chsh(self, shell: str, password: str) -> None:
        # PAM reads the password from stdin if stdin is no terminal.
        typed = f"{password}\n".encode()
        done = self.remote.run('chsh -s "$1"', shell, payload=typed, limit=15)
        if done.code == 0:
            return
        text = " ".join((done.errors or done.output).split()).removeprefix("Password: ")
        if "uthentication" in text:
            raise HostTrouble(
                "password refused", f"{self.host} refuses this password: {text}",
                "check that the account is not locked",
            )  # fmt: skip
        raise HostTrouble(
            "chsh failed", f"{self.host} could not change the shell: {text}",
            f"ask the administrator of {self.host}, or keep the shell: {UNNEEDED}",
        )  # fmt: skip

    def _log_in_again(self) -> None:
        if self.remote.here:
            done = self.remote.run('exec "$1" -c "exit 0"', self.wanted, limit=10)
            if done.code:
                raise HostTrouble(
                    "",
                    f"{self.wanted} exits with status {done.code}",
                    "look for the cause in its start-up files",
                )
            return
        with connect(self.host) as second:
            if "same" not in self._ask(second).facts:
                raise HostTrouble(
                    "",
                    "a new login still has the old shell",
                    f"ask the administrator of {self.host}",
                )


def change_all(visits: Sequence[Visit]) -> dict[str, str | HostTrouble]:
    """Ask for the password if one is needed, and change the shell on all hosts at once."""
    by_host = {visit.host: visit for visit in visits}

    def change(password: str, host: str) -> str:
        return by_host[host].change(password)

    if all("root" in visit.account.facts for visit in visits):
        return run_on_all(by_host, partial(change, ""), LIMIT_S)
    return try_password({visit.host: visit.account.user for visit in visits}, change, LIMIT_S)


def parse(words: Sequence[str]) -> Namespace:
    """Return the options, checked before any host is visited."""
    parser = Parser("change_cn_shell", __doc__)
    parser.add_argument("--shell", default="/bin/bash")
    options = parser.parse_args(words)
    if not re.fullmatch(r"(/[A-Za-z0-9_.+-]+)+", options.shell):
        parser.error(f"--shell {options.shell!r} is not the full path of a shell, as /bin/bash is")
    return options


def show(visits: dict[str, Visit | HostTrouble], wanted: str) -> None:
    """Print the present login shell of each host, and the planned change."""
    what = {CHANGE: f"change to {wanted}", DIRECTORY: "nothing", DONE: DONE}
    rows = [
        (host, "", "", visit.kind) if isinstance(visit, HostTrouble) else
        (host, "local" if "local" in visit.account.facts else "directory",
         visit.account.shell, what[visit.state])
        for host, visit in visits.items()
    ]  # fmt: skip
    print(table(("host", "account", "login shell", "to do"), rows))
    fixed = [host for host, visit in split(visits)[0].items() if visit.state == DIRECTORY]
    if fixed:
        print(
            f"\n{', '.join(fixed)}: a directory (LDAP, NIS) keeps the account, so the shell cannot "
            f"be changed there. No change is needed: {UNNEEDED}."
        )
    print_troubles(split(visits)[1])


def main(words: Sequence[str]) -> int:
    """Show the shell of each host, ask for a yes, change it, and return the exit code."""
    options = parse(words)
    hosts = [host.name for host in read_hostfile(options)]
    visits = ask_all(hosts, lambda host: Visit(host, options.shell), LIMIT_S)
    show(visits, options.shell)
    met, troubles = split(visits)
    status = 1 if troubles else 0
    todo = [visit for visit in met.values() if visit.state == CHANGE]
    if not todo:
        return status
    names = ", ".join(visit.host for visit in todo)
    if options.dry_run:
        print(f"\nwould run chsh -s {options.shell} on {names}")
        return status
    need_terminal("a yes and the password", "nothing was changed; run this command in a terminal")
    if not ask(f"\nChange the login shell on {names} to {options.shell}?"):
        raise MotleyError("not confirmed; nothing was changed")
    done = change_all(todo)
    rows = [(h, s.kind if isinstance(s, HostTrouble) else s) for h, s in done.items()]
    print("\n" + table(("host", "state"), rows))
    failed = split(done)[1]
    print_troubles(failed)
    return 1 if failed else status


if __name__ == "__main__":
    run(main)
