"""Training goes on without a lost rank, in the same processes: what is kept, and what is made anew.

The rest of a run's state is as after its last finished step: the step that was under way is taken
again, with the same samples, by those who are left.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from motley.checkpoint.transfer import Kept
from motley.comm.collectives import abandon_group, connections
from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.engines.memory import release_all
from motley.launch.survivors import Survivors
from motley.launch.world import World
from motley.plan.plan import Plan, make_plan
from motley.plan.speed_table import SpeedTable
from motley.planner.measured_plan import Planned
from motley.planner.process_group import ProcessGroup, leave_process_group, reconnected
from motley.train.rescue import Rescue

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Continuation:
    """Where those who are left begin.

    Attributes:
        group: of them, joined. planned: a plan for them.
        kept: what this rank holds; None where it was left out of training.
    """

    group: ProcessGroup
    planned: Planned
    kept: Kept | None


class Survivor:
    """One rank's part in going on.

    Attributes:
        world: of those who are left. config: for them; options may have a value for each rank.
    """

    def __init__(self, world: World, config: Config) -> None:
        self.world, self.config = world, config
        self._hosts = {_LOOPBACK} | {
            each.address for node in world.nodes for each in node.interfaces
        }
        self._before = connections()
        self._group: ProcessGroup
        self._speeds: tuple[SpeedTable, ...] = ()  # of its ranks
        self._places: list[int] = []  # of its ranks, in the plan that is kept
        self._rescue: Rescue | None = None

    def ready(
        self, group: ProcessGroup, planned: Planned, rescue: Rescue | None, shared: bool
    ) -> None:
        """From now on this rank can go on; all ranks call it.

        Args:
            rescue: None where it is left out of training.
            shared: all ranks see the disk that the run is recorded on.
        """
        without_first = self._can_lose_first(shared)
        if rescue is not None and not rescue.possible:
            return
        self._group, self._speeds, self._rescue = group, planned.speeds, rescue
        self._places = list(range(group.size))
        self.world.supervisor.can_regroup(
            rescue.keep if rescue else lambda: None,
            self._abandon,
            without_first,
        )

    def _abandon(self) -> None:
        abandon_group(self._before, self.world.supervisor.connections(), self._hosts)

    def _can_lose_first(self, shared: bool) -> bool:
        """Whether the next rank can do what rank 0 does: it has its disk, and any address will do
        to meet at; all ranks call it."""
        fixed, machines = self.world.has_fixed_master(), self.world.machines
        return len(machines) > 1 and (machines[1] == machines[0] or (shared and not fixed))

    def survivors_of(self, error: Exception) -> Survivors:
        """With whom to go on after an error; where nobody is lost, or can go on, it ends the job.

        What the error still holds of the old group should be let go of before :meth:`go_on`.
        """
        return self.world.supervisor.survivors_of(error)

    def go_on(self, survivors: Survivors) -> Continuation:
        """Form a group with them; all of them call it, and again if one of them is lost here."""
        self.world = self.world.without_lost(survivors)
        numbers, workers = self.world.numbers, self._group.workers
        stay = [at for at, worker in enumerate(workers) if worker.rank in numbers]
        self.config = config_of(self.config, stay)
        self._group = self._group.without_lost(numbers)
        self._places = [self._places[at] for at in stay]
        self._speeds = tuple(self._speeds[at] for at in stay if self._speeds)
        if dist.is_initialized():
            leave_process_group()
        release_all()  # what trained before was set aside
        self._before = connections()
        kept = self._rescue.kept if self._rescue else None
        own = None if kept is None else (kept.state.step, kept.plan)
        told = [each for each in self.world.allgather(own) if each is not None]
        _, plan = max(told, key=lambda each: each[0])
        self._group = reconnected(self.world, self._group)
        planned = Planned(plan_of(plan, self._places), self._speeds)
        return Continuation(self._group, planned, kept)


def plan_of(plan: Plan, stay: list[int]) -> Plan:
    """The same batch, cut by the same speeds for these of its ranks alone."""
    wire = replace(plan.wire, slow_rank=None) if len(stay) > 1 else EXACT
    shares = [plan.shares[rank] for rank in stay]
    sizes = [plan.max_micro_batch[rank] for rank in stay]
    return make_plan(
        plan.global_batch, shares if any(shares) else [1.0] * len(stay), sizes, wire, plan.buckets,
        plan.grain,
    )  # fmt: skip


def config_of(config: Config, stay: list[int]) -> Config:
    """The same options for these of its ranks alone."""
    names = ("shares", "micro_batch", "precision")
    changes: dict[str, Any] = {
        name: value.only(stay) for name in names if (value := getattr(config, name)) is not None
    }
    return replace(config, **changes)
