"""The command line of the training scripts, with all registered options.

The module also makes the command line that continues a run. A user can paste this line, because
it is complete and quoted.
"""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil

from motley import ROOT
from motley.cluster.launcher import MPIRUN, Launcher, read_launch
from motley.comm.modes import modes, parse_wire
from motley.config.option import format_value, get_flag, get_options
from motley.config.options import GROUPS, Config
from motley.config.parser import ConfigFile, OneVoice, OptionParser, split_config
from motley.engines.strategies import Strategy, StrategyOptions, known_strategies
from motley.errors import MotleyError
from motley.launch.process import stop_usage
from motley.plan.precision import PerRank
from motley.records.run_folder import RunFolder
from motley.tasks.builtin import (
    CLASS_NAMES,
    SAMPLES,
    USUAL,
    get_identity,
    get_task,
    known_tasks,
    task_being_read,
    task_class,
)
from motley.tasks.task import Task
from motley.text import RUN, did_you_mean, own_command

TYPED = "typed options"  # among a checkpoint's options; no option has such a name


def training_parser(
    description: str, strategies: Mapping[str, Strategy] | None = None
) -> OptionParser:
    """Return the parser of a training script.

    Args:
        description: the script's docstring, which contains examples for ``-h``.
        strategies: strategies of the script, by name.
    """
    chosen = strategies or {}
    own = dict.fromkeys(group for each in chosen.values() for group in each.options)
    several = [StrategyOptions] if len(chosen) > 1 else []
    return OptionParser(description, (*several, *own), _registered(chosen))


def make_words(
    task: Task | type[Task] | str, options: Mapping[str, Any], package: str | None
) -> list[str]:
    """Return the command line that is equivalent to a call with a task and options.

    Args:
        task: a task, its class, or its name as in ``--task``.
        options: values of further options by name.
        package: TORCH or ZERO: accept the strategies of torch or of DeepSpeed. None: accept no
            strategy.

    Raises:
        MotleyError: an option is unknown or its value is not valid, or the class of the task is not
            the one that its file defines.
    """
    name = task if isinstance(task, str) else _find_file(task)
    parser = training_parser("", known_strategies(package) if package else None)
    words = ["--task", name]
    add_task(parser, words)
    loaded = parser.own[-1]
    kind = loaded if isinstance(task, str) else task if isinstance(task, type) else type(task)
    if kind.__qualname__ != loaded.__qualname__:
        raise MotleyError(
            f"{name} has two tasks, {loaded.__name__} and {kind.__name__}; move one of them into "
            "another file"
        )
    if isinstance(task, Task):
        for field, declared in get_options(loaded).items():
            value = declared.to_text(getattr(task, field))
            if parser.changes(declared.name, value):
                words += parser.make_words(declared.name, value)
    for key, value in options.items():
        if key == "config":
            words += ["--config", str(value)]
        elif value is not None or parser.get_default(key) is not None:
            words += parser.make_words(key, list(value) if isinstance(value, tuple) else value)
    return words


def _find_file(task: Task | type[Task]) -> str:
    """Return the path of the file that defines a task, or the name of a built-in task.

    Raises:
        MotleyError: the task is defined in no file.
    """
    kind = task if isinstance(task, type) else type(task)
    for name, known in known_tasks().items():
        if kind is known:
            return name
    path: str | None = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if path is None or not Path(path).is_file():
        raise MotleyError(
            f"{kind.__name__} is not defined in a file, and each rank imports the class from its "
            "file; move the class into a file, such as mine.py"
        )
    return os.path.relpath(path)


_called: list[str] = []


def check_call(name: str) -> None:
    """Raise MotleyError if a script starts a training while it is imported for its task.

    If a script starts a second training, the process ends with a usage error.

    Args:
        name: name of the function that starts the training, for the message.
    """
    if file := task_being_read():
        raise MotleyError(
            f"{file} calls {name} while it is imported for its task; put the call below: if "
            '__name__ == "__main__":'
        )
    if _called:
        stop_usage(
            f"{name} is called after {_called[0]}, and a script starts the ranks only once; call "
            "it in another script"
        )
    _called.append(name)


def config_from(saved: Mapping[str, Any]) -> Config:
    """Return the options of a run, given the values that its checkpoint stores.

    The result has the options that all scripts share, and the options of the run's task.
    """
    general: dict[str, Any] = {}
    for group in GROUPS:
        general |= _values(group, saved)
    task = task_class(general.get("task", USUAL))
    return Config(**general, own=(task(**_values(task, saved)),))


def restore_options(config: Config, saved: Mapping[str, Any]) -> Config:
    """Return the options of a run that continues from a checkpoint.

    An option that the user did not type gets the checkpoint's value, unless the option applies to a
    single launch. The options of a recipe (``--recipe``) count as typed only if the checkpoint has
    another recipe.

    Args:
        config: the options of this launch.
        saved: the options that the checkpoint stores.

    Raises:
        MotleyError: the checkpoint is of another task.
    """
    if saved.get("task_class") not in (None, type(get_task(config)).__name__):
        raise MotleyError(
            f"the checkpoint was trained with --task {saved.get('task')}, and this launch has "
            f"--task {config.task}; add --task {saved.get('task')}"
        )
    task, typed = get_task(config), config.typed_names
    if getattr(task, "recipe", None) != saved.get("recipe"):
        typed |= config.recipe_names

    def taken(group: type) -> dict[str, Any]:
        declared = get_options(group)
        return {
            field: value for field, value in _values(group, saved).items()
            if declared[field].name not in typed and not declared[field].per_launch
            and not _is_for_single_ranks(value)
        }  # fmt: skip

    own = tuple(replace(each, **taken(type(each))) for each in config.own)
    general: dict[str, Any] = {}
    for group in GROUPS:
        general |= taken(group)
    # Checkpoints of earlier versions do not store what was typed. Their schedule ended with
    # --epochs.
    continued = frozenset(saved.get(TYPED, ["epochs"])) - typed
    typed |= continued
    # A checkpoint without an option is older than the task's own default for it.
    usual = {each.name: each.default for group in GROUPS for each in fields(group)}
    for name in task.usual.keys() - saved.keys() - typed:
        general[name] = usual[name]
    if "epochs" in typed:  # --max-steps then only ends one launch, not the run
        general.pop("max_steps", None)
    return replace(config, **general, own=own, typed_names=typed, continued_names=continued)


def list_different_options(config: Config, other: Config) -> list[str]:
    """Return the options whose values differ from ``other``, such as ``--lr 0.0003``."""
    before = {name: declared.to_text(value) for name, declared, value in other.options()}
    return [
        f"{get_flag(declared)} {format_value(text)}" for name, declared, value in config.options()
        if (text := declared.to_text(value)) != before.get(name)
    ]  # fmt: skip


def _is_for_single_ranks(value: Any) -> bool:
    """Return True if a value has one entry per rank, so that it fits only one launch."""
    return isinstance(value, PerRank) and not value.for_all


def options_to_save(config: Config) -> dict[str, Any]:
    """Return the options in the form that a checkpoint stores and :func:`restore_options` reads."""
    typed, task = sorted(config.typed_names | config.recipe_names), get_task(config)
    about = {CLASS_NAMES: list(task.class_names), SAMPLES: task.sample_list, TYPED: typed}
    return {**config.as_json(), **get_identity(config), **about}


def _values(group: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``saved`` whose names are fields of a class of options."""
    registered, result = _registered({}), dict[str, Any]()
    for field, declared in get_options(group).items():
        if declared.name in saved:
            declared = replace(declared, **registered.get(declared.name, {}))
            result[field] = declared.from_text(saved[declared.name])
    return result


def _registered(strategies: Mapping[str, Strategy]) -> dict[str, dict[str, Any]]:
    """Return the properties of the options whose help texts list registered tasks or modes.

    The result has the help text, choices and other properties by the name of the option.
    """
    kinds = modes().values()
    return {
        "task": {
            "says": (
                f"task to train: {', '.join(known_tasks())} (default: {USUAL}), or a file with a "
                "task of your own; its options are the last ones in this list"
            ),
        },
        "wire": {
            "read": parse_wire,
            "metavar": "|".join(("auto", *(kind.usage for kind in kinds))),
            "says": (
                f"how gradients are added up: {'; '.join(kind.says for kind in kinds)}. auto "
                "(default): exact, or 16 bits if that is faster and some rank computes in 16 bits "
                "anyway. exact/leafK, or with bf16 or fp16, spares the slow link of rank K; auto "
                "chooses it too"
            ),
        },
        "strategy": {
            "choices": tuple(strategies),
            "says": "; ".join(f"{name}{each.says}" for name, each in strategies.items()),
        },
    }  # fmt: skip


def read_config(
    parser: OptionParser, arguments: Sequence[str] | None = None, strict: bool = True
) -> Config:
    """Return the options of a training script's command line. End the process on an error.

    Args:
        parser: the parser with all options of the script.
        arguments: words of the command line; None: the words of this process's command line.
        strict: True: an unknown word is an error. False: unknown words are ignored.
    """
    try:
        path, own = split_config(sys.argv[1:] if arguments is None else arguments)
        file = ConfigFile.read(path) if path else None
        recipe = add_task(parser, [*(file.first_words() if file else ()), *own])
        own = [*(file.words(parser) if file else ()), *own]
        words = [*recipe, *own]
        known, unknown = parser.parse_known_args(words)
        if unknown and strict:
            parser.parse_args(words)  # reports the error
        typed = parser.find_typed_options(own)
        of_recipe = parser.find_typed_options(recipe) - typed
        config = replace(parser.make_config(known), typed_names=typed, recipe_names=of_recipe)
        if config.resume is None:  # otherwise train() checks the options of the checkpoint, too
            get_task(config).check_options()
        return config
    except MotleyError as error:
        parser.error(str(error))


def add_task(parser: OptionParser, arguments: Sequence[str] | None = None) -> list[str]:
    """Add the options of the task that the command line names to a parser.

    Returns:
        The command-line words of the recipe that ``--recipe`` names. The caller puts these words
        before the user's words.

    Raises:
        MotleyError: the task or the recipe is unknown.
    """
    first = OneVoice(add_help=False, allow_abbrev=False)
    first.error = parser.error  # type: ignore[method-assign]
    first.add_argument("--task", default=USUAL)
    first.add_argument("--recipe")
    requested = first.parse_known_args(arguments)[0]
    task = task_class(requested.task)
    parser.add_own(task, f"--task {requested.task}")
    parser.set_usual(task.usual)
    parser.elsewhere = {
        get_flag(declared): f"--task {name}"
        for name, other in known_tasks().items() for declared in get_options(other).values()
    }  # fmt: skip
    if requested.recipe is None or not task.recipes:  # then it is an unknown option
        return []
    if requested.recipe not in task.recipes:
        raise MotleyError(
            f"--recipe {requested.recipe} is unknown"
            f"{did_you_mean(requested.recipe, task.recipes)}; choose "
            f"{', '.join(task.recipes)}"
        )
    return task.recipes[requested.recipe].split()


_ENTRY, _COMMAND, _KEEPER = "entry_cn.sh", "motley", "motley.provision.keep_training"
_REPLACED = ("--run", "--resume", "--logs")
_STARTERS = {Launcher.MPI: "mpirun", Launcher.SLURM: "srun", Launcher.TORCHRUN: "torchrun"}


def make_resume_line(folder: RunFolder) -> str:
    """Return the command line that continues this run.

    The result is the user's own command line with ``--run`` and ``--resume auto``.
    """
    line = _launcher_line()
    command = own_command()
    # A folder may have the command's name, as in mpirun --wdir ~/motley.
    at = next((n for n, word in enumerate(line, 1) if _starts(command, word, line[n:])), None)
    if at is not None:
        begin, words = shlex.join(line[:at]), line[at:]
    else:  # rank 0 is on another host than its launcher
        typed = _COMMAND if command else f"./{_ENTRY}" if ROOT else f"{_COMMAND} {RUN}"
        starter = _STARTERS.get(read_launch().by)
        begin = f"{starter} ... {typed}" if starter else typed
        script = os.path.relpath(sys.argv[0], ROOT)
        words = [command or script, *sys.argv[1:]]
    logs = folder.path.parent
    place = [] if logs == Path("logs") else ["--logs", str(logs)]
    rest = [*_without_place(words), *place, "--run", folder.path.name, "--resume", "auto"]
    return f"{begin} {shlex.join(rest)}"


def _starts(command: str, word: str, rest: Sequence[str]) -> bool:
    """Return True if a word of the launcher's command line is the program that each rank runs.

    Args:
        command: subcommand of ``motley`` that runs this process; empty for a script.
        word: the word.
        rest: the words that follow ``word``.
    """
    if Path(word).name == _COMMAND:
        return list(rest[:1]) == [command or RUN]
    return Path(word).name == _ENTRY and not command


def _without_place(words: Sequence[str]) -> Iterator[str]:
    """Yield the words without the options ``--run``, ``--resume``, ``--logs`` and their values."""
    before = ""
    for word in words:
        is_value = before in _REPLACED and not word.startswith("-")  # --resume needs no value
        if not is_value and word.partition("=")[0] not in _REPLACED:
            yield word
        before = word


def _launcher_line() -> list[str]:
    """Return the words of the user's command line of mpirun or keep_training.sh.

    The list is empty if neither program is a parent of this process.
    """
    line: list[str] = []
    try:
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            names = [Path(word).name for word in words]
            if _KEEPER in names:  # the hostfile of its mpirun may be removed afterwards
                return ["bash", "setup/keep_training.sh", *words[names.index(_KEEPER) + 1 :]]
            if _COMMAND in names and words[names.index(_COMMAND) + 1 :][:1] == ["keep"]:
                return words[names.index(_COMMAND) :]
            if parent.name() in MPIRUN and not line:
                # Open MPI 5 becomes prterun, Open MPI 4 is a link to orterun.
                first = "mpirun" if names[0].endswith("terun") else words[0]
                line = [first, *words[1:]]
    except (psutil.Error, IndexError):  # a process of another user, or one that has ended
        pass
    return line
