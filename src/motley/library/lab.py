"""The user's own training loop on all machines: :func:`join` and :class:`Lab`."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from motley.comm.collectives import all_gather_floats
from motley.comm.modes import parse_wire
from motley.data.source import make_seed
from motley.engines.gradient_sum import broadcast
from motley.engines.named_state import seed_random
from motley.errors import MotleyError
from motley.faults import Phase
from motley.library.piece_loader import (
    PieceReader,
    RankReader,
    check_loader,
    read_held_out,
)
from motley.library.refusals import (
    check_allowed,
    check_model,
    check_same,
    check_statistics,
)
from motley.library.sample_order import SampleOrder, kept_random_state
from motley.library.session import Session, check_joinable, is_alone, own_device
from motley.library.share_schedule import Piece, ShareSchedule
from motley.library.step_gate import StepGate
from motley.plan.precision import LossScale, PerRank, read_shares, start_scale
from motley.plan.wire import Addition

T = TypeVar("T")
SHARES = "MOTLEY_SHARES"  # in the environment: shares of the ranks, as in 5,0,3
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_lab: "Lab | None" = None  # the one of this process


def join(
    *,
    shares: Sequence[float] | None = None,
    micro_batch: int | None = None,
    wire: str = "exact",
    precision: str = "auto",
    seed: int = 0,
    allow: Collection[str] = (),
) -> "Lab":
    """Connect this script to all other ranks of its launch, and return the lab of all.

    Call it once, before the process group and the model are made::

        lab = motley.join()
        model, optimizer = lab.prepare(model, optimizer)
        loader = lab.loader(train_loader)
        for epoch in lab.epochs(10):
            for x, y in loader:
                lab.backward(loss_fn(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    Start the script as ``mpirun -np 5 --hostfile hosts.txt motley run SCRIPT.py``, with srun or
    torchrun, or alone. Without a launcher, and without ``shares`` and ``micro_batch``, everything
    is as in the script without Motley, to the last bit.

    Args:
        shares: rows of each rank, in proportion; a rank may have 0. None: the variable
            MOTLEY_SHARES, as in ``5,0,3``, else equal at first, and then as fast as each rank is.
        micro_batch: most rows that a rank computes at once. None: all of its rows.
        wire: form of the gradients between ranks, as ``--wire`` of ``motley train``.
        precision: type in which :meth:`Lab.autocast` computes: fp32, bf16, fp16, or auto for the
            fastest on each device.
        seed: seed of the random numbers of data sets, and of drop-out.
        allow: names of what is not exact and is accepted: ``batch_norm``.

    Raises:
        MotleyError: the script has joined already, or has a process group of its own.
    """
    global _lab
    if _lab is not None:
        raise MotleyError(
            "motley.join() was called twice in one process: keep the lab that the first call "
            "returned"
        )
    check_joinable()
    check_allowed(allow)
    text = os.environ.get(SHARES)
    given = read_shares(text) if text else None
    if shares is not None:
        given = read_shares(",".join(map(str, shares)))
    if micro_batch is not None and micro_batch < 1:
        raise MotleyError(f"micro_batch={micro_batch}: give 1 row or more")
    alone = is_alone() and given is None and micro_batch is None
    with kept_random_state():  # the measurement of a device's precision draws numbers
        session = None if alone else Session(precision)
    _lab = Lab(session, given, micro_batch, wire, seed, allow)
    return _lab


class Lab:
    """All ranks of the launch, for a training loop of the user's own. Made by :func:`join`.

    Attributes:
        rank: number of this rank among those that train.
        size: number of ranks that train.
        device: device of this rank.
        epoch: number of the present epoch of :meth:`epochs`.
    """

    def __init__(
        self,
        session: Session | None,
        shares: PerRank[float] | None,
        micro_batch: int | None,
        wire: str,
        seed: int,
        allow: Collection[str],
    ) -> None:
        self._session, self._seed, self._allow = session, seed, frozenset(allow)
        self.epoch = 0
        self._models: list[nn.Module] = []
        self._step = 0  # of the next global batch
        self._piece: Piece | None = None
        self._loss: Tensor | None = None  # without other ranks
        self._checked = False  # True once the layers of all models were checked in this epoch
        if session is None:
            self.rank, self.size, self.device = 0, 1, own_device()
            self._names = ["this process"]
            return
        group = session.group
        assert group.rank is not None
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self._names = [f"rank {worker.rank} on {worker.host}" for worker in group.workers]
        equal = (1.0,) * self.size
        self._schedule = ShareSchedule(
            equal if shares is None else shares.for_ranks(self.size), micro_batch
        )
        self._scale = LossScale(1.0, dynamic=False)
        self._order = SampleOrder()
        mode = parse_wire(wire)
        if mode is None or mode.addition is Addition.LOCAL_STEPS:
            raise MotleyError(f"wire={wire!r} is not exact, bf16, fp16 or powersgd:RANK")
        reducer = mode.in_job(group.precisions).reducer(self.device)
        self._gate = StepGate(self._names, self.rank, self.device, reducer, self._scale)
        self._gate.clock.at_once = not group.has_gpus
        self._gate.clock.on_phase = self._set_status

    def __repr__(self) -> str:
        return f"Lab(rank {self.rank} of {self.size}, {self.device})"

    def _set_status(self, phase: Phase) -> None:
        if self._session is not None:  # no limit: the user's own code may take any time
            self._session.world.supervisor.set_status(phase, None)

    # -- the ranks

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 alone, with the arguments of Python's ``print``."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def reduce(self, value: T) -> T:
        """Add numbers up over all ranks, and return the sums; all ranks call it.

        Args:
            value: a number, a tensor, or a list, tuple or dictionary of these. Give sums and
                counts, and divide afterwards, since a mean of means is wrong for unequal shares::

                    right, count = lab.reduce((right, count))
        """
        if self._session is None:
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
        sums = torch.tensor(all_gather_floats(list(flat)), dtype=torch.float64).sum(dim=0)
        places = iter(torch.split(sums, [len(part) for part in parts]))
        result: T = _fill(value, places)
        return result

    # -- preparing

    def prepare(self, *objects: Any) -> Any:
        """Make models, optimizers, schedulers and scalers those of all ranks; return them.

        The objects stay the same, and are changed in place: models move to :attr:`device` and get
        the values of rank 0. ``step()`` of an optimizer or a scheduler acts once per global batch.
        All ranks call it.

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
        return objects[0] if len(objects) == 1 else objects

    def _prepare_model(self, model: nn.Module) -> None:
        check_model(model)
        model.to(self.device)
        if self._session is None:
            return
        if isinstance(model, torch.optim.swa_utils.AveragedModel):
            self._gate.add_gated(model, "update_parameters")
        else:
            self._models.append(model)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shapes = {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
        check_same("model", shapes, self._names)
        broadcast([each.detach() for each in tensors.values()])

    def _prepare_other(self, each: Any) -> None:
        if isinstance(each, torch.optim.Optimizer):
            if self._session is not None:
                self._prepare_optimizer(each)
        elif isinstance(each, torch.amp.GradScaler):
            if self._session is not None:
                self._gate.add_scaler(each)
        elif isinstance(each, DataLoader):
            raise MotleyError(
                "lab.prepare() was given a DataLoader: pass it to lab.loader(), with train=False "
                "for held-out data"
            )
        elif callable(getattr(each, "step", None)):  # a scheduler, of torch or of another package
            if self._session is not None:
                self._gate.add_gated(each, "step")
        else:
            raise MotleyError(
                f"lab.prepare() was given a {type(each).__name__}: it takes models, optimizers, "
                "schedulers and a GradScaler"
            )

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        known = {id(p) for model in self._models for p in model.parameters()}
        own = [each for group in optimizer.param_groups for each in group["params"]]
        unknown = sum(id(each) not in known for each in own)
        if unknown:
            raise MotleyError(
                f"{unknown} of the {len(own)} parameters of {type(optimizer).__name__} belong to "
                "no model that lab.prepare() was given: pass all models, and make the optimizer "
                "from the parameters of the same models, after any change that replaces them"
            )
        self._gate.add_optimizer(optimizer)

    def accelerate(self, accelerator: Any) -> Any:
        """Let an ``accelerate.Accelerator`` train on all ranks, as on one machine; return it.

        Call it before ``accelerator.prepare()``. See :mod:`motley.library.integrations.accelerate`.
        """
        from motley.library.integrations.accelerate import connect_accelerator

        return connect_accelerator(self, accelerator)

    def loader(self, loader: "DataLoader[Any]", train: bool = True) -> "LabLoader":
        """Return a loader that yields this rank's rows of each batch.

        The batch size of ``loader`` is that of all ranks together. Its sampler decides the order,
        and rank 0 asks it. No row is padded, dropped or repeated. All ranks call it.

        Args:
            loader: the loader of a script for one machine.
            train: False for held-out data, whose rows need no :meth:`backward`. Ranks may get
                different numbers of batches.

        Raises:
            MotleyError: the rows cannot be divided among ranks.
        """
        check_loader(loader)
        if self._session is not None:
            facts = {"rows": len(loader.dataset), "batches an epoch": len(loader)}  # type: ignore[arg-type]
            check_same("data", facts, self._names)
        return LabLoader(self, loader, train)

    # -- the loop

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs, from the one at which the training continues.

        Samplers and data sets that have ``set_epoch`` are given each number by the loaders.
        """
        for epoch in range(self.epoch, count):
            self.epoch = epoch
            yield epoch

    @property
    def batch(self) -> int:
        """Number of the present global batch in its epoch, the same on all ranks."""
        return self._piece.batch if self._piece else 0

    @property
    def rows(self) -> int:
        """Number of this rank's rows in the present piece; 0 if the rank has none in the batch."""
        return self._piece.rows if self._piece else 0

    @property
    def stepped(self) -> bool:
        """True if the last ``optimizer.step()`` has changed parameters.

        An average of the user's own is updated then: ``if lab.stepped: ema.update(model)``.
        """
        return self._session is None or self._gate.stepped

    @property
    def loss(self) -> float | None:
        """Mean loss of the global batch of the last step, the same on all ranks; None before it.

        Several backward calls of a step are added up.
        """
        if self._session is not None:
            return self._gate.loss
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
            weight: weight of these rows if they do not count alike, such as their number of tokens
                or boxes, by which ``loss`` is a mean. None: the number of rows.
            reduction: ``mean`` if ``loss`` is a mean over the rows, ``sum`` if it is a sum.
            options: further arguments of ``Tensor.backward``.
        """
        if self._session is None:
            self._loss = loss.detach()
            loss.backward(**options)  # type: ignore[no-untyped-call]
            return
        if not self._checked:  # here, because a script may change the mode of layers until now
            check_statistics(self._models, self._allow)
            self._checked = True
        self._gate.backward(loss, weight, reduction, options)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, **options: Any
    ) -> Tensor:
        """Clip the gradient of the global batch, as ``torch.nn.utils.clip_grad_norm_``.

        Args:
            parameters: parameters with gradients.
            max_norm: norm to clip to.
            options: further arguments of torch's function.

        Returns:
            The norm before clipping; 0 before the last piece of a global batch.
        """
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._session is None:
            return torch.nn.utils.clip_grad_norm_(chosen, max_norm, **options)
        if not self._gate.add_up_for(chosen):
            return torch.zeros(())
        gradients = [each.grad for each in chosen if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, **options)
        # Unlike devices round differently, and clip factors that differ in one bit would make the
        # ranks' parameters diverge.
        norm.fill_(all_gather_floats([norm])[0][0])
        torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, norm)
        return norm

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which this rank computes in its precision.

        If a rank computes in fp16, all ranks share one loss scale.
        """
        if self._session is None:
            return contextlib.nullcontext()
        precisions = self._session.group.precisions
        if "fp16" in precisions and not self._scale.dynamic:
            self._scale.__dict__.update(vars(start_scale("auto", precisions)))
        own = _TYPES.get(precisions[self.rank])
        if own is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=own)

    def _begin(self, piece: Piece) -> None:
        """Start a piece, whose rows are read."""
        if self._piece is None or self._piece.step != piece.step:
            # Drop-out differs between ranks and steps. A repeated step has the same drop-out.
            seed_random(make_seed(self._seed, self.rank, piece.step), self.device)
            assert self._session is not None
            self._session.world.supervisor.step = piece.step
        self._piece, self._step = piece, piece.step + 1
        self._gate.begin_piece(piece)


class LabLoader:
    """A loader of this rank's rows. Made by :meth:`Lab.loader`.

    ``len()`` is the number of global batches of an epoch.
    """

    def __init__(self, lab: Lab, loader: "DataLoader[Any]", train: bool) -> None:
        self._lab, self._loader, self._train = lab, loader, train
        self._passes = 0  # over the data so far
        if lab._session is None:
            return
        if train:
            self._pieces = PieceReader(loader, lab._schedule, lab.rank, lab._seed)
        else:
            self._held_out = RankReader(loader)

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self._loader.dataset

    def __iter__(self) -> Iterator[Any]:
        _set_epoch(self._loader, self._lab.epoch)
        if self._lab._session is None:
            return iter(self._loader)
        return self._train_pass() if self._train else self._held_out_pass()

    def _held_out_pass(self) -> Iterator[Any]:
        lab = self._lab
        batches = lab._order.draw(self._loader)
        lab._set_status(Phase.EVALUATE)
        yield from read_held_out(self._held_out, batches, lab._schedule, lab._step, lab.rank)

    def _train_pass(self) -> Iterator[Any]:
        for piece, rows in self.read_pieces():
            self._lab._begin(piece)
            yield rows

    def read_pieces(self, first: int = 0) -> Iterator[tuple[Piece, Any]]:
        """Yield this rank's pieces of one pass with their rows, without starting them.

        A caller that reads ahead starts each piece with ``Lab._begin`` when it computes it.

        Args:
            first: number of the global batch to start with.
        """
        lab, gate, epoch = self._lab, self._lab._gate, self._passes
        self._passes += 1
        lab._checked = False
        batches = lab._order.draw(self._loader)
        gate.reached = lambda: self._pieces.reached
        gate.clock.restart()
        try:
            while first < len(batches):
                for piece, rows in self._pieces.read(batches, epoch, first, lab._step):
                    yield piece, rows
                    if gate.repeats:
                        first, lab._step = piece.batch, piece.step
                        break
                    first = piece.batch + piece.last
        finally:
            gate.leave_loop()
            lab._piece = None


def _set_epoch(loader: "DataLoader[Any]", epoch: int) -> None:
    """Give the number of the epoch to the parts of a loader that ask for it."""
    for part in (loader.sampler, loader.batch_sampler, loader.dataset):
        set_epoch: Callable[[int], Any] | None = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


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
    """Return a value of the same structure with the next sums in place of its numbers."""
    if isinstance(value, dict):
        return {key: _fill(each, sums) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_fill(each, sums) for each in value)
    total = next(sums)
    if isinstance(value, Tensor):
        return total.view(value.shape).to(value)
    number = float(total)
    return int(number) if isinstance(value, int) else number
