"""The command line of a training script, made of groups of options."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from motley.config.option import Option, flag_of, options_of
from motley.config.options import GROUPS, Config
from motley.launch.process import launched_rank, stop_usage
from motley.text import did_you_mean


class OneVoice(argparse.ArgumentParser):
    """Argparse for scripts that run on many ranks: help and errors are printed once."""

    def print_help(self, file: object = None) -> None:
        """Print on the first rank alone."""
        if launched_rank() == 0:
            super().print_help()

    def error(self, message: str) -> NoReturn:
        """End with status 2; an unknown option is answered with the nearest known one."""
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2].partition("=")[0]
            message = f"unknown option {word}{did_you_mean(word, self._option_string_actions)}"
        stop_usage(f"{message}; see {self.prog} -h")


class OptionParser(OneVoice):
    """The parser of a training script.

    Args:
        description: the script's docstring, which holds the examples.
        own: groups of options besides those of all scripts.
        registered: what is known of an option elsewhere than where it is declared, by its name.
    """

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
        )
        self.own = tuple(own)
        for group in (*GROUPS, *own):
            self._add_group(group, registered or {})

    def _add_group(self, group: type, registered: Mapping[str, Mapping[str, Any]]) -> None:
        section = self.add_argument_group((group.__doc__ or group.__name__).strip())
        usual = {each.name: each.default for each in dataclasses.fields(group)}
        for name, declared in options_of(group).items():
            declared = dataclasses.replace(declared, **registered.get(name, {}))
            flags = [declared.short] if declared.short else []
            section.add_argument(
                *flags, flag_of(name, declared), dest=name, default=usual[name], help=declared.says,
                **_rest(declared, usual[name]),
            )  # fmt: skip

    def config_of(self, words: argparse.Namespace) -> Config:
        """What was parsed, by groups."""
        given = vars(words)
        own = tuple(group(**{name: given.pop(name) for name in options_of(group)})
                    for group in self.own)  # fmt: skip
        return Config(**given, own=own)


def _rest(declared: Option, usual: Any) -> dict[str, Any]:
    """What argparse wants to know of an option besides its names and its default."""
    if isinstance(usual, bool):
        return {"action": "store_false" if usual else "store_true"}
    rest: dict[str, Any] = {"type": declared.read}
    if declared.choices:
        rest["choices"] = declared.choices
    if declared.metavar:
        rest["metavar"] = declared.metavar
    if declared.bare is not None:
        rest |= {"nargs": "?", "const": declared.bare}
    return rest
