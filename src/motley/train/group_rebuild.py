"""The process group that the surviving ranks form after a rank was lost."""

from collections.abc import Callable

import torch.distributed as dist

from motley.comm.collectives import abandon_group, connections
from motley.engines.out_of_memory import release_all
from motley.launch.world import World
from motley.measure.process_group import ProcessGroup, leave_process_group, reconnected
from motley.membership.survivors import Survivors

_LOOPBACK = "127.0.0.1"


class GroupRebuild:
    """The steps by which the surviving ranks form a new process group after a rank was lost.

    All ranks create an object of this class.

    Args:
        world: the launched ranks.

    Attributes:
        world: all ranks that are not lost. Ranks that take no part in training are included.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._has_fixed_master = world.has_fixed_master()
        self._hosts = {_LOOPBACK} | {
            each.address for node in world.nodes for each in node.interfaces
        }
        self._before = connections()
        self._group: ProcessGroup

    def offer(self, group: ProcessGroup, keep: Callable[[], None], without_first: bool) -> None:
        """Declare that this rank can continue if another rank is lost from now on.

        Args:
            group: process group of the ranks that train.
            keep: function that copies the training state out of the engine. The copy remains
                usable when the process group is destroyed. See Supervisor.
            without_first: result of :meth:`can_lose_first`.
        """
        self._group = group
        self.world.supervisor.can_regroup(keep, self.abandon, without_first)

    def abandon(self) -> None:
        """Close this rank's connections to the process group, so that pending collectives fail."""
        abandon_group(self._before, self.world.supervisor.connections(), self._hosts)

    def can_lose_first(self, shared: bool) -> bool:
        """Return True if rank 1 can replace rank 0.

        Rank 1 must see the disk of rank 0. The user must not have set a fixed address for the
        process group.

        Args:
            shared: True if all ranks see the disk that the run is recorded on.
        """
        machines, fixed = self.world.machines, self._has_fixed_master
        return len(machines) > 1 and (machines[1] == machines[0] or (shared and not fixed))

    def get_survivors(self, error: Exception) -> Survivors:
        """Return the survivors to continue with after an error.

        The job ends if no rank is lost, or if the survivors cannot continue. The error may hold
        references to objects of the old group. The caller must release the error before it calls
        :meth:`leave_lost`.
        """
        return self.world.supervisor.get_survivors(error)

    def leave_lost(self, survivors: Survivors) -> list[int]:
        """Leave the process group of the lost rank, and return the survivors' ranks in this group.

        All survivors call this method, and then :meth:`join`.
        """
        self.world = self.world.without_lost(survivors)
        numbers, workers = self.world.numbers, self._group.workers
        stay = [at for at, worker in enumerate(workers) if worker.rank in numbers]
        self._group = self._group.without_lost(numbers)
        if dist.is_initialized():
            leave_process_group()
        release_all()  # set_aside() had excluded the old objects from garbage collection
        self._before = connections()
        return stay

    def join(self) -> ProcessGroup:
        """Join the process group of the survivors, and return it. All survivors call it."""
        self._group = reconnected(self.world, self._group)
        return self._group
