"""The state of a user's own loop on one of several ranks: shares, steps and records."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from motley.checkpoint.store import spread
from motley.comm.collectives import all_gather_floats, all_gather_object, broadcast_object
from motley.comm.modes import parse_wire
from motley.comm.modes.numbers import EXACT
from motley.data.source import make_seed, slices
from motley.engines.named_state import seed_random
from motley.engines.out_of_memory import out_of_memory, release, shortage
from motley.engines.step_timer import HOST
from motley.errors import MotleyError, NoMemoryError
from motley.faults import Phase
from motley.library.gradient_exchange import SumOutcome
from motley.library.loop_records import LoopRecords
from motley.library.loop_shares import Piece, RankTime, ShareFollower, ShareSchedule, SpeedMemory
from motley.library.loop_state import LoopState
from motley.library.loop_statistics import LoopStatistics
from motley.library.model_shards import ModelShards
from motley.library.sample_order import Batches, SampleOrder, count_most_rows
from motley.library.session import Session
from motley.library.step_gate import FinishedStep, GroupChangedError, StepGate
from motley.library.yielded_rows import YieldedRows, move_rows
from motley.membership.survivors import RankLostError, Survivors
from motley.plan.plan import Plan
from motley.plan.precision import LossScale, PerRank
from motley.plan.replan import list_devices
from motley.plan.wire import Addition
from motley.tasks.model import AUTOCAST

T = TypeVar("T")
_BLOCKED_S = 8.0  # longest time until a rank reaches its next collective
_LOOK_S = 0.02  # seconds between two checks


class RankLoop:
    """The state of a training loop on one of several ranks.

    Args:
        session: connection to the other ranks.
        shares: the user's relative number of rows per rank; None: choose them by speed.
        micro_batch: largest number of rows that a rank computes at once, as one piece. None: a rank
            computes all its rows of a global batch at once.
        bn_group: number of rows over which batch norms take their statistics. None: batch norms
            stay as they are.
        wire: name of a wire mode.
        seed: seed of the random numbers of rows and of drop-out.
        folder: folder of all runs, and name of this run's folder. If the name is None, the folder
            is named by the time of the start.
        state: the objects of the loop whose state a checkpoint holds.
        strategy: ``ddp``, or ``fsdp`` to give each rank a part of every parameter.

    Attributes:
        session: connection to the other ranks.
        schedule: relative number of rows of each rank, by step.
        order: the random state from which samplers draw their order.
        gate: the object that sums gradients over ranks, and lets optimizers step.
        scale: the loss scale that all ranks share.
        records: the writer of the run's records.
        state: the objects of the loop whose state a checkpoint holds.
        shards: the models if they are sharded over the ranks; None: each rank has whole models.
        changed: True if a rank was lost after the script last requested rows from the loader.
        pause: function that saves a checkpoint before the job pauses, and returns a message that
            names the checkpoint's step.
        after_step: function that is called after each step.
        rescue: function that saves the last finished step when the loss of a rank ends the job. The
            function returns a message that names the step.
        indices: indices of the rows of this rank's pieces in the present global batch so far.
        read_rows: function that reads the rows of given indices once more, and collates them.
        is_evaluating: True from a pass over held-out data to the next training step.
        piece: this rank's present part of a global batch; None outside of a loop over training
            data.
        yielded: rows that the loader has yielded last, without changes of the script.
        seed: seed of the random numbers of rows and of drop-out.
    """

    def __init__(
        self,
        session: Session,
        shares: PerRank[float] | None,
        micro_batch: int | None,
        bn_group: int | None,
        wire: str,
        seed: int,
        folder: tuple[str, str | None],
        state: LoopState,
        strategy: str,
    ) -> None:
        group = session.group
        self.session, self.seed, self.state = session, seed, state
        self.device = group.device
        self.piece: Piece | None = None
        self.yielded = YieldedRows(None)
        self._are_rows_checked = False
        self.order = SampleOrder()
        # Only rank 0 may have the variables of keep_training.sh.
        folder = session.world.from_first(lambda: folder)
        self.records = LoopRecords(session.world, group, *folder, strategy)
        session.before_end, session.finish = self.records.end, self.records.finish
        is_sharded = strategy == "fsdp"
        self.schedule = ShareSchedule(
            (1.0,) * self.size if shares is None else shares.for_ranks(self.size), micro_batch,
            bn_group or 1, equal_pieces=is_sharded,
        )  # fmt: skip
        self._micro_batch = micro_batch
        self._follows = shares is None and self.size > 1
        self._follower: ShareFollower | None = None
        # Rows of each rank, and the number of global batches, in the step before.
        self._timed_before: tuple[list[int], int] = ([], 1)
        mode = parse_wire(wire)
        if mode is None or mode.addition is Addition.LOCAL_STEPS:
            raise MotleyError(f"wire={wire!r} is unknown: give exact, bf16, fp16 or powersgd:RANK")
        if is_sharded and mode.addition is not Addition.NUMBERS:
            raise MotleyError(
                f'wire={wire!r} sends gradients in another form, and strategy="fsdp" scatters '
                "plain gradients: give exact, bf16 or fp16"
            )
        self._mode = mode
        self.shards = (
            ModelShards(self.device, self.size, AUTOCAST[mode.dtype]) if is_sharded else None
        )
        state.shards = self.shards
        self.scale = LossScale(1.0, dynamic=False)
        self.gate = StepGate(
            self.names, self.rank, self.device, self._make_reducer(), self.scale,
            LoopStatistics(bn_group), self.shards,
        )  # fmt: skip
        self.gate.clock.at_once = not group.has_gpus
        self.gate.clock.on_phase = self.set_status
        self.gate.on_step, self.gate.collective = self._end_step, self.collective
        self._can_continue = self.shards is None  # False if a lost rank ends the job
        self._continues = False  # True once this rank can continue without another
        self._count = 0  # collectives that this rank has finished
        self._outcome: Any = None  # result of the last collective
        self.is_evaluating = False
        self.changed = False  # True if the group has changed since the loader was last asked
        self.pause: Callable[[], str] = lambda: ""
        self.after_step: Callable[[], None] = lambda: None
        self.rescue: Callable[[], str] = lambda: ""
        self._is_blocked = False  # True while this rank is in a collective
        self.indices: list[Any] = []
        self.read_rows: Callable[[Sequence[Any]], Any] = lambda indices: None

    def _make_reducer(self) -> Any:
        return self._mode.in_job(self.session.group.precisions).reducer(self.device)

    @property
    def rank(self) -> int:
        """Number of this rank, which may change after another rank is lost."""
        assert self.session.group.rank is not None
        return self.session.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.session.group.size

    @property
    def names(self) -> list[str]:
        """Each rank with its host, for messages."""
        return [f"rank {worker.rank} on {worker.host}" for worker in self.session.group.workers]

    @property
    def local_rank(self) -> int:
        """Number of this rank among those on its host."""
        hosts = [worker.host for worker in self.session.group.workers]
        return hosts[: self.rank].count(hosts[self.rank])

    def set_status(self, phase: Phase) -> None:
        """Report the phase of this rank. The user's code in this phase has no time limit."""
        with contextlib.suppress(RankLostError):  # the next collective ends with an error
            self.session.world.supervisor.set_status(phase, None)

    def start_pass(self, batches: Batches, step: int, epochs: int) -> None:
        """Prepare for the first step of a pass over training data. All ranks call it.

        Args:
            batches: indices of each global batch.
            step: number of the next step.
            epochs: number of passes that are still expected, this one included.
        """
        if self.records.has_started or not batches:
            return
        models = self.state.models
        numbers = sum(each.numel() for model in models for each in model.state_dict().values())
        trained = sum(
            each.numel() for model in models for each in model.parameters() if each.requires_grad
        )
        rows, group = count_most_rows(batches), self.schedule.group
        if rows % group:
            raise MotleyError(
                f"a global batch of {rows} rows cannot be divided into groups of {group} rows: "
                f"choose a batch_size that is a multiple of bn_group={group}"
            )
        if self._follows:
            self._follow_shares(numbers, rows, step)
        total = step + epochs * len(batches)
        self.records.start(self.schedule.get_plan(step, rows), numbers, trained, step, total)
        if self._follower is not None and self._follower.tables:
            self.records.record_shares(self._get_full_plan(step), self._follower.tables)
        self._offer_rebuild()

    def _follow_shares(self, numbers: int, rows: int, step: int) -> None:
        """Start to choose shares by speed. Use stored speeds of an earlier run if they exist."""
        workers = self.session.group.workers
        group = self.schedule.group
        self._memory = SpeedMemory(workers[self.rank], self._micro_batch, group, numbers)
        most = (self._micro_batch or rows) // group * group
        tables = self._memory.recall_all(most)
        devices = list_devices(workers, [most] * self.size)
        self._follower = ShareFollower(devices, self._micro_batch, tables, group)
        if tables:
            self.schedule.change(step, self._follower.split(rows))

    def begin_piece(self, piece: Piece) -> None:
        """Start to compute a part of this rank's rows, which the loader has read."""
        if self.piece is None or self.piece.step != piece.step:
            # Drop-out differs between ranks and steps. A repeated step has the same drop-out.
            seed_random(make_seed(self.seed, self.rank, piece.step), self.device)
            supervisor = self.session.world.supervisor
            if not supervisor.begin_step(piece.step):
                supervisor.pause(self.pause(), first=self.rank == 0)
            supervisor.step = piece.step
            self.indices = []
        self.piece, self.is_evaluating = piece, False
        self.indices += piece.list_rows(self.schedule.group)
        self.gate.begin_piece(piece)

    def leave_pass(self) -> None:
        """Record that the user's code has left a pass over training data."""
        self.gate.leave_loop()
        self.piece = None

    def _end_step(self, step: FinishedStep) -> None:
        """Record a finished step, and change the ranks' shares if other shares are faster."""
        piece = step.piece
        self.records.step(step, self.schedule.get_plan(piece.step, piece.global_rows))
        self.after_step()
        rows = [int(each.rows) for each in step.numbers], step.batches
        # On a GPU the times are those of the step before.
        timed, self._timed_before = (rows if self.gate.clock.at_once else self._timed_before), rows
        if self._follower is None or not timed[0]:
            return
        batches = timed[1]
        times = [
            RankTime(count // batches, each.own_s / batches)
            for count, each in zip(timed[0], step.numbers, strict=True)
        ]
        full = self._get_full_plan(piece.step + 1).counts
        known = self._follower.tables
        better = self._follower.step(piece.step, times, full)
        if self._follower.tables is not known:
            self._memory.keep(self._follower.tables[self.rank])
            self.records.record_shares(self._get_full_plan(piece.step + 1), self._follower.tables)
        if better is not None:
            # No rank's loader has asked for rows of this step yet.
            first = 1 + int(max(piece.step, *(each.reached for each in step.numbers)))
            self._change_shares(first, better, full)

    def _change_shares(self, first: int, better: Sequence[int], full: Sequence[int]) -> None:
        """Set new shares from a step on, and record them.

        Args:
            first: number of the first step with the new shares.
            better: new number of rows of each rank in a full batch.
            full: previous number of rows of each rank in a full batch.
        """
        assert self._follower is not None
        self.schedule.change(first, better)
        self._follower.change(first)
        self.records.note(
            "replan",
            f"the ranks take {' + '.join(map(str, better))} rows from step {first} on (before: "
            f"{' + '.join(map(str, full))})",
            step=first, counts=list(better), before=list(full),
        )  # fmt: skip
        self.records.record_shares(self._get_full_plan(first), self._follower.tables)

    def _get_full_plan(self, step: int) -> Plan:
        """Return the split of a full global batch at a step."""
        return self.schedule.get_plan(step, self.records.full_batch)

    def compute(self, run: Callable[[Any], None], rows: Any) -> None:
        """Run a function on rows of a batch, in smaller parts if memory runs out.

        After an out-of-memory error, this rank computes all its rows of the global batch so far
        once more, in smaller parts. Each row is read with the same random numbers again. Later
        batches keep the smaller size.

        Args:
            run: function that computes the loss of some rows, and its gradient.
            rows: the rows that the loader has yielded last. The script may have moved them to a
                device.

        Raises:
            MotleyError: the script has changed the rows besides moving them.
            NoMemoryError: not even one row fits.
        """
        piece, most = self.piece, self.schedule.most_rows
        assert piece is not None
        if self.shards:
            if failure := self._try(lambda: run(rows)):
                raise NoMemoryError(
                    f"{self.names[self.rank]}: {failure}. The ranks communicate in each piece of "
                    "a batch, so this rank cannot repeat a piece alone: give motley.join() a "
                    f"micro_batch below {piece.rows}, or this rank a smaller share in "
                    "MOTLEY_SHARES"
                )
            return
        devices = self.yielded.find_devices(rows, by_value=not self._are_rows_checked)
        self._are_rows_checked = True
        size, failure, group = piece.rows, "", self.schedule.group
        if most is None or size <= most:
            if not (failure := self._try(lambda: run(rows))):
                return
            size //= 2

        def run_moved(part: Any) -> None:
            run(move_rows(part, devices))

        while (size := min(size, most or size)) >= group:
            self.gate.repeat_pieces()
            if not (failure := self._try(partial(self._run_parts, run_moved, piece, size))):
                self.schedule.limit(size)
                return
            size //= 2
        raise NoMemoryError(
            f"{self.names[self.rank]}: not even {group} "
            f"{('rows fit' if group > 1 else 'row fits')} in memory ({failure}). Make the model "
            "smaller, use torch.utils.checkpoint, or give this rank the share 0 in MOTLEY_SHARES"
        )

    def _try(self, work: Callable[[], None]) -> str:
        """Run a function. Return a description of its out-of-memory error; empty if none."""
        try:
            work()
            return ""
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            text = shortage(error, self.device)
        release()
        return text

    def _run_parts(self, run: Callable[[Any], None], piece: Piece, size: int) -> None:
        """Compute all rows of this rank in the global batch so far again, in smaller parts.

        A part has at most ``size`` rows.
        """
        whole = Plan(len(self.indices), (1.0,), (size,), EXACT, grain=self.schedule.group)
        parts = slices(self.indices, whole, 0)
        for number, indices in enumerate(parts):
            last = piece.last and number == len(parts) - 1
            self.gate.begin_part(
                replace(piece, rows=len(indices), last=last, indices=tuple(indices))
            )
            run(self.read_rows(indices))
        self.gate.begin_part(piece)

    # -- lost ranks

    def collective(self, work: Callable[[], T]) -> T:
        """Run a collective that all ranks call; return its result.

        All ranks run and count their collectives in the same order. If a rank is lost, the
        survivors form a new group. Survivors that have finished the interrupted collective send its
        result to all other survivors.

        Raises:
            GroupChangedError: another rank was lost while this rank was in the collective.
        """
        self.gate.clock.lap(HOST)
        self._is_blocked = True
        try:
            self.session.world.supervisor.check_group()  # gloo may wait for ever in a broken group
            result = work()
        except MotleyError:
            raise
        except Exception as error:
            if not self._continues:
                raise
            del work
            raise GroupChangedError(self._continue_without(_explain(error))) from None
        finally:
            self._is_blocked = False
        self._count, self._outcome = self._count + 1, result
        self.gate.clock.end_wait()
        return result

    def wait_until_blocked(self) -> int | None:
        """Wait until this rank's training thread is blocked in a collective.

        After the loss of a rank, another thread of this process calls this method.

        Returns:
            The number of global batches whose gradients no optimizer has used yet. None: the wait
            timed out, or an optimizer has stepped with the present batch.
        """
        deadline = time.monotonic() + _BLOCKED_S
        while not self._is_blocked:
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_S)
        return self.gate.count_unused()

    def repeat_collective(self, work: Callable[[], T]) -> T:
        """Run :meth:`collective` until no rank is lost during the call, and return the result."""
        while True:
            try:
                return self.collective(work)
            except GroupChangedError as change:
                if change.outcome is not None:
                    result: T = change.outcome
                    return result

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather one object from each rank, in the order of ranks. A lost rank has no entry."""
        return self.repeat_collective(lambda: all_gather_object(value, can_leave=True))

    def end_without(self, advice: str) -> None:
        """Let the loss of any rank end the job, since a framework's loop cannot repeat a step.

        Args:
            advice: part of the last message that explains how to continue.
        """
        self.require_whole_models()
        self._can_continue, self.records.advice = False, advice
        self.after_step = lambda: None  # the framework saves its own checkpoints

    def require_whole_models(self) -> None:
        """Raise MotleyError if the models are sharded, which no framework's loop supports."""
        if self.shards:
            raise MotleyError(
                'motley.join(strategy="fsdp") works only in a loop of your own, and here a '
                "framework runs the loop: leave it out, or train the model with `motley train "
                "--strategy fsdp`"
            )

    def _offer_rebuild(self) -> None:
        """Declare that this rank can continue if another rank is lost from now on."""
        if self.size > 1 and self._can_continue:
            rebuild = self.session.rebuild
            shared, first = self.records.run.is_shared(), self.rank == 0
            self._continues = True
            rebuild.offer(self.session.group, lambda: None, rebuild.can_lose_first(shared))
            if first or shared:
                self.session.world.supervisor.can_rescue(self.rescue, first)

    def _continue_without(self, error: Exception) -> Any:
        """Join the process group of the survivors; return the result of the interrupted collective.

        The result is None if no survivor has finished the collective. The job ends if no rank is
        lost, or if the survivors cannot continue.
        """
        while True:
            survivors = self.session.rebuild.get_survivors(error)
            lost = survivors.lost
            try:
                return self._join_survivors(survivors, lost.line())
            except MotleyError:
                raise
            except Exception as another:  # a further rank was lost
                error = another

    def _join_survivors(self, survivors: Survivors, lost: str) -> Any:
        rebuild = self.session.rebuild
        stay = rebuild.leave_lost(survivors)
        group = rebuild.join()
        session = self.session
        session.join_group(group)
        self.changed = True
        self.schedule.keep_ranks(stay)
        self._timed_before = ([], 1)
        if self._follower is not None:
            self._follower = self._follower.keep_ranks(stay)
        self.gate.join_group(self.names, self.rank, self._make_reducer())
        outcome = self._catch_up()
        if self.gate.is_within_step and not isinstance(outcome, SumOutcome):
            self.gate.drop()  # a part of this gradient was on the lost rank
        step = self.piece.step if self.piece else 0
        self.records.continue_with(
            session.world, group, self.schedule.get_plan(step, self.records.full_batch), step, lost
        )
        if self.is_evaluating:
            text = f"{lost}: the result of this evaluation lacks the rows of that rank"
            self.records.note("evaluation", text)
            if self.rank == 0:
                print(f"motley: {text}", file=sys.stderr, flush=True)
        self._offer_rebuild()
        self.gate.clock.restart()
        return outcome

    def _catch_up(self) -> Any:
        """Return the result of the interrupted collective if another rank has finished it.

        If the collective sums gradients, the ranks that have not finished it also receive the sum.
        None: this rank has missed no result.
        """
        counts = [int(count) for (count,) in all_gather_floats([float(self._count)])]
        most = max(counts)
        source = counts.index(most)
        if min(counts) == most:
            return None
        outcome = broadcast_object(self._outcome, self.device, source)
        is_behind = self._count < most
        if isinstance(outcome, SumOutcome):
            self._receive_step(source, is_behind)
        if is_behind:
            self._count, self._outcome = most, outcome
        return outcome if is_behind else None

    def _receive_step(self, source: int, is_behind: bool) -> None:
        """Send one rank's sum of gradients to the ranks that have missed it; all ranks call it.

        If the optimizer of that rank has stepped already, the ranks receive its parameters instead.

        Args:
            source: rank that has the sum.
            is_behind: True if this rank has missed the sum.
        """
        gradients = self.gate.take_sum()
        has_stepped = broadcast_object(gradients is None, self.device, source)
        content: Any = None
        if has_stepped:
            content, gradients = self.state.take(Tensor.detach)
        content = broadcast_object(content, self.device, source)
        own = gradients if self.rank == source and gradients else {}
        tensors = spread(own, self.device, source)
        if is_behind and has_stepped:
            self.state.load_step(content, tensors)
        elif is_behind:
            self.gate.load_sum(tensors)

    def describe_plan(self, step: int) -> str:
        """Return a text that describes each rank's share at a step, one line per rank."""
        counts = self._get_full_plan(step).counts
        tables: Sequence[Any] = self._follower.tables if self._follower else ()
        lines = []
        for rank, (name, count) in enumerate(zip(self.names, counts, strict=True)):
            time = f", {tables[rank].compute_seconds(count):.3g} s" if tables else ""
            lines.append(f"{name}: {count} of {self.records.full_batch} rows{time}")
        return "\n".join(lines)


def _explain(error: Exception) -> Exception:
    """Return an error that explains a failed collective if another rank may have left the loop.

    Any other error is returned unchanged.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, RankLostError):
        return error
    result = MotleyError(
        "another rank ended its script or its loop while this one waited for it "
        f"({str(error).splitlines()[0]}): let all ranks leave the loop after the same batch, as "
        "with `if lab.batch == 100: break`, or look for the failure of the other rank above"
    )
    result.__cause__ = error
    return result
