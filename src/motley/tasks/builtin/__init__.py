"""The built-in tasks, one per file, and the search for the task that ``--task`` names.

The option ``--task`` names a built-in task, or a user's file that defines a task.
"""

import dataclasses
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

from motley import ROOT
from motley.config.options import Config
from motley.errors import MotleyError
from motley.registry import entries, is_subclass
from motley.tasks.task import Task
from motley.text import did_you_mean

USUAL = "image"
# Keys among the options that a checkpoint keeps; no option has such a name.
CLASS_NAMES, SAMPLES = "class names", "list of samples"
_MUST = ("model", "data", "losses")


def known_tasks() -> dict[str, type[Task]]:
    """Return the classes of the built-in tasks by name."""
    form = '("name", a subclass of Task)'
    return dict(entries(__name__, "TASKS", _is_entry, form, "weather"))


def _is_entry(item: object) -> bool:
    pair = item if isinstance(item, tuple) and len(item) == 2 else ("", None)
    return isinstance(pair[0], str) and is_subclass(pair[1], Task)


def get_task(config: Config) -> Task:
    """Return the task that a configuration names, or the default task."""
    return next((each for each in config.own if isinstance(each, Task)), known_tasks()[USUAL]())


def get_identity(config: Config) -> dict[str, Any]:
    """Return the values that must be equal in a checkpoint and the run that continues it.

    Options are not among the values, because they are compared separately.
    """
    task = get_task(config)
    return {"task_class": type(task).__name__, **task.identity()}


def check_classes(task: Task, saved: Mapping[str, Any]) -> None:
    """Raise MotleyError if the names of the task's classes differ from those of a checkpoint.

    Args:
        task: the task of this run.
        saved: values of the options in the checkpoint, by name.
    """
    before, now = saved.get(CLASS_NAMES), list(task.class_names)
    if not before or not now or before == now:
        return
    pairs = zip_longest(now, before, fillvalue="missing")
    number, (here, there) = next(
        result for result in enumerate(pairs) if result[1][0] != result[1][1]
    )
    raise MotleyError(
        f"the class labels are not those of the checkpoint: class {number} is {here!r} in the "
        f"data and {there!r} in the checkpoint ({len(now)} and {len(before)} classes). Give the "
        "class folders their former names, or start a new run with --initial-checkpoint"
    )


def task_class(name: str) -> type[Task]:
    """Return the task class that a value of ``--task`` names.

    Raises:
        MotleyError: there is no such task or file, or the file does not define one task.
    """
    known = known_tasks()
    if name in known:
        return known[name]
    if not name.endswith(".py"):
        raise MotleyError(
            f"--task {name} is unknown{did_you_mean(name, known)}; choose {', '.join(known)}, or "
            "name a file with a task of your own, as in examples/my_task.py"
        )
    places = [Path(), ROOT] if ROOT else [Path()]
    path = next((place / name for place in places if (place / name).is_file()), None)
    if path is None:
        raise MotleyError(f"--task {name}: the file does not exist")
    return _only_task(name, _load(name, path))


_reading: list[str] = []  # files of tasks that are being imported


def task_being_read() -> str:
    """Return the path of the task file that is being imported, or an empty string."""
    return _reading[-1] if _reading else ""


def _load(name: str, path: Path) -> ModuleType:
    title = f"motley_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(title, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # dataclasses search their module there
    _reading.append(name)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise MotleyError(
            f"--task {name}, line {error.lineno}: {error.msg}{f': {line}' if line else ''}"
        ) from None
    except ModuleNotFoundError as error:
        raise MotleyError(
            f"--task {name} imports {error.name}, which is not installed; install it on all "
            f"hosts, as in: .venv/bin/pip install {str(error.name).partition('.')[0]}"
        ) from None
    except MotleyError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename == str(path)]  # fmt: skip
        where = f", line {lines[-1]}" if lines else ""
        raise MotleyError(f"--task {name}{where}: {type(error).__name__}: {error}") from error
    finally:
        _reading.pop()
    return module


def _only_task(name: str, module: ModuleType) -> type[Task]:
    own = [
        value for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task)
        and value.__module__ == module.__name__
    ]  # fmt: skip
    last = [kind for kind in own if not any(kind in other.__mro__[1:] for other in own)]
    if not last:
        raise MotleyError(
            f"--task {name} defines no task: no class in the file is derived from "
            "motley.tasks.task.Task; see examples/my_task.py"
        )
    if len(last) > 1:
        names = " and ".join(kind.__name__ for kind in last)
        raise MotleyError(f"--task {name} defines {len(last)} tasks, {names}; keep one per file")
    (kind,) = last
    return _check_complete(name, kind)


def _check_complete(name: str, kind: type[Task]) -> type[Task]:
    """Check a task's class, and return it as a dataclass.

    Raises:
        MotleyError: the class lacks a method that every task needs, or has an ``__init__``.
    """
    if missing := [each for each in _MUST if getattr(kind, each) is getattr(Task, each)]:
        raise MotleyError(
            f"--task {name}: {kind.__name__} has no {_and(missing)}; see examples/my_task.py"
        )
    if not dataclasses.is_dataclass(kind) or "__dataclass_fields__" not in vars(kind):
        if "__init__" in vars(kind):
            raise MotleyError(
                f"--task {name}: {kind.__name__} has an __init__; declare its options as fields, "
                "with @dataclass before the class"
            )
        kind = dataclasses.dataclass(kind)
    return kind


def _and(words: Sequence[str]) -> str:
    return " and no ".join(f"{word}()" for word in words)
