"""The parts that all plot scripts share: command line, warnings, and the place of the PNGs."""

import argparse
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from motley.errors import MotleyError
from motley.text import escape_unprintable, typed_command

if TYPE_CHECKING:  # watch.py starts sooner without matplotlib
    from matplotlib.figure import Figure

TRAIN = "train first, for example: mpirun -np 2 ./entry_cn.sh"


def run_script(
    doc: str,
    draw: Callable[..., int],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    draws: bool = True,
) -> int:
    """Read the command line, draw, and return the exit code.

    Args:
        doc: the script's docstring, which ``-h`` shows.
        draw: function that draws the pictures and returns the exit code. Its arguments are the
            paths to search and, if ``draws`` is True, the folder of ``--out``. The options of
            ``add_options`` are passed by name.
        add_options: function that adds the options that only this script has.
        draws: True if the script draws pictures, and has ``--out``.
    """
    escape_unprintable()
    parser = argparse.ArgumentParser(
        description=typed_command(doc), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = "folders that hold records at any depth, default: logs"
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("logs")], help=where)
    if draws:
        beside = "folder for the PNGs, default: beside the records"
        parser.add_argument("--out", type=Path, metavar="DIR", help=beside)
    add_options(parser)
    given = vars(parser.parse_args())
    paths = given.pop("paths")
    where_to = [given.pop("out")] if draws else []
    try:
        for path in paths:
            if path.name == "run.json":
                raise MotleyError(f"{path} is a file; name the run's folder: {path.parent}")
            if not path.exists():
                raise MotleyError(f"there is no {path}: {TRAIN}")
        return draw(paths, *where_to, **given)
    except MotleyError as error:
        warn(error)
        return 2
    except BrokenPipeError:  # for example, head has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def add_collect(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--collect``, with which a command also reads other hosts' records."""
    parser.add_argument(
        "--collect", action="store_true",
        help="also read, by ssh, the records of hosts that have logs/ on a disk of their own",
    )  # fmt: skip


def draw_all(
    folders: Collection[Path], picture: "Callable[[Path], Figure]", name: str, out: Path | None
) -> int:
    """Write the picture of each folder and print its path.

    After a folder that cannot be drawn, the remaining folders are still drawn.

    Args:
        folders: folders of records. If ``out`` is None, the picture of each folder is written into
            the folder itself.
        picture: function that draws the records of one folder.
        name: file name of the picture, for example ``gpu.png``. If ``out`` is given, the file name
            begins with the name of the folder.
        out: the folder of ``--out``.

    Returns:
        The exit code: 0, or 2 if no picture could be drawn.
    """
    base = os.path.commonpath([folder.resolve().parent for folder in folders])
    code = 2
    for folder in folders:
        path = folder / name
        if out is not None:
            path = out / ".".join((*folder.resolve().relative_to(base).parts, name))
        try:
            save(picture(folder), path)
        except (MotleyError, OSError, ValueError) as error:
            warn(error)
            continue
        print(path)
        code = 0
    return code


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG.

    Raises:
        MotleyError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise MotleyError(
            f"cannot write {path}: {error.strerror}; choose another place with --out DIR"
        ) from None


def warn(message: object) -> None:
    """Print a message on stderr as a warning."""
    print(f"motley: {message}", file=sys.stderr)


def show_progress(message: str) -> None:
    """Print a message that explains a delay on stderr, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"motley: {message}", file=sys.stderr)


def nothing(what: str, paths: list[Path]) -> MotleyError:
    """Return the MotleyError for paths without records of a kind.

    Args:
        what: kind of the records, for the message.
        paths: the paths that were searched.
    """
    return MotleyError(f"no {what} under {', '.join(map(str, paths))}: {TRAIN}")
