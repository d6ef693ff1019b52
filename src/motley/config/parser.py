"""The command line of a training script, made of groups of options.

``--config FILE.toml`` gives options from a file, or from the run.json of a run.

A TOML file has one option per line, named as on the command line without the dashes. The parser
ignores the names of TOML tables. A run.json gives the options that differ from their defaults,
without those that apply to one launch only.

    lr = 3e-4
    batch-size = "64:512:32/10M"
    mixup = 0.2
"""

import argparse
import copy
import dataclasses
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from motley.config import other_tools
from motley.config.option import NONE, Option, get_flag, get_options
from motley.config.options import GROUPS, Config
from motley.errors import MotleyError
from motley.launch.process import launched_rank, stop_usage
from motley.text import did_you_mean, typed_command

_COLUMN = 27  # column at which help texts start


class OneVoice(argparse.ArgumentParser):
    """An argparse parser for scripts that run on many ranks. Only rank 0 prints help and errors.

    Attributes:
        all_of_it: the flag that prints the help of all options.
    """

    all_of_it = "-h"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does. Underscores in option names count as dashes."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(self.own_words(words), namespace)

    def own_words(self, words: Sequence[str]) -> list[str]:
        """Return a command line in which option names have this parser's spelling."""
        return [other_tools.with_dashes(word, self._option_string_actions) for word in words]

    def format_help(self) -> str:
        """Return the text of ``-h``.

        Commands in the text have the form that works in this installation: ``motley train``, or the
        path of a script.
        """
        return typed_command(super().format_help())

    def print_help(self, file: object = None) -> None:
        """Print the help on rank 0 only."""
        if launched_rank() == 0:
            super().print_help()

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with status 2.

        For an unknown option, the error suggests the nearest option.
        """
        if message.startswith("unrecognized arguments: "):
            typed = [word.partition("=")[0] for word in message.split()[2:]]
            options = [word for word in typed if re.match(r"--?[a-zA-Z]", word)]
            words = list(dict.fromkeys(options)) or typed[:1]
            if of_others := [word for word in words if word in _OF_OTHER_LAUNCHERS]:
                stop_usage(
                    f"{of_others[0]} comes from another launcher (DeepSpeed's, or "
                    "torch.distributed.launch), whose ranks Motley cannot connect. Start the "
                    f"ranks as in: mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh {sys.argv[0]}"
                )
            kind = f"unknown option{'s' * (len(words) > 1)}" if options else "unexpected word"
            message = f"{kind} {'; '.join(f'{word}{self.hint(word)}' for word in words)}"
        stop_usage(f"{message}; see {self.prog} {self.all_of_it}")

    def hint(self, word: str) -> str:
        """Return a text that suggests similar options, to append to an error message.

        Args:
            word: the unknown option.
        """
        known = list(self._option_string_actions)
        longer = [name for name in known if name.startswith(word)] if len(word) > 4 else []
        return did_you_mean(word, longer or known, least=0 if longer else _LIKE)


_LIKE = 0.85  # similarity from which a name is a typing error of the nearest one
_OF_OTHER_LAUNCHERS = ("--local_rank", "--local-rank")


class _UsualHelp(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **known: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **known)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, OptionParser)
        parser.print_usual_help()
        parser.exit()


class OptionParser(OneVoice):
    """The parser of a training script.

    Args:
        description: the script's docstring, which contains examples.
        own: groups of options that this script has besides the options of all scripts.
        registered: properties that override an option's declaration, by the option's name.
    """

    all_of_it = "--help-all"

    def __init__(
        self,
        description: str,
        own: Sequence[type] = (),
        registered: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        help_group = self.add_argument_group("help")
        help_group.add_argument("-h", "--help", action=_UsualHelp, help="the usual options")
        help_group.add_argument("--help-all", action="help", help="all options")
        help_group.add_argument(
            "--config", metavar="FILE", default=argparse.SUPPRESS,
            help=(
                "file of options: TOML, with lines such as lr = 3e-4, or a run.json; options on "
                "the command line take precedence"
            ),
        )  # fmt: skip
        self._usual: dict[str, str] = {}  # help in -h, by the option's name
        self._declared: dict[str, Option] = {}
        self.general: dict[str, Any] = {}  # defaults that a task changes, as they were
        self.own: tuple[type, ...] = ()
        self.elsewhere: dict[str, str] = {}  # unknown options, and the task that has them
        for group in (*GROUPS, *own):
            self._add_group(group, registered or {}, (group.__doc__ or group.__name__).strip())
        self.own = tuple(own)

    def hint(self, word: str) -> str:
        """Return a text that suggests other options, to append to an error message.

        Args:
            word: the unknown option, which may be an option of another tool.
        """
        name = other_tools.plain_name(word)
        if name in other_tools.OF_TEXT and "--text" in self._option_string_actions:
            return f": {other_tools.OF_TEXT[name]}"
        if own := other_tools.own_name(word):
            known = own.split()[0] in self._option_string_actions
            task = "" if known else self.elsewhere.get(own.split()[0])
            return f": it is {own}, of {task}" if task else f": it is {own} here"
        if name in self.elsewhere:
            return f": it belongs to {self.elsewhere[name]}"
        if name in other_tools.ANSWERS:
            return f": {typed_command(other_tools.ANSWERS[name])}"
        if not word.startswith("-"):
            return (
                f": each value follows its option; a folder of images is --dataset folder "
                f"--data-dir {word}" if Path(word).is_dir() else ": each value follows its option"
            )  # fmt: skip
        return super().hint(word)

    def own_words(self, words: Sequence[str]) -> list[str]:
        """Return a command line in this parser's spelling, with other tools' options replaced."""
        return other_tools.own_words(words, self._option_string_actions)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise an error for a value that is not allowed, with a hint for other tools' values."""
        is_wrong = action.choices is not None and value not in action.choices
        name = "".join(action.option_strings[:1])
        if is_wrong and (answer := other_tools.answer_value(name, value)):
            raise argparse.ArgumentError(action, f"{value}: {answer}")
        super()._check_value(action, value)

    def add_own(self, group: type, title: str) -> None:
        """Add a group of options that not all scripts have.

        Args:
            group: the group.
            title: title of the group in the help.

        Raises:
            MotleyError: an option of the group is already an option of all scripts.
        """
        taken = {action.dest for action in self._actions}
        for name, declared in get_options(group).items():
            if declared.name in taken or get_flag(declared) in self._option_string_actions:
                raise MotleyError(
                    f"{group.__name__}.{name} would become the option {get_flag(declared)}, which "
                    "every script has already; give it another name"
                )
        self._add_group(group, {}, title)
        self.own = (*self.own, group)

    def set_usual(self, texts: Mapping[str, str]) -> None:
        """Change the defaults of options, for a task with its own defaults.

        Args:
            texts: the defaults by the names of options, as a user types them.
        """
        for name, text in texts.items():
            declared = self._declared[name]
            self.general[name] = declared.to_text(self.get_default(name))
            several = declared.several
            value = tuple(map(declared.read, text.split())) if several else declared.read(text)
            self.set_defaults(**{name: value})

    def print_usual_help(self) -> None:
        """Print the options that most users need, on rank 0 only.

        The text fits on one screen.
        """
        if launched_rank() != 0:
            return
        listed = [each for each in self._actions if each.help != argparse.SUPPRESS]
        shown = [copy.copy(each) for each in listed if each.dest in self._usual]
        for each in shown:
            each.help = self._usual[each.dest]
        screen = argparse.RawDescriptionHelpFormatter(self.prog, max_help_position=_COLUMN)
        screen.add_usage("%(prog)s [OPTIONS]", [], [])
        screen.add_text(self.description)
        screen.start_section("the usual options")
        screen.add_arguments(shown)
        screen.end_section()
        rest = len(listed) - len(shown)
        screen.add_text(f"{self.prog} --help-all lists these and {rest} more.")
        print(typed_command(screen.format_help()), end="", flush=True)

    def _add_group(
        self, group: type, registered: Mapping[str, Mapping[str, Any]], title: str
    ) -> None:
        section = self.add_argument_group(title)
        usual = {each.name: each.default for each in dataclasses.fields(group)}
        for name, declared in get_options(group).items():
            declared = dataclasses.replace(declared, **registered.get(name, {}))
            self._declared[declared.name] = declared
            if declared.usual:
                self._usual[declared.name] = declared.usual
            flags = [declared.short, _flag(declared, usual[name]), declared.former]
            section.add_argument(
                *filter(None, flags), dest=declared.name, default=usual[name], help=declared.says,
                **_rest(declared, usual[name]),
            )  # fmt: skip
            if isinstance(usual[name], bool) and not declared.per_launch:
                self._add_opposite(section, declared, usual[name] is True)

    def _add_opposite(self, section: Any, declared: Option, usual: bool) -> None:
        """Add a hidden option that sets a boolean option back to its default.

        A continued run needs this option, because the checkpoint sets all options that the user
        does not type.
        """
        name = declared.name if usual else f"no_{declared.name}"
        section.add_argument(
            get_flag(dataclasses.replace(declared, name=name, flag="")), dest=declared.name,
            action=f"store_{str(usual).lower()}", default=usual, help=argparse.SUPPRESS,
        )  # fmt: skip

    def find_typed_options(self, words: Sequence[str]) -> frozenset[str]:
        """Return the names of the options that ``words`` set."""
        missing = object()
        blank = argparse.Namespace(**{each.dest: missing for each in self._actions})
        parsed, _ = self.parse_known_args(words, blank)
        return frozenset(name for name, value in vars(parsed).items() if value is not missing)

    def changes(self, name: str, value: Any) -> bool:
        """Return True if a stored value differs from the option's default.

        Args:
            name: name of the option.
            value: value in the form of :meth:`Option.to_text`.
        """
        declared = self._declared.get(name)
        return declared is None or value != declared.to_text(self.get_default(name))

    def make_words(self, name: str, value: Any) -> list[str]:
        """Return an option with a value as words of a command line.

        Args:
            name: name of the option, as in the options' classes.
            value: a text, a number, a boolean, a list of these, or None.

        Raises:
            MotleyError: the option is unknown, or has no such value.
        """
        if name not in self._declared:
            raise MotleyError(f"{name} is not an option{self.hint('--' + name.replace('_', '-'))}")
        actions = [each for each in self._actions if each.dest == name]
        switches = {each.const: each.option_strings[0] for each in actions if each.nargs == 0}
        if switches:
            if not isinstance(value, bool):
                raise MotleyError(f"{name} has to be true or false, and is {value!r}")
            return [switches[value]] if value in switches else []
        (action,) = actions
        if isinstance(value, bool) and action.nargs == "?":
            if value:  # typed without a value
                return [action.option_strings[0]]
            raise MotleyError(f"{name} has to be true, or one of {', '.join(action.choices or ())}")
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, bool | dict) for each in values):
            raise MotleyError(f"{name} has to be a string or a number, and is {value!r}")
        flag = action.option_strings[0]
        texts = [NONE if each is None else str(each) for each in values]
        if action.nargs != "+":
            texts = [",".join(texts)]
        for text in texts:
            self._refuse(action, text)
        return [flag, *texts] if action.nargs == "+" else [f"{flag}={texts[0]}"]

    def _refuse(self, action: argparse.Action, text: str) -> None:
        """Raise MotleyError if a text is not a valid value of an option."""
        flag = action.option_strings[0]
        try:
            read: Any = action.type(text) if callable(action.type) else text
        except (argparse.ArgumentTypeError, MotleyError) as error:
            raise MotleyError(f"{flag} {text}: {error}") from None
        except (TypeError, ValueError):
            kind = getattr(action.type, "__name__", "value")
            raise MotleyError(f"{flag} {text}: the value is not a valid {kind}") from None
        if action.choices is not None and read not in action.choices:
            if answer := other_tools.answer_value(flag, text):
                raise MotleyError(f"{flag} {text}: {answer}")
            raise MotleyError(f"{flag} {text}: choose {', '.join(map(str, action.choices))}")

    def make_config(self, words: argparse.Namespace) -> Config:
        """Return the Config of parsed options.

        Args:
            words: result of ``parse_args``.
        """
        # argparse gives several words as a list.
        given: dict[str, Any] = {name: _as_value(value) for name, value in vars(words).items()}
        own = tuple(
            group(**{
                field: given.pop(declared.name) for field, declared in get_options(group).items()
            })
            for group in self.own
        )  # fmt: skip
        return Config(**given, own=own)


def _as_value(value: Any) -> Any:
    """Return an option's value: a tuple for a list, and None for the single word ``none``."""
    if isinstance(value, list):
        return None if value == [None] else tuple(value)
    return value


def _flag(declared: Option, usual: Any) -> str:
    """Return the flag of an option, which begins with ``--no-`` if the option is on by default."""
    if usual is True and not declared.flag:
        declared = dataclasses.replace(declared, name=f"no_{declared.name}")
    return get_flag(declared)


def _rest(declared: Option, usual: Any) -> dict[str, Any]:
    """Return the arguments of argparse for an option, without its names and its default."""
    if isinstance(usual, bool):
        return {"action": "store_false" if usual else "store_true"}
    rest: dict[str, Any] = {"type": declared.read}
    if usual is None and not (declared.unset or declared.choices or declared.per_launch):
        rest["type"] = _or_none(declared)
    if declared.choices:
        rest["choices"] = declared.choices
    if declared.metavar:
        rest["metavar"] = declared.metavar
    if declared.bare is not None:
        rest |= {"nargs": "?", "const": declared.bare}
    if declared.several:
        rest["nargs"] = "+"
    return rest


def _or_none(declared: Option) -> Callable[[str], Any]:
    """Return a reader that also accepts ``none``, for an option whose default is None.

    A continued run can thus set the option back to its default. The new reader has the name of the
    option's usual reader, because argparse prints this name in errors.
    """

    def read(text: str) -> Any:
        return None if text == NONE else declared.read(text)

    read.__name__ = getattr(declared.read, "__name__", "value")
    return read


FLAG = "--config"
_OF_ONE_LAUNCH = ("run", "logs", "resume", "hosts", "shares", "profile", "profile_ranks")


def split_config(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the file that follows ``--config``, or None, and the other words of a command line.

    Raises:
        MotleyError: no file follows ``--config``, or several are named.
    """
    result, rest, remaining = list[str](), list[str](), iter(words)
    for word in remaining:
        name, is_joined, value = word.partition("=")
        if name == FLAG:
            result.append(value if is_joined else next(remaining, ""))
        else:
            rest.append(word)
    if len(result) > 1 or "" in result:
        raise MotleyError(
            f"{FLAG} takes one file, and {len(list(filter(None, result)))} are given; write it as "
            f"in {FLAG} options.toml"
        )
    return (Path(result[0]) if result else None), rest


@dataclass(frozen=True)
class ConfigFile:
    """The options of a file.

    Attributes:
        path: path of the file.
        values: values as written in the file, by the names of options.
        lines: line number of each option, from 1; empty for a run.json.
        is_run: True if the file is a run.json.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    is_run: bool

    @classmethod
    def read(cls, path: Path) -> "ConfigFile":
        """Read a TOML file or a run.json.

        Raises:
            MotleyError: the file cannot be read, is neither TOML nor a run.json, or repeats a key.
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
                f"{path} is not valid TOML: {error}; write one option per line, as in lr = 3e-4"
            ) from None
        values: dict[str, Any] = {}
        for key, value in _flat(content):
            name = key.replace("-", "_")
            if name in values:
                raise MotleyError(f"{path} has {key} twice; remove one of them")
            values[name] = value
        return cls(path, values, {name: _find_line(text, name) for name in values}, is_run=False)

    def first_words(self) -> list[str]:
        """Return the options ``--task`` and ``--recipe`` of the file as words.

        The parser reads these words first, since other options depend on them.
        """
        return [
            word for name in ("task", "recipe") if isinstance(value := self.values.get(name), str)
            for word in (f"--{name}", value)
        ]  # fmt: skip

    def words(self, parser: OptionParser) -> list[str]:
        """Return all options of the file as words of a command line.

        Args:
            parser: parser that has all options.

        Raises:
            MotleyError: an option is unknown, or has no such value.
        """
        result: list[str] = []
        if self.is_run:  # an older run did not have the defaults of a task
            for name in parser.general.keys() - self.values.keys():
                result += parser.make_words(name, parser.general[name])
        for name, value in self.values.items():
            if self.is_run and (name in _OF_ONE_LAUNCH or not parser.changes(name, value)):
                continue
            try:
                result += parser.make_words(name, value)
            except MotleyError as error:
                line = f", line {self.lines[name]}" if name in self.lines else ""
                raise MotleyError(f"{self.path}{line}: {error}") from None
        return result


def _options_of_run(path: Path, text: str) -> dict[str, Any]:
    try:
        result = json.loads(text)["config"]
        return {str(name): value for name, value in result.items() if name != "task_class"}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MotleyError(
            f'{path} is not the run.json of a run, which has options under "config"; name such a '
            "file, as in logs/RUN/run.json, or a TOML file"
        ) from None


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all keys and values, including those inside tables."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield key, value


def _find_line(text: str, name: str) -> int:
    key = re.compile(rf"\s*[\"']?{re.escape(name).replace('_', '[-_]')}[\"']?\s*=")
    return next((n for n, line in enumerate(text.splitlines(), 1) if key.match(line)), 1)
