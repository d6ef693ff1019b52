"""Shell completion for the command ``motley``, made by shtab: ``motley completion bash``.

motley completion bash >~/.local/share/bash-completion/completions/motley motley completion zsh
>~/.zfunc/_motley motley completion tcsh >~/.motley.tcsh # then add to ~/.tcshrc: source
~/.motley.tcsh
"""

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from motley.errors import MotleyError
from motley.registry import import_extra
from motley.text import did_you_mean

SHELLS = ("bash", "zsh", "tcsh")
_FOLDERS = ("DIR", "RUN", "RUNS", "LOGS")  # metavars of options that name a folder


class _FoundError(Exception):
    """An exception that carries a command's parser out of its ``main()``."""


def main() -> int:
    """Print the completion for the shell that the command line names; return the exit code."""
    words = sys.argv[1:]
    if words in (["-h"], ["--help"]):
        print(f"usage: motley completion {{{','.join(SHELLS)}}}\n\n{__doc__}")
        return 0
    shell = words[0] if words else ""
    try:
        if shell not in SHELLS or len(words) > 1:
            result = f"{' '.join(words)} is no shell{did_you_mean(shell, SHELLS)}" if words else (
                "no shell is given"
            )  # fmt: skip
            raise MotleyError(
                f"{result}; choose {', '.join(SHELLS)}, as in: motley completion bash"
            )
        shtab = import_extra("shtab", "motley completion", where="")
        cli = importlib.import_module("motley.cli")  # not an import: motley.cli imports this module
        print(shtab.complete(make_parser(cli.COMMANDS, shtab), shell))
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        return 2
    return 0


def make_parser(commands: Mapping[str, Any], shtab: Any) -> argparse.ArgumentParser:
    """Return a parser of all commands, and mark options that take a file name for shtab."""
    whole = argparse.ArgumentParser("motley")
    whole.add_argument("--version", action="store_true")
    below = whole.add_subparsers()
    for name, command in commands.items():
        if name == "completion":
            below.add_parser(name, help=command.says).add_argument("shell", choices=SHELLS)
            continue
        if not command.module:  # a script, and its own words
            below.add_parser(name, help=command.says).add_argument("script").complete = shtab.FILE  # type: ignore[attr-defined]
            continue
        own = get_parser(command.module, *([[]] if command.visits_hosts else []))
        for action in own._actions:
            if action.metavar in _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.type is Path or "FILE" in str(action.metavar):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        below.add_parser(
            name, help=command.says, parents=[own], add_help=False, conflict_handler="resolve"
        )
    return whole


def get_parser(module: str, *given: list[str]) -> argparse.ArgumentParser:
    """Call a command's ``main()``, and return the first parser that it makes.

    Parsers without an option ``-h`` are skipped.

    Args:
        module: the command's module.
        *given: arguments of the module's ``main``.
    """
    main = importlib.import_module(module).main
    with _caught():
        try:
            main(*given)
        except _FoundError as found:
            parser: argparse.ArgumentParser = found.args[0]
            return parser
    raise AssertionError(f"{module} parses no command line")


@contextmanager
def _caught() -> Iterator[None]:
    """Make parsers with ``-h`` raise _FoundError instead of parsing, within the ``with`` block."""
    usual, words = argparse.ArgumentParser.parse_known_args, sys.argv

    def stop(self: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        if "-h" in self._option_string_actions:
            _raise(self)
        return usual(self, *given, **named)

    argparse.ArgumentParser.parse_known_args = stop  # type: ignore[method-assign]
    sys.argv = words[:1]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = usual  # type: ignore[method-assign]
        sys.argv = words


def _raise(parser: argparse.ArgumentParser) -> NoReturn:
    raise _FoundError(parser)
