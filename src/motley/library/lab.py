"""The class of the object that :func:`motley.join` returns for a user's own training loop."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from motley.comm.collectives import all_gather_floats
from motley.engines.gradient_sum import broadcast
from motley.engines.named_state import snapshot
from motley.engines.out_of_memory import out_of_memory, shortage
from motley.errors import MotleyError, NoMemoryError
from motley.library.gradient_exchange import list_parameters
from motley.library.lab_loader import LabLoader, check_loader
from motley.library.loop_checkpoints import LoopSaver
from motley.library.loop_state import LoopPosition, LoopState
from motley.library.made_batches import MadeBatches
from motley.library.model_shards import combine_norms, discard
from motley.library.rank_loop import RankLoop
from motley.library.refusals import check_model, check_optimizers, check_same, check_statistics
from motley.library.sample_order import Batches
from motley.measure.process_group import promised_precision
from motley.plan.precision import start_scale
from motley.text import did_you_mean

T = TypeVar("T")
# Names of Accelerate and Fabric that have another name here.
_ELSEWHERE = {
    "gather": "lab.reduce(...) adds numbers up over all ranks",
    "gather_for_metrics": "lab.reduce((right, count)) adds up what each rank has counted",
    "is_main_process": "it is lab.is_main", "is_global_zero": "it is lab.is_main",
    "process_index": "it is lab.rank", "global_rank": "it is lab.rank",
    "num_processes": "it is lab.size", "world_size": "it is lab.size",
    "sync_gradients": "it is lab.stepped", "setup": "it is lab.prepare(model, optimizer)",
    "setup_dataloaders": "it is lab.loader(loader)",
    "unwrap_model": "models stay your own; lab.state_dict(model) has whole weights",
    "wait_for_everyone": "leave it out, since ranks meet in each step",
    "accumulate": "write `if (lab.batch + 1) % 4 == 0:` before the step, or a larger batch_size",
}  # fmt: skip
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Lab:
    """All ranks of the launch, for a training loop of the user's own.

    :func:`motley.join` returns a Lab.

    Args:
        loop: state of the training loop on this rank. None: this process trains alone, with all
            rows.
        state: the models, optimizers and further objects whose state a checkpoint holds.
        folder: folder of all runs, and name of this run's folder. If the name is None, the folder
            is named by the time of the start.
        allow: names of checks to skip, as for :func:`motley.join`.

    Attributes:
        device: device of this rank.
    """

    def __init__(
        self,
        loop: RankLoop | None,
        state: LoopState,
        folder: tuple[str, str | None] = ("logs", None),
        allow: Collection[str] = (),
    ) -> None:
        self._loop, self._allow = loop, frozenset(allow)
        alone = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.device = loop.device if loop else alone
        self._state, self._position = state, LoopPosition()
        self._saver = LoopSaver(loop, state, self._position, folder, self.device)
        self._epochs = 0  # epochs of the whole run, as far as they are known
        self._loss: Tensor | None = None  # without other ranks
        self._checked = False  # True once the layers of all models were checked in this pass

    _watches = False  # True once every optimizer's step is checked
    # Without other ranks: losses of the present step, and number of the batch after which it ended.
    _losses: Tensor | None = None
    _ended_at: int | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            instead = _ELSEWHERE.get(name)
            hint = f"; {instead}" if instead else did_you_mean(name, dir(Lab))
            raise AttributeError(f"Lab has no {name}{hint}")

    def __repr__(self) -> str:
        return f"Lab(rank {self.rank} of {self.size}, {self.device})"

    # -- the ranks

    @property
    def rank(self) -> int:
        """Number of this rank among those that train."""
        return self._loop.rank if self._loop else 0

    @property
    def size(self) -> int:
        """Number of ranks that train."""
        return self._loop.size if self._loop else 1

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 alone. The arguments are those of Python's ``print``."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def reduce(self, value: T) -> T:
        """Add numbers up over all ranks, and return the sums; all ranks call it.

        Args:
            value: a number, a tensor, or a list, tuple or dictionary of these. Give sums and
                counts, and divide afterwards, since a mean of means is wrong for unequal shares::

                    right, count = lab.reduce((right, count))
        """
        if self._loop is None:
            return value
        leaves: list[Any] = []
        _collect(value, leaves)
        parts = [
            leaf.detach().to("cpu", torch.float64).flatten()
            if isinstance(leaf, Tensor)
            else torch.tensor([leaf], dtype=torch.float64)
            for leaf in leaves
        ]
        flat = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
        rows = self._loop.repeat_collective(lambda: all_gather_floats(list(flat), can_leave=True))
        sums = torch.tensor(rows, dtype=torch.float64).sum(dim=0)
        result: T = _fill(value, iter(torch.split(sums, [len(part) for part in parts])))
        return result

    def plan(self) -> str:
        """Return a text that describes each rank's present share of a batch, one line per rank."""
        if self._loop is None:
            return "this process computes all rows"
        return self._loop.describe_plan(self._position.step)

    # -- the user's objects

    def prepare(self, *objects: Any) -> Any:
        """Let models, optimizers, schedulers and scalers train on all ranks; return them.

        The objects stay the same, and are changed in place: models move to :attr:`device` and get
        the values of rank 0. ``step()`` of an optimizer or a scheduler acts once per global batch.
        Checkpoints hold the state of all these objects. All ranks call this method.

        Args:
            objects: modules, ``torch.optim`` optimizers and schedulers, ``torch.amp.GradScaler``,
                and averages of ``torch.optim.swa_utils``, in any order.

        Returns:
            The object, or a tuple of the objects in their order.

        Raises:
            MotleyError: an object cannot train on several ranks, or differs between them.
        """
        for each in objects:
            if isinstance(each, nn.Module):
                self._prepare_model(each)
        for each in objects:
            if not isinstance(each, nn.Module):
                self._prepare_other(each)
        if self._loop is not None and not self._watches:
            register_optimizer_step_pre_hook(self._check_step)
            self._watches = True
        return objects[0] if len(objects) == 1 else objects

    def _prepare_model(self, model: nn.Module) -> None:
        shards = self._state.shards
        if shards and model in shards:
            return
        check_model(model)
        if shards is None:
            model.to(self.device)
        self._state.add(model)
        if self._loop is None:
            return
        if isinstance(model, torch.optim.swa_utils.AveragedModel):
            self._loop.gate.add_gated(model, "update_parameters")
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shapes = {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
        check_same("model", shapes, self._loop.names)
        self._loop.gate.statistics.add(model)
        if shards:
            shards.add(model)
        else:
            broadcast([each.detach() for each in tensors.values()])

    def _prepare_other(self, each: Any) -> None:
        gate = self._loop.gate if self._loop else None
        if isinstance(each, DataLoader):
            raise MotleyError(
                "lab.prepare() was given a DataLoader: pass it to lab.loader(), with train=False "
                "for held-out data"
            )
        is_new = not self._state.has(each)
        if isinstance(each, torch.optim.Optimizer):
            if self._state.shards:
                if each in self._state.shards:
                    return
                self._state.shards.replace_parameters(each)
            self._check_optimizer(each)
            if gate:
                gate.add_optimizer(each)
            elif is_new:
                each.register_step_post_hook(lambda *_: self._end_bare_step())
        elif isinstance(each, torch.amp.GradScaler):
            if self._state.shards:
                raise MotleyError(
                    'with strategy="fsdp", a GradScaler would see only the gradient of this '
                    "rank's part of the parameters: leave it out, since lab.autocast() has a loss "
                    "scale that all ranks share"
                )
            if gate:
                gate.add_scaler(each)
            elif is_new:
                self._watch_updates(each)
        elif callable(getattr(each, "step", None)):  # a scheduler, of torch or of another package
            if gate:
                gate.add_gated(each, "step")
        else:
            raise MotleyError(
                f"lab.prepare() was given a {type(each).__name__}: it takes models, optimizers, "
                "schedulers and a GradScaler; lab.register() takes other objects with a state"
            )
        self._state.add(each)

    def _end_bare_step(self) -> None:
        """Store the loss at the end of a step, in a process that trains alone."""
        self._loss, self._ended_at = self._losses, self._position.step

    def _watch_updates(self, scaler: Any) -> None:
        """End a step even if the scaler skips ``optimizer.step()``.

        A process that trains alone uses this method.
        """
        usual = scaler.update

        def update(*args: Any, **options: Any) -> Any:
            self._end_bare_step()
            return usual(*args, **options)

        scaler.update = update

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise MotleyError if an optimizer would step with this rank's gradient alone."""
        if any(each is optimizer for each in self._state.optimizers):
            return
        known = {id(p) for model in self._state.models for p in model.parameters()}
        own = list_parameters(optimizer)
        if self._state.shards:
            own = self._state.shards.find_whole(own)
        if any(id(each) in known for each in own):
            raise MotleyError(
                f"lab.prepare() was not given this {type(optimizer).__name__}, which would step "
                "with the gradient of one rank alone: pass it too, as in "
                "`lab.prepare(model, optimizer)`"
            )

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        known = {id(p) for model in self._state.models for p in model.parameters()}
        own = list_parameters(optimizer)
        unknown = sum(id(each) not in known for each in own)
        if unknown:
            raise MotleyError(
                f"{unknown} of the {len(own)} parameters of {type(optimizer).__name__} belong to "
                "no model that lab.prepare() was given: pass all models, and create the optimizer "
                "from their parameters, after any change that replaces parameters"
            )

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state of a prepared model in whole tensors; all ranks call it.

        With ``strategy="fsdp"`` each rank has a part of every parameter, and this method gathers
        them::

            state = lab.state_dict(model)
            if lab.is_main:
                torch.save(state, "model.pt")

        Returns:
            The tensors by name on rank 0, on the CPU; an empty dictionary on other ranks.
        """
        keep = snapshot if self.is_main else discard
        tensors = {name: keep(each.detach()) for name, each in model.state_dict().items()}
        return tensors if self.is_main else {}

    def register(self, *objects: Any) -> None:
        """Save the state of further objects with each checkpoint.

        Args:
            objects: objects with ``state_dict()`` and ``load_state_dict()``, equal on all ranks.
        """
        for each in objects:
            self._state.add(each)

    def accelerate(self, accelerator: Any) -> Any:
        """Let an ``accelerate.Accelerator`` train on all ranks; return the Accelerator.

        Call this method before ``accelerator.prepare()``. See
        :mod:`motley.library.integrations.accelerate`.
        """
        from motley.library.integrations.accelerate import connect_accelerator

        return connect_accelerator(self, accelerator)

    def loader(self, loader: "DataLoader[Any]", train: bool = True) -> LabLoader:
        """Return a loader that yields this rank's rows of each batch.

        The batch size of ``loader`` counts the rows of all ranks together. Its sampler decides the
        order, and only rank 0 iterates over the sampler. No row is padded, dropped or repeated. All
        ranks call this method.

        Args:
            loader: the loader of a script for one machine.
            train: False for held-out data, whose rows need no :meth:`backward`. Ranks may get
                different numbers of batches. In ``torch.no_grad()``, every pass counts as a pass
                over held-out data.

        Raises:
            MotleyError: the rows cannot be divided among ranks.
        """
        check_loader(loader)
        if self._loop is not None:
            facts = {"rows": len(loader.dataset), "batches an epoch": len(loader)}  # type: ignore[arg-type]
            check_same("data", facts, self._loop.names)
        result = LabLoader(
            self._loop,
            self._position,
            loader,
            train,
            self._start_pass,
            self._saver.restore_random_state,
        )
        if train:
            self._saver.loaders.append(result)
        return result

    def batches(
        self, make: Callable[[int], Any], count: int, seed: int = 0, train: bool = True
    ) -> LabLoader:
        """Return a loader of this rank's rows of batches that a function makes.

        Use it in a script that has no DataLoader. Every rank calls the function for the whole
        global batch, and keeps its own rows::

            train = lab.batches(lambda n: get_batch("train"), count=5000)
            for x, y in train:
                ...

        Args:
            make: function that returns a batch, given the batch's number in the pass, from 0. A
                batch is a tensor, or a tuple, list or dictionary of tensors, with the rows in
                dimension 0. A batch may depend on its number and on random numbers, which are the
                same on all ranks.
            count: number of batches.
            seed: seed of the function's random numbers. The random numbers of a batch depend on
                this seed and the batch's number alone, also in a process that is alone.
            train: as for :meth:`loader`.

        Raises:
            MotleyError: a batch has no rows, or another number of rows than the first.
        """
        if count < 1:
            raise MotleyError(f"lab.batches(count={count}) is below 1 batch: give 1 or more")
        return self.loader(MadeBatches(make, count, seed, self.device).loader(), train)

    # -- the loop

    @property
    def epoch(self) -> int:
        """Number of the present epoch, or of the epoch at which a resumed run continues."""
        return self._position.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs. A resumed run starts with the epoch that it continues.

        The loaders pass each number to ``set_epoch`` of samplers and data sets that have it.
        """
        self._epochs = count
        for epoch in range(self._position.epoch, count):
            self._position.start_epoch(epoch)
            yield epoch

    @property
    def batch(self) -> int:
        """Number of the present global batch in its epoch, the same on all ranks."""
        return max(0, self._position.batch - 1)

    @property
    def rows(self) -> int | None:
        """Number of this rank's rows in the batch that the loader has yielded last.

        0: the rank has no rows in this global batch. None: the process is alone, and has all rows.
        """
        if self._loop is None:
            return None
        return self._loop.piece.rows if self._loop.piece else 0

    @property
    def stepped(self) -> bool:
        """True if the last ``optimizer.step()`` has changed parameters.

        A script that averages the weights updates its average after such a step: ``if lab.stepped:
        ema.update(model)``.
        """
        return self._loop is None or self._loop.gate.stepped

    @property
    def loss(self) -> float | None:
        """Mean loss of the global batch of the last step, the same on all ranks.

        If a step has several backward calls, their losses are added up. None before the first step.
        """
        if self._loop is not None:
            return self._loop.gate.loss
        return None if self._loss is None else float(self._loss)

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        reduction: str = "mean",
        **options: Any,
    ) -> None:
        """Compute gradients of this rank's part of the loss of the global batch.

        Args:
            loss: scalar loss of the rows that the loader has yielded last.
            weight: total weight of these rows if rows differ in weight. For a mean over tokens or
                boxes, this is the number of tokens or boxes. None: the number of rows.
            reduction: ``mean`` if ``loss`` is a mean over the rows, ``sum`` if it is a sum.
            options: further arguments of ``Tensor.backward``.
        """
        if self._loop is None:
            if self._ended_at not in (None, self._position.step):
                self._losses = self._ended_at = None
            own = loss.detach()
            self._losses = own if self._losses is None else self._losses + own
            loss.backward(**options)  # type: ignore[no-untyped-call]
            return
        if not self._checked:  # here, because a script may change the mode of layers until now
            check_statistics(self._state.models, self._allow)
            check_optimizers(self._state.optimizers)
            self._checked = True
        self._position.check_loss(loss, weight is None and reduction == "mean")
        self._loop.gate.backward(loss, weight, reduction, options)

    def step(self, compute: Callable[[Any], Any], rows: Any, **options: Any) -> Tensor | None:
        """Compute the loss of some rows and its gradient, in smaller pieces if memory runs out.

        After an out-of-memory error, this rank computes the same rows again in pieces of half the
        size. Each row is read with the same random numbers::

            for batch in loader:
                lab.step(lambda rows: loss_fn(model(rows["x"]), rows["y"]), batch)
                optimizer.step()
                optimizer.zero_grad()

        Args:
            compute: function of rows that returns their loss, or the loss and its weight; see
                :meth:`backward`.
            rows: the rows that the loader has yielded last. The script may have moved them to a
                device. Make all other changes to rows in ``compute``, which also gets rows that are
                read once more.
            options: further arguments of :meth:`backward`.

        Returns:
            The loss of the last piece, detached.

        Raises:
            MotleyError: the rows were changed after the loader yielded them.
            NoMemoryError: not even one row fits, or a process that is alone has no ``micro_batch``.
        """
        loss: Tensor | None = None

        def run(part: Any) -> None:
            nonlocal loss
            result = compute(part)
            loss, weight = result if isinstance(result, tuple) else (result, None)
            assert loss is not None
            self.backward(loss, weight, **options)

        if self._loop is not None:
            self._loop.compute(run, rows)
        else:
            try:
                run(rows)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                raise NoMemoryError(
                    f"{shortage(error, self.device)}: give motley.join() a micro_batch, and each "
                    "process computes its rows in pieces of that size"
                ) from error
        return None if loss is None else loss.detach()

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, **options: Any
    ) -> Tensor:
        """Clip the gradient of the global batch, as ``torch.nn.utils.clip_grad_norm_``.

        Args:
            parameters: parameters with gradients.
            max_norm: norm to clip to.
            options: further arguments of torch's function.

        Returns:
            The norm before clipping. The result is 0 if this rank has further pieces of the present
            global batch, because the gradient is not complete.
        """
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._loop is None:
            return torch.nn.utils.clip_grad_norm_(chosen, max_norm, **options)
        shards = self._state.shards
        if shards:
            chosen = shards.find_whole(chosen)
        if not self._loop.gate.add_up_for(chosen):
            return torch.zeros(())
        if shards:
            chosen = shards.find_own(chosen)
        gradients = [each.grad for each in chosen if each.grad is not None and each.grad.numel()]
        norm = torch.nn.utils.get_total_norm(gradients, **options).to(self.device)
        rows = self._loop.repeat_collective(lambda: all_gather_floats([norm], can_leave=True))
        # Unlike devices round differently, and clip factors that differ in one bit would make the
        # ranks' parameters diverge.
        total = rows[0][0]
        if shards:
            total = combine_norms([row[0] for row in rows], options.get("norm_type", 2.0))
        self._loop.gate.norm = total
        norm.fill_(total)
        torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, norm)
        return norm

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager in which this rank computes in its own precision.

        If a rank computes in fp16, all ranks share one loss scale. A process that is alone computes
        in bf16 if its device is fast in bf16, else in fp32.
        """
        if self._loop is None:
            precision, _ = promised_precision(self.device)
            own = torch.bfloat16 if precision == "bf16" else None
        else:
            precisions = self._loop.session.group.precisions
            own = _TYPES.get(precisions[self.rank])
            if "fp16" in precisions and not self._loop.scale.dynamic:
                started = start_scale("auto", precisions)
                self._loop.scale.value, self._loop.scale.dynamic = started.value, True
        if own is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=own)

    # -- checkpoints

    def save(self, best: bool = False) -> None:
        """Save a checkpoint of everything that :meth:`prepare` and :meth:`register` were given.

        Rank 0 writes the checkpoint to the folder ``checkpoints`` of the run while training
        continues. The folder keeps the two newest checkpoints, whose files have hashes. If this
        rank computes a global batch in several pieces, only the call after the last piece saves.
        With ``strategy="fsdp"`` all ranks call it.

        Args:
            best: True: also write the checkpoint to the folder ``best`` of the run.
        """
        self._saver.save(best)

    def best(self, metric: float, higher: bool = True) -> bool:
        """Save a checkpoint in the folder ``best`` if a metric is the best of the run so far.

        All ranks call it with the same number.

        Args:
            metric: a number from :meth:`reduce`, so that it is the same on all ranks.
            higher: True if higher is better.

        Returns:
            True if the metric is the best so far.
        """
        return self._saver.save_best(metric, higher)

    def resume(self, path: str | Path = "auto") -> bool:
        """Continue from a checkpoint if there is one; all ranks call this before the first loop.

        Call it after :meth:`prepare`, :meth:`register` and :meth:`loader`. :meth:`epochs` and the
        loader then continue with the batch that follows the last batch of the checkpoint. The
        number of ranks may differ from that of the run that saved it.

        Args:
            path: a run folder or a checkpoint. ``auto``: the run that ``motley.join(run=...)``
                names, or the newest unfinished run of this script.

        Returns:
            True if there was a checkpoint.
        """
        return self._saver.resume(str(path))

    def _start_pass(self, batches: Batches) -> None:
        """Prepare for a pass over training data; the loader calls it.

        Args:
            batches: indices of each global batch.
        """
        self._checked = False
        if self._loop is not None:
            left = max(1, self._epochs - self._position.epoch)
            self._loop.start_pass(batches, self._position.step, left)


def _collect(value: Any, leaves: list[Any]) -> None:
    """Append all numbers and tensors of a value to ``leaves``, in a fixed order."""
    if isinstance(value, dict):
        for each in value.values():
            _collect(each, leaves)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, leaves)
    else:
        leaves.append(value)


def _fill(value: Any, sums: Iterator[Tensor]) -> Any:
    """Return a copy of a nested value in which the next sums replace the numbers."""
    if isinstance(value, dict):
        return {key: _fill(each, sums) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_fill(each, sums) for each in value)
    total = next(sums)
    if isinstance(value, Tensor):
        return total.view(value.shape).to(value)
    number = float(total)
    return int(number) if isinstance(value, int) else number
