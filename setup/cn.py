"""What setup's scripts share: their options, the hosts, a table, a question, and the end.

Each script visits all hosts of a hostfile at once, prints one table, and for each host that
is not well what was found and the fix. Exit status: 0 all is well, 1 some host is not, 2
nothing was begun.
"""

import argparse
import getpass
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from motley.errors import MotleyError
from motley.hosts import Host, read_hosts

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(os.environ.get("MOTLEY_VENV", ROOT / ".venv"))


class Parser(argparse.ArgumentParser):
    """The options that every script has; its -h is the head of the .sh beside it."""

    def __init__(self, name: str) -> None:
        super().__init__(prog=f"{name}.sh", allow_abbrev=False, add_help=False)
        self.add_argument("--hostfile", type=Path, default=ROOT / "hosts.txt")
        self.add_argument("--dry-run", action="store_true")

    def error(self, message: str) -> NoReturn:
        """Raise MotleyError."""
        raise MotleyError(f"{message}; see bash setup/{self.prog} -h")


def read_hostfile(options: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts of ``--hostfile``."""
    return read_hosts(options.hostfile)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their longest cell; an empty cell is a '-'."""
    cells = [list(columns)] + [[str(cell) if cell != "" else "-" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def print_troubles(troubles: Mapping[str, object]) -> None:
    """A paragraph for each host that is not well: what was found, and the fix."""
    for host, trouble in troubles.items():
        print(f"\n{host}: {trouble}")


def ask(question: str) -> bool:
    """A yes or no from the terminal; without one nobody says yes."""
    if not sys.stdin.isatty():
        print(f"{question} [y/N] no (there is no terminal to ask on; --yes says yes)")
        return False
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def ask_password(prompt: str) -> str:
    """A password from the terminal, without echo; it is in no file, argv or environment.

    Raises:
        MotleyError: there is no terminal.
    """
    need_terminal("a password", "run this from one")
    try:
        return getpass.getpass(prompt)
    except EOFError:
        raise KeyboardInterrupt from None


def need_terminal(what: str, fix: str) -> None:
    """Raise MotleyError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise MotleyError(f"there is no terminal to ask for {what} on; {fix}")


class Counter:
    """On a terminal, one line that counts hosts as they are done: "asked 3 of 8 hosts"."""

    def __init__(self, verb: str, total: int) -> None:
        self._verb, self._total, self._done = verb, total, 0
        self._lock = threading.Lock()
        self._shown = sys.stderr.isatty()
        self._show()

    def one(self, _host: str) -> None:
        """One more is done; from any thread."""
        with self._lock:
            self._done += 1
            self._show()

    def end(self) -> None:
        """Wipe the line; hosts that are late no longer count."""
        with self._lock:
            if self._shown:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._shown = False

    def _show(self) -> None:
        if self._shown:
            line = f"\r{self._verb} {self._done} of {self._total} hosts"
            print(line, end="", file=sys.stderr, flush=True)


def width() -> int:
    """Columns of the terminal; 100 in a log."""
    return shutil.get_terminal_size((100, 24)).columns


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Exit with what ``main(words)`` returns; 2 for what the user can put right."""
    try:
        status = main(sys.argv[1:])
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("\nmotley: stopped; the same command again goes on from here", file=sys.stderr)
        status = 130
    sys.stdout.flush()
    os._exit(status)  # threads of hosts that never answered must not hold us
