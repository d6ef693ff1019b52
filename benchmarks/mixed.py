"""What the ranks of the mixed benchmarks share: plain DDP and ours, timed in one job.

Each mode builds the same model from the same seed. A subclass says which model.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.data.source import Batch
from motley.engines.optimizer import make_optimizer
from motley.engines.protocol import Engine, EngineContext, EngineFactory, StepResult
from motley.engines.step_timer import Laps
from motley.engines.strategies import TORCH, known_strategies, list_engines
from motley.launch.world import World
from motley.measure.device import measure_speed
from motley.measure.link_speed import measure_wire
from motley.measure.measured_plan import balance, refine
from motley.measure.process_group import ProcessGroup
from motley.measure.profile import Measured
from motley.plan.plan import Plan
from motley.plan.precision import start_scale
from motley.plan.replan import ReplanMonitor
from motley.plan.speeds import SpeedTable
from motley.plan.wire import WireMode
from motley.tasks.builtin import get_task
from motley.tasks.model import TaskModel, set_matmul_precision
from motley.tasks.net import build_net
from motley.train.command_line import read_config, training_parser


class Bench:
    """What all modes share on one rank.

    Args:
        words: the options of train_vit.py that describe the training.
        warm, steps: not timed, and timed.
    """

    def __init__(
        self, world: World, group: ProcessGroup, words: list[str], warm: int, steps: int
    ) -> None:
        assert group.rank is not None
        self.world, self.group, self.rank, self.warm, self.steps = (
            world,
            group,
            group.rank,
            warm,
            steps,
        )
        self.config: Config = read_config(training_parser(""), words)
        self.task = get_task(self.config)
        set_matmul_precision(group.precisions[group.rank])

    def model(self) -> TaskModel:
        """A fresh one, the same on all ranks."""
        net = build_net(self.task, self.config)
        return TaskModel(self.task, net, self.group.precisions[self.rank], self.group.device)

    def batch(self, model: TaskModel, count: int) -> Batch:
        """Images and labels, the same every time."""
        labels = torch.arange(count, device=self.group.device) % 10
        return Batch(model.noise(count) | {"labels": labels}, tuple(range(count)))

    def optimizer(self, model: TaskModel) -> torch.optim.Optimizer:
        """As the engine makes it."""
        return make_optimizer(model.net, self.config)

    def time_steps(self, step: Callable[[], None], warm: int = 0, steps: int = 0) -> float:
        """Seconds a step, over the timed ones, of the rank that took longest."""
        for _ in range(warm or self.warm):
            step()
        self._meet()
        start = time.perf_counter()
        for _ in range(steps or self.steps):
            step()
        if self.group.device.type == "cuda":
            torch.cuda.synchronize()
        # That all know it is not timed: it may have to queue behind what local steps have sent.
        spent = max(self.world.allgather(time.perf_counter() - start))
        return spent / (steps or self.steps)

    def _meet(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize()
        self.world.allgather(None)  # not through gloo, where local steps have something on the way

    def speeds(self, most: int) -> list[SpeedTable]:
        """Every rank alone at its best, all ranks busy at once."""
        model = self.model()
        self._meet()
        return self.world.allgather(measure_speed(model, lambda: self.optimizer(model), most))

    def ours(
        self,
        n: int,
        speeds: list[SpeedTable],
        engine_factory: EngineFactory | None = None,
        mode: WireMode = EXACT,
        settle: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """Our engine and plan; the loop's own way to take a step.

        Args:
            n: the global batch.
            engine_factory: default: torch.distributed's.
            mode: what travels.
            settle: steps, not timed, in which shares follow what each rank takes, as in the loop.
            options: of the training, which the engine reads.
        """
        engine_factory = engine_factory or list_engines(self.config, known_strategies(TORCH))
        model = self.model()
        start = time.perf_counter()
        wire = measure_wire(list(model.parameters()), mode)
        wire = engine_factory.traits.through(wire, mode)
        measured = Measured(tuple(speeds), {mode: wire})
        planned = balance(n, refine(self.world, self.group, model, n, measured, mode), mode)
        measured_s = time.perf_counter() - start
        plan, predicted = planned.plan, planned.forecast
        assert predicted is not None
        scale = start_scale(self.config.loss_scale, (*self.group.precisions, mode.dtype))
        context = EngineContext(
            replace(self.config, batch_size=n, **options), self.rank, self.group.size,
            self.group.device, self.group.precisions, scale, plan,
        )  # fmt: skip
        engine = engine_factory(model, context)
        settled = self.settle(
            model, engine, plan, ReplanMonitor(speeds, range(len(speeds))), settle
        )
        return {
            **self.time_engine(model, engine, settled, mode),
            "predicted_s": predicted.step_s, "counts": plan.counts, "settled": settled.counts,
            "micro_batches": plan.max_micro_batch, "refined_s": measured_s,
            "wire": asdict(replace(wire, tensors=())),
            "buckets": predicted.buckets, "wire_s": predicted.wire_s,
            "predicted_compute_s": predicted.compute_s,
        }  # fmt: skip

    def time_engine(
        self, model: TaskModel, engine: Engine, plan: Plan, mode: WireMode
    ) -> dict[str, Any]:
        """A step of an engine, as the loop takes it; and where each rank's time went."""
        take = self._steps_of(model, engine, plan)
        laps: list[Laps] = []

        def step() -> None:
            laps.append(take().laps)

        # Of local steps whole periods; what the first begins with is on its way.
        warm, steps = (
            -(-count // mode.sync_every) * mode.sync_every for count in (self.warm, self.steps)
        )
        step_s = self.time_steps(step, warm, steps)
        own = {
            name: statistics.median(lap.seconds(name) for lap in laps[warm:])
            for name in ("compute", "sync", "opt")
        }
        return {"step_s": step_s, "laps": self.world.allgather(own)}

    def settle(
        self, model: TaskModel, engine: Engine, plan: Plan, watch: ReplanMonitor, steps: int
    ) -> Plan:
        """The plan that the loop would have after so many steps of it."""
        take = self._steps_of(model, engine, plan)
        for _ in range(steps):
            if proposal := watch.step(take().ready_s, plan.counts):
                plan = replace(plan, shares=proposal.counts)
                take = self._steps_of(model, engine, plan)
                watch.reset()
        return plan

    def _steps_of(self, model: TaskModel, engine: Engine, plan: Plan) -> Callable[[], StepResult]:
        """What takes a step."""
        plan = replace(plan, equal_micro_steps=engine.equal_micro_steps)
        engine.reconfigure(plan)
        batches = [self.batch(model, size) for size in plan.micro_batches[self.rank]]

        def step() -> StepResult:
            for place, batch in enumerate(batches):
                engine.accumulate(batch, plan.global_batch, place == len(batches) - 1)
            result = engine.step()
            if result.oom_ranks:
                raise SystemExit(f"out of memory: {result.oom_ranks}")
            return result

        return step

    def plain_ddp(self, n: int, **timing: int) -> dict[str, Any]:
        """DDP as its documentation has it: N / ranks samples each, and the mean of the losses."""
        model = self.model()
        return {
            "step_s": self.time_steps(
                self.plain_ddp_step(model, self.batch(model, n // self.group.size)), **timing
            )
        }

    def plain_ddp_step(
        self,
        model: TaskModel,
        batch: Batch,
        weight: float = 1.0,
        set_up: Callable[[DistributedDataParallel], None] = lambda ddp: None,
        **options: Any,
    ) -> Callable[[], None]:
        """One step of it.

        Args:
            weight: of this rank's mean loss. set_up: gives it a hook, say. options: of DDP.
        """
        ddp = DistributedDataParallel(model, **options)
        set_up(ddp)
        optimizer = self.optimizer(model)

        def step() -> None:
            optimizer.zero_grad()
            (weight * ddp(batch.data).mean()).backward()
            optimizer.step()

        return step
