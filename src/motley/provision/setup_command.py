"""Functions for the commands of setup/: options, visits to all hosts, tables and questions.

The module also runs other modules of Motley on a host, in the host's Python environment.

Each command visits all hosts of a hostfile at once, and prints one table. For each host with a
fault, the command prints what was found and the fix. Exit status: 0 all is well, 1 some host has a
fault, 2 nothing was begun.
"""

import argparse
import getpass
import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from motley import ROOT
from motley.cluster.hostfile import Host, read_hosts
from motley.cluster.login import Finished
from motley.cluster.ssh import Remote, connect, run_on_all, split
from motley.errors import HostTrouble, MotleyError
from motley.text import escape_unprintable, own_command, typed_command

T = TypeVar("T")

# The environment, and the folder that ranks start in: both are at one path on all hosts.
VENV = Path(os.environ.get("MOTLEY_VENV", ROOT / ".venv")) if ROOT else Path(sys.prefix)
PLACE = ROOT or Path.cwd()
# Folder of the library, for hosts whose environment lacks it.
SOURCES = str(ROOT / "src") if ROOT else ""
TRIES = 3  # how often a user may type a password
_NO_PYTHON = 66
_PYTHON = f"""
python=$1/bin/python sources=$2 module=$3; shift 3
[ -x "$python" ] || exit {_NO_PYTHON}
PYTHONPATH=$sources "$python" -P -m "$module" "$@"
"""


class Parser(argparse.ArgumentParser):
    """The parser of a setup command, with the options that every command has.

    Args:
        name: name of the script in setup/, without the ending ``.sh``.
        doc: the docstring of the command's module, which -h prints.
        visits: True if the command visits hosts, and therefore has the option --hostfile.
        instead: instruction to a user without a clone of the repository. Empty: the command works
            without a clone.
    """

    def __init__(self, name: str, doc: str | None, visits: bool = True, instead: str = "") -> None:
        super().__init__(prog=f"{name}.sh", allow_abbrev=False, add_help=False)
        self._doc, self._refusal = typed_command(str(doc)).strip(), ""
        if instead and not ROOT:
            self._refusal = (
                f"{own_command()} works only in a clone, and this Motley was installed by pip: "
                f"{instead}"
            )
        self.add_argument("-h", "--help", action="help", help="print this text")
        self.add_argument(
            "--dry-run", action="store_true", help=("print every change without making it")
        )
        if visits:
            usual = (Path() if own_command() else PLACE) / "hosts.txt"
            self.add_argument("--hostfile", type=Path, default=usual)

    def format_help(self) -> str:
        """Return the text of -h."""
        return f"{self._refusal or self._doc}\n"

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the options.

        Raises:
            MotleyError: an option is wrong, or the command needs a clone of the repository.
        """
        options = self.parse_args(words)
        if self._refusal:
            raise MotleyError(self._refusal)
        return options

    def error(self, message: str) -> NoReturn:
        """Raise MotleyError with the message, and with a hint to the option -h."""
        raise MotleyError(f"{message}; see bash setup/{self.prog} -h")


def run_python(
    remote: Remote,
    module: str,
    *words: object,
    limit: float,
    payload: bytes | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Finished:
    """Run ``python -m MODULE WORDS...`` in the environment of a host; see :meth:`Remote.run`."""
    return remote.run(
        _PYTHON, VENV, SOURCES, module, *words, payload=payload, limit=limit, on_line=on_line
    )


def run_module(
    host: str,
    module: str,
    *words: object,
    limit: float,
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Return the output of ``python -m MODULE WORDS...`` on a host.

    Args:
        host: name of the host.
        module: name of the module.
        *words: command-line arguments of the module.
        limit: largest duration, in seconds.
        on_line: function that is called with each line of output, at once.

    Raises:
        HostTrouble: the host does not answer, or has no environment, or the module fails.
    """
    with connect(host) as remote:
        done = run_python(remote, module, *words, limit=limit, on_line=on_line)
    if done.code == _NO_PYTHON:
        raise HostTrouble(
            "no environment",
            f"the environment {VENV} is missing",
            "make it with: bash setup/install_cn.sh",
        )
    if done.code:
        last = (done.errors.strip().splitlines() or ["no message"])[-1]
        raise HostTrouble(
            "check failed",
            f"a command fails in the environment: {printable(last)}",
            "find the cause with: bash setup/test_cn_connection.sh",
        )
    return done.output


def printable(text: str) -> str:
    """Return the text without the control characters on which a terminal acts."""
    return "".join(each if each.isprintable() else "?" for each in text)


def read_hostfile(options: argparse.Namespace) -> tuple[Host, ...]:
    """Return the hosts of ``--hostfile``."""
    return read_hosts(options.hostfile)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a text table whose columns are as wide as their longest cell; empty cells show '-'."""
    cells = [list(columns)] + [[str(cell) if cell != "" else "-" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def many(number: int, noun: str, more: str = "s") -> str:
    """Return a number with its noun: 1 file, 2 files."""
    return f"{number} {noun}{more if number != 1 else ''}"


class Trouble(Protocol):
    """A fault and its fix."""

    @property
    def found(self) -> str:
        """Description of the fault."""
        ...

    @property
    def fix(self) -> str:
        """Command or advice that removes the fault."""
        ...


def print_troubles(troubles: Mapping[str, Trouble]) -> None:
    """Print two lines for each host with a fault: what was found, and the fix.

    The line of the fix is never wrapped, because it may be a command to copy. Hosts with equal
    lines share these lines.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for host, trouble in troubles.items():
        result = re.sub(_named(host), "\0", trouble.found)
        alike.setdefault((result, trouble.fix), []).append(host)
    for (result, _), hosts in alike.items():
        trouble, names = troubles[hosts[0]], ", ".join(hosts)
        named = trouble.found.partition(" ")[0].rstrip(":") == hosts[0] or (
            len(hosts) > 1 and "\0" in result
        )
        text = result.replace("\0", names)
        text = text if named else f"{names}: {text}"
        if sys.stdout.isatty():
            text = textwrap.fill(text, width(), break_long_words=False, break_on_hyphens=False)
        print(typed_command(f"\n{text}\n  {trouble.fix}"))


def _named(host: str) -> str:
    """Return a regular expression that matches a host's name, but not as part of a longer word."""
    return rf"(?<![\w.-]){re.escape(host)}(?![\w-]|\.\w)"


def ask_all(
    hosts: Iterable[str], work: Callable[[str], T], limit: float
) -> dict[str, T | HostTrouble]:
    """Call ``work`` for all hosts at once, and show on a terminal how many hosts have answered.

    See :func:`run_on_all`.
    """
    names = list(hosts)
    counter = _Counter(len(names))

    def one(host: str) -> T:
        try:
            return work(host)
        finally:
            counter.one()

    try:
        return run_on_all(names, one, limit)
    finally:
        counter.end()


def ask(question: str) -> bool:
    """Return True if the user answers yes on the terminal. Without a terminal the answer is no."""
    if not sys.stdin.isatty():
        print(f"{question} [y/N] no (there is no terminal to answer in; --yes answers yes)")
        return False
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def ask_password(prompt: str) -> str:
    """Return a password that the user types, without echo.

    The password is written to no file, argv or environment.

    Raises:
        MotleyError: there is no terminal.
    """
    need_terminal("a password", "run this command in a terminal")
    try:
        return getpass.getpass(prompt)
    except EOFError:
        raise KeyboardInterrupt from None


def try_password(
    users: Mapping[str, str], work: Callable[[str, str], T], limit: float
) -> dict[str, T | HostTrouble]:
    """Ask the user for the password, and ask again for the hosts that refuse it.

    Args:
        users: the account's name by host.
        work: function of password and host, called for all hosts at once. After a HostTrouble of
            the kind ``password refused``, the user is asked again.
        limit: seconds for all hosts together.

    Returns:
        The result or the fault of each host.
    """
    done: dict[str, T | HostTrouble] = {}
    remaining = list(users)
    for _ in range(TRIES):
        names = ", ".join(sorted({users[host] for host in remaining}))
        password = ask_password(f"Password of {names} on {', '.join(remaining)}: ")
        answers = run_on_all(remaining, partial(work, password), limit)
        done |= answers
        troubles = split(answers)[1]
        remaining = [host for host, each in troubles.items() if each.kind == "password refused"]
        if not remaining:
            break
        print(f"refused by {', '.join(remaining)}")
    return done


def need_terminal(what: str, fix: str) -> None:
    """Raise MotleyError if there is no terminal."""
    if not sys.stdin.isatty():
        raise MotleyError(f"this command asks for {what}, and has no terminal; {fix}")


class _Counter:
    """A line on the terminal that counts finished hosts: "asked 3 of 8 hosts"."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._lock = threading.Lock()
        self._shown = total > 1 and sys.stderr.isatty()
        self._show()

    def one(self) -> None:
        """Count one more finished host, from any thread."""
        with self._lock:
            self._done += 1
            self._show()

    def end(self) -> None:
        """Clear the line on the terminal. Hosts that finish later are not counted."""
        with self._lock:
            if self._shown:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._shown = False

    def _show(self) -> None:
        if self._shown:
            line = f"\rasked {self._done} of {self._total} hosts"
            print(line, end="", file=sys.stderr, flush=True)


def width() -> int:
    """Return the number of columns of the terminal; 100 in a log."""
    return shutil.get_terminal_size((100, 24)).columns


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """End this process with the exit status that ``main(words)`` returns.

    The status is 2 for an error that the user can correct.
    """
    escape_unprintable()
    try:
        status = main(sys.argv[1:])
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("\nmotley: stopped; run the same command again to continue", file=sys.stderr)
        status = 130
    sys.stdout.flush()
    os._exit(status)  # threads of hosts that never answered must not hold us
