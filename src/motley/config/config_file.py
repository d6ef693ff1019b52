"""Options from a file: ``--config FILE.toml``, or the run.json of a run.

A TOML file has one option a line, as users type it without the dashes. Tables are titles. A
run.json gives the options that differ from their defaults, but for those of one launch.

    lr = 3e-4
    batch-size = "64:512:32/10M"
    mixup = 0.2
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.config.parser import OptionParser
from motley.errors import MotleyError

FLAG = "--config"
_OF_ONE_LAUNCH = ("run", "logs", "resume", "hosts", "shares", "profile", "profile_ranks")


def split_config(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the file that a command line names, and the other words.

    Raises:
        MotleyError: no file follows ``--config``, or several are named.
    """
    found, rest, left = list[str](), list[str](), iter(words)
    for word in left:
        name, is_joined, value = word.partition("=")
        if name == FLAG:
            found.append(value if is_joined else next(left, ""))
        else:
            rest.append(word)
    if len(found) > 1 or "" in found:
        raise MotleyError(
            f"{FLAG} takes one file, and {len(list(filter(None, found)))} are named; write it as "
            f"in {FLAG} options.toml"
        )
    return (Path(found[0]) if found else None), rest


@dataclass(frozen=True)
class ConfigFile:
    """Options of a file.

    Attributes:
        values: as they are written there, by the names of options.
        lines: the line of each, from 1; of a run's own file none is known.
        is_run: it is a run.json.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    is_run: bool

    @classmethod
    def read(cls, path: Path) -> "ConfigFile":
        """Read a file.

        Raises:
            MotleyError: it cannot be read, is neither TOML nor a run.json, or has a key twice.
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is no text"
            raise MotleyError(f"{FLAG} {path}: {reason}; name a TOML file or a run.json") from None
        if path.suffix == ".json":
            return cls(path, _options_of_run(path, text), {}, is_run=True)
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise MotleyError(
                f"{path} is no TOML: {error}; write one option a line, as in lr = 3e-4"
            ) from None
        values: dict[str, Any] = {}
        for key, value in _flat(content):
            name = key.replace("-", "_")
            if name in values:
                raise MotleyError(f"{path} has {key} twice; leave one of them")
            values[name] = value
        return cls(path, values, {name: _line_of(text, name) for name in values}, is_run=False)

    def first_words(self) -> list[str]:
        """Return the options that decide which others there are."""
        return [
            word for name in ("task", "recipe") if isinstance(value := self.values.get(name), str)
            for word in (f"--{name}", value)
        ]  # fmt: skip

    def words(self, parser: OptionParser) -> list[str]:
        """Return all options as a user types them.

        Args:
            parser: knows all options.

        Raises:
            MotleyError: an option is unknown, or has no such value.
        """
        found: list[str] = []
        for name, value in self.values.items():
            if self.is_run and (name in _OF_ONE_LAUNCH or not parser.changes(name, value)):
                continue
            try:
                found += parser.words_of(name, value)
            except MotleyError as error:
                line = f", line {self.lines[name]}" if name in self.lines else ""
                raise MotleyError(f"{self.path}{line}: {error}") from None
        return found


def _options_of_run(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)["config"]
        return {str(name): value for name, value in found.items() if name != "task_class"}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MotleyError(
            f'{path} is no run.json: it has no options under "config"; name the file of a run, '
            "as in logs/RUN/run.json, or a TOML file"
        ) from None


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values, those of tables too."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key, value


def _line_of(text: str, name: str) -> int:
    key = re.compile(rf"\s*[\"']?{re.escape(name).replace('_', '[-_]')}[\"']?\s*=")
    return next((n for n, line in enumerate(text.splitlines(), 1) if key.match(line)), 1)
