"""What training needs before there is an engine: data, the run's length, room for checkpoints."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.checkpoint.resume import state_of
from motley.checkpoint.run import Run
from motley.checkpoint.store import Checkpoints
from motley.comm.collectives import all_gather_object
from motley.config.option import Duration
from motley.config.options import Config
from motley.data.loader import Loader
from motley.plan.length import Length, TrainState, ramp_of
from motley.plan.plan import Plan
from motley.planner.measured_plan import Planned
from motley.planner.process_group import ProcessGroup
from motley.tasks.model import TaskModel
from motley.train.budget import Budget, budget_of, checkpoint_bytes

Note = tuple[str, str, dict[str, Any]]  # an event's kind, its text, and its content


@dataclass(frozen=True)
class Sizes:
    """Of a model before an engine cuts it, folded or not; see motley.train.setup.Job.

    Attributes:
        parameters: ``trained`` or not.
    """

    numbers: int
    parameters: int
    trained: int
    gradient_bytes: int

    @classmethod
    def of(cls, model: TaskModel, plan: Plan) -> "Sizes":
        parameters = model.every_parameter()
        shapes = [tuple(each.shape) for each in parameters if each.requires_grad]
        return cls(
            sum(value.numel() for value in model.net.state_dict().values()),
            sum(each.numel() for each in parameters), sum(map(math.prod, shapes)),
            plan.wire.bytes_of(shapes),
        )  # fmt: skip

    def notes(self) -> list[Note]:
        """That some parameters stay as they are."""
        if self.trained == self.parameters:
            return []
        text = (
            f"{self.trained:,} of {self.parameters:,} parameters are trained: a gradient of "
            f"{self.gradient_bytes / 1e6:.3g} MB"
        )
        return [("frozen", text, {"trained": self.trained, "parameters": self.parameters})]


@dataclass(frozen=True)
class Ready:
    """What is known, and made, before there is an engine. Attributes: see
    motley.train.setup.Job."""

    config: Config
    plan: Plan
    loader: Loader
    length: Length
    checkpoints: Checkpoints
    sizes: Sizes
    notes: list[Note]

    def state(self, folders: list[Path]) -> TrainState | None:
        """Where the run is going to begin; see motley.checkpoint.resume.state_of."""
        found = state_of(folders)
        return found and self.length.at(found)

    def budget(self, state: TrainState, planned: Planned) -> Budget:
        """What the rest of the run is going to take; on the rank that writes.

        Raises:
            MotleyError: the disk is too small.
        """
        size = checkpoint_bytes(self.sizes.numbers, self.sizes.trained, self.config, self.plan)
        step_s = planned.forecast.step_s if planned.forecast else None
        found = budget_of(self.checkpoints, self.length, state, size, self.config.keep, step_s)
        found.check()
        return found


def make_ready(
    run: Run, group: ProcessGroup, planned: Planned, config: Config, model: TaskModel
) -> Ready:
    """All that needs no engine; every rank that trains calls it."""
    assert group.rank is not None
    plan = planned.plan
    most = max(plan.micro_batches[group.rank], default=0)
    readers = planned.speeds[group.rank].readers if planned.speeds else None
    loader = Loader(model.task, config, group.rank, group.device, model.example, most, readers)
    return Ready(
        config, plan, loader, _length(config, plan, loader, keeps=model.task.keeps),
        Checkpoints(run.folder.checkpoints, config.keep), Sizes.of(model, plan),
        _loader_notes(loader, group),
    )  # fmt: skip


def _length(config: Config, plan: Plan, loader: Loader, keeps: bool) -> Length:
    """Where the run ends, and when it saves.

    Args:
        keeps: checkpoints, unless the user says how often.
    """
    every = config.save_every or (None if keeps else 0)
    return Length(
        config.epochs, loader.order.epoch_samples, plan.global_batch, config.max_steps,
        save_every=None if isinstance(every, Duration) else every,
        by_clock=isinstance(every, Duration), ramp=ramp_of(config.batch_size),
    )  # fmt: skip


def _loader_notes(loader: Loader, group: ProcessGroup) -> list[Note]:
    """What all ranks' loaders say, each of its own host's memory."""
    said = zip(group.workers, all_gather_object(loader.note), strict=True)
    return [
        ("loader_memory", f"rank {worker.rank} on {worker.host}: {text}", {"rank": worker.rank})
        for worker, text in said if text
    ]  # fmt: skip
