"""Models of a user's own loop that are sharded over the ranks: ``motley.join(strategy="fsdp")``.

The optimizers step this rank's shard of each parameter as a plain tensor. Each backward pass sums
the gradients over all ranks, and each rank receives the sum of its shard (reduce-scatter). All
ranks, also those without rows, therefore run the same number of passes.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from motley.engines.base import silenced
from motley.engines.fsdp import (
    BlockCalls,
    LocalShards,
    check_parts,
    reshard,
    shard_net,
    share_tensor,
)
from motley.engines.gradient_sum import broadcast
from motley.engines.optimizer import TRIAL_RATE, steps_elementwise
from motley.engines.step_timer import mark_time, seconds_between
from motley.errors import MotleyError
from motley.library.gradient_exchange import OptimizerSum, list_parameters
from motley.tasks.net import find_blocks
from motley.text import name_some

ENGINE, INSTEAD = 'strategy="fsdp"', 'strategy="ddp"'
_PASSES = 3.0  # time of a forward and a backward pass, in forward passes


class ShardedSum(OptimizerSum):
    """One optimizer under FSDP. Its gradients are summed by each backward pass already.

    Args:
        optimizer: the optimizer of sharded parameters.
        used: DTensors that have a gradient from this rank's rows in the present step.
    """

    def __init__(self, optimizer: Optimizer, used: Set[Tensor]) -> None:
        self.shards = LocalShards(optimizer)
        super().__init__(optimizer, _send_nothing)
        self._used = used
        usual = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            usual(set_to_none=set_to_none)
            if set_to_none:
                self.shards.zero_gradients()

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def all_parameters(self) -> list[Tensor]:
        """Return all DTensors of the optimizer, frozen ones included."""
        return list(self.shards.whole)

    def open(self) -> None:
        """Do nothing: the backward pass sends the gradients by itself."""

    def wait(self) -> tuple[list[int], list[Tensor]]:
        """Return this rank's shards of the summed gradients; see OptimizerSum."""
        self._check_known()
        self.shards.with_gradients()
        absent = [number for number, each in enumerate(self.parameters()) if each not in self._used]
        return absent, [each.grad for each in self.summed_parameters if each.grad is not None]

    def take(self) -> None:
        """Do nothing: each gradient is already the sum over all ranks."""

    @property
    def summed_parameters(self) -> Sequence[Tensor]:
        """This rank's shards of the parameters that require gradients now."""
        pairs = zip(self.shards.whole, self.shards.own, strict=True)
        return [own for whole, own in pairs if whole.requires_grad]


def _send_nothing(bucket: Any) -> Any:
    raise AssertionError("FSDP sums gradients in the backward pass")


class ModelShards:
    """All models of a training loop, sharded: each rank holds a shard of every parameter.

    Args:
        device: device of this rank.
        size: number of ranks.
        wire: dtype in which gradients are reduce-scattered; None: dtype of the parameters.

    Attributes:
        loss_factor: factor on each loss, equal to the number of ranks. FSDP averages gradients over
            the ranks, and the factor makes the average a sum.
    """

    def __init__(self, device: torch.device, size: int, wire: torch.dtype | None) -> None:
        self._device, self._wire, self.loss_factor = device, wire, float(size)
        self._mesh = init_device_mesh(device.type, (size,))
        self._models: dict[nn.Module, BlockCalls] = {}
        self._sums: dict[Optimizer, ShardedSum] = {}
        self._replaced: dict[Tensor, Tensor] = {}  # the user's parameter: its DTensor
        self._used: set[Tensor] = set()  # DTensors with a gradient; see ShardedSum
        self._watched: set[Tensor] = set()
        self._is_empty = False  # True if the present piece has no rows
        self._silence = contextlib.ExitStack()
        self._start: Any = None  # start time of the block that computes now
        self._spans: list[tuple[Any, Any]] = []  # start and end of each block in this step
        self._last: list[tuple[Any, Any]] = []  # start and end of each block in the previous step

    # -- models and optimizers

    def __contains__(self, owner: Any) -> bool:
        """Return True for a model or an optimizer that is sharded already."""
        return owner in self._models or owner in self._sums

    def add(self, model: nn.Module) -> None:
        """Divide a model among the ranks, with the values of rank 0. All ranks call it.

        The model moves to the device a few blocks at a time.

        Raises:
            MotleyError: the model cannot be sharded.
        """
        if isinstance(model, torch.optim.swa_utils.AveragedModel):
            raise MotleyError(
                f"{ENGINE} does not shard an AveragedModel: average the parameters after "
                f"lab.prepare(), as in `average[name].lerp_(parameter, 0.01)`, or take {INSTEAD}"
            )
        check_parts(model, ENGINE, INSTEAD)
        before = dict(model.named_parameters(remove_duplicate=False))
        blocks = find_blocks(model)
        calls = BlockCalls(blocks)
        shard_net(
            model, calls.modules, self._fill, self._wire, mesh=self._mesh,
            reshard_after_forward=True,
        )  # fmt: skip
        after = dict(model.named_parameters(remove_duplicate=False))
        torn = [name for name, old in before.items()
                if self._replaced.setdefault(old, after[name]) is not after[name]]  # fmt: skip
        if torn:
            raise MotleyError(
                f"{ENGINE} cannot shard {name_some(torn, 3)}, which one block shares with "
                f"another: take {INSTEAD}, or share only parameters that are outside of the "
                "blocks"
            )
        for old in before.values():
            old.data = old.new_empty(0)  # frees the whole tensor that the optimizer still holds
        sums_unused = getattr(model, "set_reduce_scatter_unused_params", None)
        if sums_unused is not None:  # since torch 2.14
            sums_unused(True)  # ranks may use unlike parameters
        if hasattr(model, "generate"):  # calls parts of the model, and not the model
            register_fsdp_forward_method(model, "generate")
        for path, part in model.named_modules():
            if issubclass(type(part), FSDPModule):
                part.register_forward_pre_hook(partial(self._watch, path, after))
        self._models[model] = calls
        for block in calls.modules or [model]:
            block.register_forward_pre_hook(self._begin_block)
            block.register_forward_hook(self._end_block, prepend=True)

    def _watch(self, path: str, sharded: Mapping[str, Tensor], module: nn.Module, _: Any) -> None:
        """Register hooks that record which parameters of a module get a gradient.

        Args:
            path: name of the module.
            sharded: the DTensors of the model by name.
            module: the module, while its parameters are gathered.
        """
        for name, gathered in module.named_parameters(path, remove_duplicate=False):
            own = sharded[name]
            if own is not gathered and gathered.requires_grad and own not in self._watched:
                self._watched.add(own)
                gathered.register_hook(partial(self._note_gradient, own))  # type: ignore[no-untyped-call]

    def _note_gradient(self, own: Tensor, _: Tensor) -> None:
        if not self._is_empty:
            self._used.add(own)

    def _fill(self, *modules: nn.Module) -> None:
        """Move modules to the device, and give them the values of rank 0."""
        for module in modules:
            module.to(self._device)
            tensors = [*module.parameters(), *module.buffers()]
            broadcast([each.detach() for each in tensors if not isinstance(each, DTensor)])

    def replace_parameters(self, optimizer: Optimizer) -> None:
        """Give an optimizer the sharded parameters in place of the user's.

        Raises:
            MotleyError: the optimizer's step of an element depends on other elements of the tensor.
        """
        if not _is_elementwise(optimizer):
            raise MotleyError(
                f"{type(optimizer).__name__} computes with whole tensors, and {ENGINE} gives it "
                f"parts of tensors: take {INSTEAD}, or an optimizer such as AdamW or SGD"
            )
        for group in optimizer.param_groups:
            group["params"] = [self._replaced.get(each, each) for each in group["params"]]
        for old, slots in list(optimizer.state.items()):  # Adagrad has a state before step 1
            own = self._replaced.get(old, old)
            del optimizer.state[old]
            optimizer.state[own] = {name: _share(each, own) for name, each in slots.items()}

    def make_sum(self, optimizer: Optimizer) -> ShardedSum:
        """Return the ShardedSum of an optimizer whose parameters are sharded."""
        self._sums[optimizer] = ShardedSum(optimizer, self._used)
        return self._sums[optimizer]

    def find_whole(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the DTensor of each given parameter.

        A parameter may be a tensor of the unsharded model, this rank's shard of a tensor, or a
        DTensor.
        """
        known = {id(own): whole for own, whole in self._pairs()}
        return [known.get(id(each), self._replaced.get(each, each)) for each in parameters]

    def find_own(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's shard of each given DTensor. Skip DTensors without an optimizer."""
        known = {id(whole): own for own, whole in self._pairs()}
        return [known[id(each)] for each in parameters if id(each) in known]

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for each in self._sums.values():
            yield from zip(each.shards.own, each.shards.whole, strict=True)

    # -- passes

    def begin_piece(self, is_empty: bool) -> None:
        """Start the forward and backward passes over a part of this rank's rows of a global batch.

        Args:
            is_empty: True if the rank has no rows. The rank's gradients are then zero.
        """
        self._silence.close()
        self._is_empty = is_empty
        for model, calls in self._models.items():
            calls.start()
            self._silence.enter_context(silenced(model, is_empty))

    def check_blocks(self) -> None:
        """Check that the forward passes have called either all blocks of a model or none.

        Raises:
            MotleyError: a forward pass left out a block. Other ranks may then wait for this rank
                while they gather the block's parameters.
        """
        for calls in self._models.values():
            left_out = calls.list_left_out()
            if left_out and len(left_out) < len(calls.modules):
                raise MotleyError(
                    f"the forward pass did not call {name_some(left_out, 3)}, and {ENGINE} needs "
                    f"every rank to gather each block: call every block, or take {INSTEAD}"
                )

    def show_gradients(self) -> None:
        """Set the attribute ``grad`` of this rank's shards, for all optimizers.

        The gradients may still be multiplied by the loss scale.
        """
        for each in self._sums.values():
            each.shards.with_gradients()

    def end_step(self) -> None:
        """End the forward and backward passes of a step."""
        self._silence.close()
        self._last, self._spans = self._spans, []
        self._used.clear()

    def measure_compute_s(self, at_once: bool) -> float:
        """Return the seconds that this rank's blocks computed in a step, without communication.

        Only forward passes are timed. A backward pass is counted as twice the time of its forward
        pass, because its own time would include waiting for other ranks.

        Args:
            at_once: True: measure the present step. False: measure the previous step, as on a GPU.
        """
        spans = self._spans if at_once else self._last
        if spans and self._device.type == "cuda":
            spans[-1][1].synchronize()
        return _PASSES * sum(seconds_between(*span) for span in spans)

    def _begin_block(self, module: nn.Module, _: Any) -> None:
        self._start = (
            mark_time(self._device) if module.training and torch.is_grad_enabled() else None
        )

    def _end_block(self, module: nn.Module, *_: Any) -> None:
        if self._start is not None:
            self._spans.append((self._start, mark_time(self._device)))
            self._start = None

    # -- state

    @contextlib.contextmanager
    def put_together(self) -> Iterator[None]:
        """Give all optimizers DTensors in the ``with`` block, so that their state can be saved."""
        with contextlib.ExitStack() as stack:
            for each in self._sums.values():
                stack.enter_context(each.shards.put_together())
            yield

    def share(self, owner: Any, state: Any) -> Any:
        """Return a state in which each tensor is cut to this rank's shard.

        The state belongs to a model or an optimizer.
        """
        if isinstance(owner, nn.Module):
            tensors = dict(owner.state_dict(keep_vars=True))
            return {name: _share(value, tensors.get(name)) for name, value in state.items()}
        if isinstance(owner, Optimizer):
            parameters = list_parameters(owner)
            parts = {
                number: {name: _share(value, parameters[number]) for name, value in slots.items()}
                for number, slots in state["state"].items()
            }
            return {**state, "state": parts}
        return state

    def reshard(self) -> None:
        """Free parameters that stay gathered because no backward pass followed a forward pass."""
        for model in self._models:
            reshard(model)


def discard(value: Tensor) -> Tensor:
    """Take part in a gather whose result only another rank needs; return an empty tensor."""
    if isinstance(value, DTensor):
        value.full_tensor()
    return torch.empty(0)


def combine_norms(norms: Sequence[float], kind: float) -> float:
    """Return the norm of a vector from the norms of its parts.

    Args:
        norms: norm of each part.
        kind: p of the p-norm.
    """
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), kind))


def _share(value: Any, own: Any) -> Any:
    return share_tensor(value, own) if isinstance(value, Tensor) else value


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Return True if an optimizer steps each element of a tensor independently of all others.

    The function tests a second optimizer of the same class on a small tensor.

    Raises:
        MotleyError: a second optimizer of the class cannot be made.
    """
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    options = {name: each for name, each in optimizer.defaults.items() if name in known}
    if "lr" in known:
        options["lr"] = TRIAL_RATE

    def maker(**more: Any) -> Callable[[nn.Module], Optimizer]:
        return lambda net: kind(net.parameters(), **{**options, **more})

    try:
        return steps_elementwise(
            maker(), maker(**({"weight_decay": 0.0} if "weight_decay" in known else {}))
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise MotleyError(
            f"{kind.__name__} fails on the small tensor on which {ENGINE} tests it "
            f"({type(error).__name__}: {error}): take {INSTEAD}, or an optimizer of torch.optim"
        ) from error
