"""Show the live state of every rank of a run, in a terminal (also over ssh) or in a browser.

    python plots/watch.py                             # runs under logs/; opens a single running one
    python plots/watch.py logs/RUN
    python plots/watch.py logs/RUN --once             # print the state as text, and end
    python plots/watch.py --serve 127.0.0.1:8080      # serve the state as a page

Once per second, the command reads the new records of the run. The run is not affected. If the
output is not a terminal, --once is implied. To see the page from another machine, forward the port:
ssh -L 8080:127.0.0.1:8080 HEAD. If the address after --serve is not 127.0.0.1, the page needs a
token, which is part of the printed address. The exit code is 0, or 2 if there is nothing to watch.
"""

import argparse
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from motley.cluster.processes import handle_end
from motley.errors import MotleyError
from motley.live.runs import GLANCE_S, Collector, Runs
from motley.live.snapshot import Snapshot
from motley.plotting import watch_page
from motley.plotting.command import TRAIN, add_collect, warn
from motley.plotting.watch_screen import ASCII, BLOCKS, Signs, Sort, View, runs_screen, screen
from motley.text import escape_unprintable, typed_command


class Key(Enum):
    """An action that the user requests with a key."""

    QUIT = "quit"
    SORT = "sort"
    UP = "up"
    DOWN = "down"
    OPEN = "open"
    BACK = "back"


_KEYS = {
    b"q": Key.QUIT, b"Q": Key.QUIT, b"\x03": Key.QUIT, b"\x04": Key.QUIT, b"s": Key.SORT,
    b"\x1b[A": Key.UP, b"\x1bOA": Key.UP, b"k": Key.UP, b"\x1b[B": Key.DOWN, b"\x1bOB": Key.DOWN,
    b"j": Key.DOWN, b"\r": Key.OPEN, b"\n": Key.OPEN, b" ": Key.OPEN, b"\x1b": Key.BACK,
    b"\x7f": Key.BACK,
}  # fmt: skip
_ESCAPE_S = 0.05  # seconds in which the rest of a key code follows an escape


class Keys:
    """A context manager that reads the keys that the user presses.

    If stdin is not a terminal, :meth:`wait` never returns a key.
    """

    def __enter__(self) -> "Keys":
        self._file = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._typed = b""
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    @property
    def there(self) -> bool:
        """True if stdin is a terminal with a keyboard."""
        return self._file is not None

    def wait(self, seconds: float) -> Key | None:
        """Wait up to ``seconds`` for a known key, and return its action, or None."""
        if self._file is None:
            time.sleep(max(0.0, seconds))
            return None
        if not self._typed and not _ready(self._file, seconds):
            return None
        pressed = self._next()
        if pressed == b"\x1b" and (self._typed or _ready(self._file, _ESCAPE_S)):
            follows = self._next()
            if follows in (b"[", b"O"):
                pressed += follows + self._next()
            else:  # the code of another key
                self._typed = follows + self._typed
        if not pressed:  # the terminal is gone
            return Key.QUIT
        return _KEYS.get(pressed)

    def _next(self) -> bytes:
        if not self._typed and self._file is not None:
            self._typed = os.read(self._file, 64)
        first, self._typed = self._typed[:1], self._typed[1:]
        return first


def _ready(file: int, seconds: float) -> bool:
    return bool(select.select([file], [], [], max(0.0, seconds))[0])


_TEXT_WIDTH = 120
_LIKE = str.maketrans({"°": " ", "↑": "^", "↓": "v", "…": "~"})


def is_live() -> bool:
    """Return True if the output goes to a terminal on which the live view can be drawn."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


def choose_signs(console: Console) -> Signs:
    """Return the characters for bars and curves that the console can show."""
    return BLOCKS if console.encoding.lower().startswith("utf") else ASCII


def print_once(runs: Runs) -> None:
    """Print the current state of the runs.

    If there are several runs, only the running ones are printed in full.
    """
    width = shutil.get_terminal_size((_TEXT_WIDTH, 24)).columns
    width = width if sys.stdout.isatty() else max(width, _TEXT_WIDTH)
    console = Console(width=width, highlight=False)
    signs, view, wall = choose_signs(console), View(keys=False), time.time()
    known = [runs.snapshot(name, wall) for name in runs.names]
    shown = [each for each in known if each is not None]
    lines = [] if len(shown) == 1 else runs_screen(shown, view, width, None, signs)
    for now in shown:
        if len(shown) == 1 or now.status == "running":
            lines += [Text()] if lines else []
            lines += screen(now, view, width, None, signs)
    for line in plain_where_needed(lines, signs):
        line.rstrip()
        console.print(line, no_wrap=True, overflow="crop")


def plain_where_needed(lines: Sequence[Text], signs: Signs) -> Sequence[Text]:
    """Return the lines, without the characters that an ASCII terminal cannot show.

    If the terminal is not limited to ASCII, the lines are unchanged.
    """
    if signs is ASCII:
        for line in lines:
            text = line.plain.translate(_LIKE)
            line.plain = "".join(each if each.isascii() else "?" for each in text)
    return lines


def watch(runs: Runs, collector: Collector) -> int:
    """Show the live view until the user quits, and return the exit code.

    The screen is drawn after each reading of the records, each key, and each change of its size.
    """
    for name in ("COLUMNS", "LINES"):  # a shell's variables do not follow the window's size
        os.environ.pop(name, None)
    console = Console(highlight=False)
    signs, view = choose_signs(console), View()
    with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        view = view if keys.there else replace(view, keys=False)
        size, shown, key = None, None, None
        while key is not Key.QUIT:
            view = view if key is None else after(view, key, shown, runs)
            looked = runs.look_if_due(time.monotonic(), time.time())
            if looked:
                collector.start(runs.running_followers())
            if looked or key is not None or console.size != size:
                size = console.size
                lines, shown = _draw(runs, view, size.width, size.height, signs)
                for line in plain_where_needed(lines, signs):
                    line.no_wrap, line.overflow = True, "crop"
                live.update(Group(*lines), refresh=True)
            key = keys.wait(GLANCE_S)
    return 0


def _draw(
    runs: Runs, view: View, width: int, height: int, signs: Signs
) -> tuple[list[Text], Snapshot | None]:
    """Return the lines of the screen, and the snapshot of the run that the screen shows.

    The snapshot is None if the screen shows all runs.
    """
    wall, names = time.time(), runs.names
    name = opened(view, runs)
    if name:
        rank = view.rank if view.history else None
        now = runs.snapshot(name, wall, rank=rank)
        if now is not None:
            return screen(now, view, width, height, signs), now
    known = [runs.snapshot(each, wall) for each in names]
    lines = runs_screen([each for each in known if each], view, width, height, signs)
    return lines, None


def opened(view: View, runs: Runs) -> str:
    """Return the name of the run to show: the chosen run, the only run, or the only running run.

    The result is empty if the screen shows all runs.
    """
    if view.opened:
        return view.run
    names, running = runs.names, runs.running()
    if view.listed and len(names) > 1:
        return ""
    return names[0] if len(names) == 1 else running[0] if len(running) == 1 else ""


def after(view: View, key: Key, now: Snapshot | None, runs: Runs) -> View:
    """Return the view after the user has pressed a key.

    Args:
        view: the view before.
        key: the action of the key.
        now: snapshot of the run that the screen shows; None: the screen shows all runs.
        runs: the runs.
    """
    step = {Key.UP: -1, Key.DOWN: 1}.get(key, 0)
    if now is None:
        names = runs.names
        place = names.index(view.run) + step if view.run in names else 0
        if names and step:
            return replace(view, run=names[max(0, min(place, len(names) - 1))])
        return replace(view, opened=True) if key is Key.OPEN and view.run in names else view
    if key is Key.SORT:
        order = list(Sort)
        return replace(view, sort=order[(order.index(view.sort) + 1) % len(order)])
    if key is Key.OPEN:
        chosen = view if view.rank is not None else view.move(now.rows, 0)
        return replace(chosen, history=not view.history)
    if key is Key.BACK and view.history:
        return replace(view, history=False)
    if key is Key.BACK:
        return replace(view, opened=False, listed=True, rank=None)
    return view.move(now.rows, step)


def parse() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description=typed_command(str(__doc__)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path("logs"),
        help="a run's folder, or one that holds runs at any depth, default: logs",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print it, and end")
    parser.add_argument(
        "--serve", metavar="HOST:PORT", help=("serve a page instead of the view in the terminal")
    )
    add_collect(parser)
    return parser.parse_args()


def main() -> int:
    """Show the runs on the command line live, and return the exit code."""
    escape_unprintable()
    args = parse()
    os.nice(19)  # a run on this machine comes first
    for number in (signal.SIGTERM, signal.SIGHUP):
        handle_end(number, end)
    handle_end(signal.SIGINT, signal.default_int_handler)
    try:
        if not args.path.is_dir():
            raise MotleyError(f"there is no folder {args.path}: {TRAIN}")
        with Collector(args.collect) as collector:
            runs = Runs(args.path, collector.copies)
            if args.serve:
                return watch_page.serve(runs, args.serve, collector)
            if args.once or not is_live():
                return once(runs, args.path, collector)
            return watch(runs, collector)
    except MotleyError as error:
        warn(error)
        return 2
    except KeyboardInterrupt:
        return 0


def end(number: int, frame: object) -> None:
    """Raise SystemExit on a signal, so that the terminal is restored and files are removed."""
    raise SystemExit(128 + number)


def once(runs: Runs, path: Path, collector: Collector) -> int:
    """Print the current state of the runs, and return the exit code."""
    runs.look(time.monotonic(), time.time())
    if collector.start(runs.running_followers()):
        collector.wait()
        runs.look(time.monotonic(), time.time())
    if not runs.names:
        raise MotleyError(f"no run under {path}: {TRAIN}")
    print_once(runs)
    return 0
