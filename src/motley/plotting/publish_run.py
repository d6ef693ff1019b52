"""Publish the records of a run, from all hosts, to a tracker such as TensorBoard.

    python plots/publish.py logs/RUN --to tensorboard
    python plots/publish.py logs/RUN --to wandb --follow     # until the run ends
    python plots/publish.py logs/RUN --to mlflow --project lab

The command only reads the records of the run, so a running training is not affected. If you repeat
the command, it publishes the records that are new since the last time. A resumed run continues in
the same run of the tracker. To publish all records again, remove logs/RUN/published.*.json. The
command uses no network unless the tracker's own environment variables allow it. The exit code is 0,
or 2 if the run cannot be published.
"""

import argparse
import os
import signal
from pathlib import Path

from motley.cluster.processes import handle_end
from motley.errors import MotleyError
from motley.live.follow import hosts_elsewhere
from motley.live.runs import Collector
from motley.live.words import plain
from motley.plotting.command import add_collect, warn
from motley.publish.publisher import PublishedCounts, Publisher
from motley.publish.trackers import Tracker, trackers
from motley.records.run_folder import open_run
from motley.text import escape_unprintable, plural, typed_command

PROJECT = "motley"


def parse(kinds: dict[str, type[Tracker]]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        description=typed_command(str(__doc__)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="trackers:\n" + "\n".join(f"  {kind.name:13}{kind.says}" for kind in kinds.values()),
    )  # fmt: skip
    parser.add_argument("run", type=Path, help="its folder, as logs/RUN")
    parser.add_argument("--to", required=True, choices=kinds, metavar="TRACKER",
                        help=", ".join(kinds))  # fmt: skip
    parser.add_argument("--follow", action="store_true", help="continue until the run ends")
    parser.add_argument(
        "--project", default=PROJECT, help=f"the tracker's project or experiment, default {PROJECT}"
    )
    add_collect(parser)
    return parser.parse_args()


def main() -> int:
    """Publish the run on the command line, and return the exit code."""
    escape_unprintable()
    try:
        kinds = trackers()
        args = parse(kinds)
        os.nice(19)  # a run on this machine comes first
        kind = kinds[args.to]
        kind.check()
        run = open_run(args.run)
        with (
            Collector(args.collect, whole=True) as collector,
            Publisher(run, kind, args.project, collector.copies(run)) as publisher,
        ):
            end_on_signals(publisher)
            counts = Session(args, publisher, collector).publish()
            for trouble in publisher.left_out():
                warn(trouble)
        print_counts(args, counts)
    except MotleyError as error:
        warn(error)
        return 2
    except KeyboardInterrupt:  # twice: the tracker is not closed, and some records are sent again
        return 130
    return 0


class Session:
    """The publication of one run, with messages about its progress.

    Args:
        args: the command line.
        publisher: publisher of the run.
        collector: collector of the records on other hosts.
    """

    def __init__(
        self, args: argparse.Namespace, publisher: Publisher, collector: Collector
    ) -> None:
        self._args, self._publisher, self._collector = args, publisher, collector
        self._said: set[str] = set()

    def publish(self) -> PublishedCounts:
        """Publish all new records. With ``--follow``, publish until the run ends.

        Returns:
            The counts of published records.
        """
        if self._args.follow:
            print(
                f"publishing {self._args.run} to {self._args.to} until the run ends; Ctrl-C "
                "stops only the publishing"
            )
        return self._publisher.publish(self._args.follow, self._look)

    def _look(self) -> bool:
        """Print the destination, copy other hosts' records, and print hosts whose records lack.

        Returns:
            True if the publisher should read the records again at once.
        """
        follower, where = self._publisher.follower, self._publisher.look
        if where and not self._said:
            self._said.add(where)
            print(f"see it: {where}", flush=True)
        if began := self._collector.start([follower]):
            self._collector.wait()
        else:
            for host in hosts_elsewhere(follower):
                self._warn_host(host, follower.troubles.get(host))
        return began

    def _warn_host(self, host: str, trouble: str | None) -> None:
        if host in self._said or (self._collector.asked and trouble is None):
            return  # the records may still arrive
        self._said.add(host)
        usual = (
            f"--collect reads them by ssh; or copy them into {self._args.run}, and run this "
            "command again"
        )
        warn(
            f"{plain(host)}: its records are not on this machine, and are not published; "
            f"{trouble or usual}"
        )


def end_on_signals(publisher: Publisher) -> None:
    """Set signal handlers that end the publication.

    The first signal ends the publication after the current round, the second one at once.
    """

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.default_int_handler)
        publisher.stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handle_end(number, end)


def print_counts(args: argparse.Namespace, told: PublishedCounts) -> None:
    """Print how many records of each kind were published."""
    if not told.status:
        print(f"{args.run} has no run.json yet, so nothing is published")
        return
    counts = ((told.steps, "step"), (told.evaluations, "evaluation"), (told.events, "event"),
              (told.samples, "sample"))  # fmt: skip
    new = [plural(count, word) for count, word in counts if count]
    print(f"{args.run} to {args.to}: {', '.join(new) or 'nothing new since the last time'}")
    if told.status == "running":
        print(
            "the run is still going on; publish the rest with the same command later, or "
            "continuously with --follow"
        )
