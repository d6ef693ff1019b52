"""The connection of a user's own script to the other ranks, until the script ends."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

import torch
import torch.distributed as dist

from motley.cluster.launcher import cores_per_rank, leave_default_binding, read_launch
from motley.comm.collectives import all_gather_object
from motley.errors import MotleyError
from motley.faults import Phase
from motley.launch.world import World, start_rank
from motley.measure.process_group import ProcessGroup, join_process_group, leave_process_group
from motley.plan.precision import read_precisions
from motley.train.group_rebuild import GroupRebuild

_LEAVE_S = 3.0  # seconds that this rank waits for the other ranks' end


class Session:
    """The ranks that train in a user's own script, and their process group.

    An uncaught error of one rank ends all ranks, as with ``motley train``. A rank that has no
    device of its own leaves the script, and waits until the other ranks end.

    Args:
        precision: precision of ``lab.autocast()``, or auto; see ``--precision``.

    Attributes:
        world: the ranks that train, which exchange values through their process group.
        group: process group of the ranks that train.
        before_end: function that is called at the end of the script, while other ranks may still be
            in a collective.
        rebuild: object that forms a new process group of the survivors after a rank is lost.
        finish: function that waits until all ranks have ended their scripts.
    """

    def __init__(self, precision: str) -> None:
        _use_all_cores()
        launched = start_rank()
        self.world: World = launched
        self.before_end: Callable[[], None] = lambda: None
        self.finish: Callable[[], None] = launched.supervisor.finish
        self._failed = False
        self._usual_hook = sys.excepthook
        self.catch_errors()
        launched.supervisor.set_status(Phase.BUILD, None)
        self.rebuild = GroupRebuild(launched)  # it records the connections from before the group
        group = join_process_group(launched, read_precisions(precision))
        atexit.register(self._end)
        self.join_group(group)
        if group.rank is None:
            for line in group.describe_left_out():
                print(f"motley: {line}", file=sys.stderr, flush=True)
            self.finish = self._finish_left_out
            sys.exit(0)  # _end() then waits for the other ranks

    def join_group(self, group: ProcessGroup) -> None:
        """Set the present process group. This rank may not be one of its members."""
        self.group, launched = group, self.rebuild.world
        launched.hide_group()
        self.catch_errors()
        if group.rank is not None:
            self.world = launched.among(group.ranks(launched), all_gather_object)

    def _finish_left_out(self) -> None:
        """Wait on a rank that does not train until the training ranks end.

        If the training ranks lose a rank, take part in rebuilding their process group.
        """
        rebuild = self.rebuild
        while True:
            rebuild.offer(self.group, lambda: None, rebuild.can_lose_first(shared=False))
            try:
                return self.world.supervisor.finish()
            except Exception as error:
                rebuild.leave_lost(rebuild.get_survivors(error))
                self.join_group(rebuild.join())

    def catch_errors(self) -> None:
        """Install a ``sys.excepthook`` that ends all ranks with the first uncaught error.

        Call it after each new process group, because torch then replaces the hook.
        """
        sys.excepthook = self._end_with

    def _end_with(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End all ranks because of an error that the script has not caught."""
        self._failed = True
        sys.excepthook = self._usual_hook  # the usual hook prints the fault
        self.world.supervisor.fail(error)

    def _end(self) -> None:
        """Wait until the scripts of all ranks have ended."""
        if self._failed:
            return
        try:
            self.before_end()
            # A rank that still waits for this one's gradient then fails, in place of waiting on.
            timer = threading.Timer(_LEAVE_S, self.rebuild.abandon)
            timer.daemon = True
            if self.group.rank is not None:
                timer.start()
            self.world.supervisor.set_status(Phase.LEAVE, None)
            self.finish()
            timer.cancel()
            if dist.is_initialized():
                leave_process_group()
        except BaseException as error:
            self.world.supervisor.fail(error)
        self.world.supervisor.end_without_lost(at_once=True)


def _use_all_cores() -> None:
    """Allow this process to run on all cores, as ``motley run`` does.

    Open MPI binds each process to one core by default.
    """
    if leave_default_binding() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_rank(read_launch().local_size or 1))


def check_joinable() -> None:
    """Raise MotleyError if this process has a process group of its own."""
    if dist.is_available() and dist.is_initialized():
        raise MotleyError(
            "torch.distributed is initialised already: remove init_process_group() from the "
            "script, since motley.join() forms the group of all ranks, or call it first"
        )


def is_alone() -> bool:
    """Return True if this process is the only rank, because no launcher has started other ranks."""
    return read_launch(os.environ).size == 1
