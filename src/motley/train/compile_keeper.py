"""Keeps what a run's compilers have made for later runs, and takes what earlier ones have kept.

It lies beside the runs' folders, not in one: the next run is another, and compiles the same. One
rank of each kind of node writes it, after the first steps, so that a run which is killed later
leaves it too, and again at the end, with what evaluations and other batches needed.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from motley.checkpoint.run import Run
from motley.child import ChildTimeoutError, run_child
from motley.cluster.cache_folder import cache_folder
from motley.comm.collectives import all_gather_object
from motley.config.options import Config
from motley.launch.process import compiled_below
from motley.launch.world import World
from motley.measure.process_group import ProcessGroup
from motley.train.compile_archive import ERRORS, Carried, CompileArchive, kind_of, words_of

FOLDER = ".compiled"  # in the folder of all runs
_FIRST_STEPS = 8
_LOOK_S = 1.0
_SAVE_LIMIT_S = 600.0
_LAST_S = 30.0  # that the last one may take; an archive is whole or not there


class CompileKeeper:
    """One rank's part."""

    def __init__(self, world: World, config: Config) -> None:
        self._notes: list[str] = []
        self._since = time.time()
        self._host, self._place = world.host, Path(config.logs) / FOLDER
        self._kind = kind_of(world.nodes[world.rank])
        self._archive = CompileArchive(
            self._place, self._kind, cache_folder(), compiled_below(os.environ)
        )
        self._ends, self._failed = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._run: Run

    def take(self, world: World) -> None:
        """Give each node what was kept by one of its kind; all ranks call it, before anything is
        compiled. What goes wrong ends nothing."""
        told = [each for each in world.once_per_node(self._take) if each is not None]
        took = {host: carried for host, carried, _ in told if carried is not None}
        if took:
            most = max(took.values(), key=lambda carried: carried.size)
            self._notes.append(
                f"compiled code for {', '.join(took)} is taken from {self._place}: {most}"
            )
        troubles = [trouble for _, _, trouble in told if trouble]
        self._notes += troubles
        self._failed = bool(troubles)  # of the place mostly, and it is said

    def take_notes(self) -> list[str]:
        """What is to be said of what was taken, once; on every rank the same."""
        notes, self._notes = self._notes, []
        return notes

    def _take(self) -> tuple[str, Carried | None, str] | None:
        """For all ranks; None where there is nothing to be said."""
        try:
            taken = self._archive.unpack()
        except ERRORS as error:
            said = f"compiled code in {self._place} is not used on {self._host}: {words_of(error)}"
            return self._host, None, said
        return (self._host, taken, "") if taken is not None else None

    def begin(self, run: Run, group: ProcessGroup, step: Callable[[], int | None]) -> None:
        """Keep what is compiled from now on, if this is the first rank of its kind of node; all
        ranks that train call it.

        Args:
            step: that was taken last; called from another thread.
        """
        kinds = all_gather_object(self._kind)
        if kinds.index(self._kind) == group.rank and self._thread is None:
            self._run = run
            self._thread = threading.Thread(
                target=self._keep, args=(step,), name="compile keeper", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """Keep what there is now: the run is over."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _keep(self, step: Callable[[], int | None]) -> None:
        first = None
        while not self._ends.wait(_LOOK_S):
            now = step()
            first = now if first is None else first
            if now is not None and first is not None and now - first >= _FIRST_STEPS:
                self._save()
                break
        self._ends.wait()
        self._save()

    def _save(self) -> None:
        """Save in a process of its own: to pack thousands of files takes Python's lock for
        seconds, and the training thread would launch nothing meanwhile."""
        command = [sys.executable, "-P", "-m", "motley.train.compile_archive", str(self._since)]
        try:
            done = run_child([*command, *self._archive.words], _SAVE_LIMIT_S, "see its disk")
            code, errors = done.returncode, done.stderr
        except ChildTimeoutError as error:
            code, errors = 1, str(error)
        if code:
            if not self._failed:
                said = errors.strip().splitlines() or [f"exit status {code}"]
                text = (
                    f"compiled code is not kept in {self._place}: {said[-1]}; training goes "
                    "on, and another node compiles it again"
                )
                print(f"motley: {self._host}: {text}", flush=True)
                self._run.event("compile_archive", text=text)
            self._failed = True
