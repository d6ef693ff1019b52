"""What every rank of a run is doing, live: in a terminal, also over ssh, or in a browser.

    python plots/watch.py                             # all runs under logs/; the one that runs
    python plots/watch.py logs/RUN
    python plots/watch.py logs/RUN --once             # as text, and the end
    python plots/watch.py --serve 127.0.0.1:8080      # a page of the same

Reads the records alone, and of them what is new, once a second: the run does not notice. Where
output is no terminal it is as with --once. To see the page from elsewhere, forward the port:
ssh -L 8080:127.0.0.1:8080 HEAD. Bound to another address, the page wants the token that is in the
address which is printed. Exit code: 0, or 2 if there is nothing to watch.
"""

import argparse
import os
import signal
import time
from pathlib import Path

from motley.errors import MotleyError
from motley.live.collect import Collector
from motley.live.runs import Runs
from motley.plotting import watch_page, watch_terminal
from motley.plotting.command import TRAIN, add_collect, warn
from motley.signals import handle_end
from motley.text import escape_unprintable


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path("logs"),
        help="a run's folder, or one that holds runs at any depth, default: logs",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print it, and end")
    parser.add_argument("--serve", metavar="HOST:PORT", help="a page in place of the terminal")
    add_collect(parser)
    return parser.parse_args()


def main() -> int:
    """Watch; return the exit code."""
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
            if args.once or not watch_terminal.is_live():
                return once(runs, args.path, collector)
            return watch_terminal.watch(runs, collector)
    except MotleyError as error:
        warn(error)
        return 2
    except KeyboardInterrupt:
        return 0


def end(number: int, frame: object) -> None:
    """End on a signal, and leave a terminal and a disk as they were."""
    raise SystemExit(128 + number)


def once(runs: Runs, path: Path, collector: Collector) -> int:
    """Print what is known now."""
    runs.look(time.monotonic(), time.time())
    if collector.start(runs.running_followers()):
        collector.wait()
        runs.look(time.monotonic(), time.time())
    if not runs.names:
        raise MotleyError(f"no run under {path}: {TRAIN}")
    watch_terminal.print_once(runs)
    return 0
