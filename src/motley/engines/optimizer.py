"""The optimizer of a model or of a shard, and its trial on a small layer before step 1."""

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from motley.config.option import Keyword
from motley.config.options import Config
from motley.data.import_timm import optimizers, timm
from motley.engines.named_state import (
    OptimizerMemory,
    State,
    load_model_state,
    load_random_state,
    model_state,
    random_state,
)
from motley.engines.optimizers import find_row, own_optimizers
from motley.engines.out_of_memory import out_of_memory
from motley.errors import MotleyError
from motley.tasks.builtin import get_task
from motley.tasks.task import Task
from motley.text import did_you_mean

for _own in own_optimizers():
    optimizers.register(
        timm.optim.OptimInfo(
            name=_own.name, opt_class=_own.kind, has_betas=_own.has_betas, description=_own.says
        )
    )


def make_optimizer(net: nn.Module, config: Config, fused: bool = True) -> torch.optim.Optimizer:
    """Build the optimizer of ``--opt``, without weight decay on norms and biases.

    Args:
        net: the network, whose parameters are optimised.
        config: the options.
        fused: True: use a fused kernel if the optimizer has one. A fused kernel is also faster on a
            CPU, by a factor of 3.6. Complex parameters have no fused kernel.

    Raises:
        MotleyError: timm has no optimizer of this name, or the optimizer cannot be built.
    """
    task = get_task(config)
    if has_optimizer(task):
        return _make_own(task, net, config)
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    options |= _read_keywords(config)
    if config.momentum is not None:
        options["momentum"] = config.momentum
        if config.momentum == 0 and config.opt.lower() == "sgd":
            options.setdefault("nesterov", False)  # timm's default needs a momentum
    if config.layer_decay is not None:
        options["layer_decay"] = config.layer_decay
    try:
        # "deterministic": Kron draws its own random numbers, equal on all ranks.
        ways: tuple[dict[str, Any], ...] = ({"fused": True}, {"deterministic": True})
        fused = fused and not any(each.is_complex() for each in net.parameters())
        for more in ways[not fused :]:
            with contextlib.suppress(TypeError, RuntimeError):
                return timm.optim.create_optimizer_v2(net, opt=config.opt, **options, **more)
        return timm.optim.create_optimizer_v2(net, opt=config.opt, **options)
    except (KeyError, ValueError, AssertionError, TypeError) as error:
        if _plain_name(config) in _list_names():
            raise MotleyError(f"--opt {config.opt} cannot be created: {error}") from None
        raise _unknown_optimizer(config) from None


def _plain_name(config: Config) -> str:
    """Return the name in ``--opt``, without the prefix of an optimizer that wraps another one."""
    return config.opt.lower().removeprefix("lookahead_")


def _list_names() -> list[str]:
    return [*map(str, timm.optim.list_optimizers())]


def _unknown_optimizer(config: Config) -> MotleyError:
    return MotleyError(
        f"--opt {config.opt}: timm has no such "
        f"optimizer{did_you_mean(_plain_name(config), _list_names())}; "
        "timm.optim.list_optimizers() returns all names"
    )


def name_optimizer(config: Config) -> str:
    """Return a name for the run's optimizer in messages: ``--opt NAME``, or the task's method."""
    task = get_task(config)
    return f"optimizer() of {type(task).__name__}" if has_optimizer(task) else f"--opt {config.opt}"


def has_optimizer(task: Task) -> bool:
    """Return True if a task overrides the method :meth:`Task.optimizer`.

    An option of the task that is named ``optimizer`` does not count.
    """
    own = type(task).optimizer
    return callable(own) and own is not Task.optimizer


def _make_own(task: Task, net: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer that the task makes.

    The task gets timm's groups of parameters with and without weight decay.
    """
    spared: Collection[str] = getattr(net, "no_weight_decay", set)()
    groups: list[dict[str, Any]] = timm.optim.param_groups_weight_decay(
        net, config.weight_decay, no_weight_decay_list=spared
    )
    made = task.optimizer([{**group, "lr": config.lr} for group in groups])
    if not isinstance(made, torch.optim.Optimizer):
        raise MotleyError(
            f"{name_optimizer(config)} returns a {type(made).__name__}, and has to return a "
            "torch.optim.Optimizer that has the given groups"
        )
    return made


# Arguments of optimizers that other options or the engine decide.
_ELSEWHERE = {
    "lr": "--lr", "weight_decay": "--weight-decay", "momentum": "--momentum",
    "layer_decay": "--layer-decay",
}  # fmt: skip
_OF_ENGINE = (
    "self", "params", "fused", "foreach", "capturable", "differentiable", "maximize",
    "deterministic",
)  # fmt: skip


def _list_keywords(config: Config) -> list[str]:
    """Return the names that ``--opt-kwargs`` takes for this optimizer."""
    kind = timm.optim.get_optimizer_class(_plain_name(config), bind_defaults=False)
    names = inspect.signature(kind).parameters
    return [name for name in names if name not in (*_ELSEWHERE, *_OF_ENGINE, "args", "kwargs")]


def _read_keywords(config: Config) -> dict[str, Any]:
    """Return the values of ``--opt-kwargs``.

    The default values of a task apply only to Adam and similar optimizers.
    """
    if config.opt_kwargs is None:
        return {}
    if "opt_kwargs" not in config.typed_names and "adam" not in _plain_name(config):
        return {}
    return {each.name: each.value for each in config.opt_kwargs}


def check_optimizer(config: Config) -> None:
    """Raise MotleyError if options of the optimizer contradict each other or have no effect."""
    task, typed = get_task(config), config.typed_names - config.continued_names
    if has_optimizer(task):
        for name in ("opt", "opt_kwargs", "momentum", "layer_decay"):
            if name in typed:
                raise MotleyError(
                    f"--{name.replace('_', '-')} has no effect, since {name_optimizer(config)} "
                    "creates the optimizer; leave out the option"
                )
        return
    if _plain_name(config) not in _list_names():
        raise _unknown_optimizer(config)
    has_momentum = timm.optim.get_optimizer_info(_plain_name(config)).has_momentum
    if config.momentum is not None and not has_momentum:
        raise MotleyError(
            f"--momentum has no effect, since --opt {config.opt} has no momentum; leave it out, "
            "or set the betas of an optimizer that has betas, as in --opt-kwargs betas=0.9,0.999"
        )
    if config.opt_kwargs and "opt_kwargs" in config.typed_names:
        try:
            known = _list_keywords(config)
        except (AssertionError, ImportError, TypeError) as error:
            raise MotleyError(f"--opt {config.opt} cannot be created: {error}") from None
        for each in config.opt_kwargs:
            _check_keyword(config, each, known)


def _check_keyword(config: Config, given: Keyword, known: list[str]) -> None:
    if given.name in known:
        return
    if given.name in _ELSEWHERE:
        raise MotleyError(
            f"--opt-kwargs {given}: write {_ELSEWHERE[given.name]} {given.text} instead"
        )
    raise MotleyError(
        f"--opt-kwargs {given}: --opt {config.opt} has no argument "
        f"{given.name}{did_you_mean(given.name, known)}; its arguments are {', '.join(known)}"
    )


def a_part(numbers: int, config: Config, device: torch.device) -> nn.Module:
    """Return a module with one parameter of ``numbers`` elements, whose gradient is zero.

    If the optimizer needs whole rows, the number is rounded up to whole rows.
    """
    row = find_row(config.opt)
    shape = (-(-numbers // row), row) if row > 1 else (numbers,)
    part = nn.Module()
    part.weight = nn.Parameter(torch.zeros(shape, device=device))
    part.weight.grad = torch.zeros(shape, device=device)
    return part


_LOOKS_BACK = 6  # steps after which Lookahead updates its slow weights
_STEPS = _LOOKS_BACK + 1
_MORE = 2
TRIAL_RATE = 0.1  # learning rate at which even the steps of LARS exceed rounding errors
_USUAL_SLOTS = 2.0  # those of Adam
_ROWS, _WIDE, _ODD = 32, 64, 61  # rows per rank and columns of the matrix; length of the vector
_CHOOSE = "choose another optimizer, such as adamw, sgd, lion or muon"


@dataclass(frozen=True)
class OptimizerTraits:
    """The properties of an optimizer on which an engine depends.

    Attributes:
        fused: True if the optimizer has a fused kernel.
        wraps: True if the optimizer wraps another optimizer, which has the state.
        nests: True if the state contains lists of tensors.
        counts: True if a step changes a value in a parameter group, such as a step counter.
    """

    fused: bool
    wraps: bool
    nests: bool
    counts: bool


@dataclass(frozen=True)
class Sharding:
    """The way in which an engine shards parameters over the ranks.

    Attributes:
        words: name of the engine for messages.
        ranks: number of ranks.
        cut: function that shards the parameters of a module over the ranks.
        share: function that converts the state of a whole module to a sharded module's state.
    """

    words: str
    ranks: int
    cut: Callable[[nn.Module], object]
    share: Callable[[nn.Module, State], State]


class _Trial:
    """A small layer with two parameters, on which an optimizer is tried.

    Args:
        config: the options. ``--opt`` names the optimizer.
        device: device of the layer.
        rows: number of rows of the layer's matrix, which is sharded evenly. The layer also has a
            vector that may be sharded unevenly, because torch sums uneven shards in another way.
        fused: True: use a fused kernel if the optimizer has one.
        sharding: the way in which an engine shards tensors; None: whole tensors.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        rows: int,
        fused: bool,
        sharding: Sharding | None,
    ) -> None:
        self.net = nn.Module()
        self.net.weight = nn.Parameter(
            torch.linspace(-1, 1, rows * _WIDE, device=device).reshape(rows, _WIDE)
        )
        self.net.bias = nn.Parameter(torch.linspace(-1, -0.9, _ODD, device=device))
        if sharding is not None:
            sharding.cut(self.net)
        self._sharding = sharding
        self.optimizer = make_optimizer(self.net, config, fused)
        self.memory = OptimizerMemory(self.net, self.optimizer)

    def steps(self, first: int, count: int) -> None:
        """Take optimizer steps with gradients that depend only on the step and the parameters."""
        for step in range(first, first + count):
            for parameter in self.net.parameters():
                parameter.grad = (parameter.detach() * 3 + step).sin()
            self.optimizer.step()

    def save(self) -> State:
        """Return the state of the layer and its optimizer, in the form of a checkpoint."""
        saved = self.memory.state()
        tensors = model_state(self.net) | saved.tensors
        return State({name: value.clone() for name, value in tensors.items()}, saved.plain)

    def load(self, state: State) -> None:
        """Load a state of the layer and its optimizer, in the form of a checkpoint."""
        state = State(state.tensors, json.loads(json.dumps(state.plain)))
        if self._sharding is not None:
            state = self._sharding.share(self.net, state)
        load_model_state(self.net, state.tensors)
        self.memory.load(state)


def try_optimizer(
    config: Config, device: torch.device, sharding: Sharding | None = None
) -> OptimizerTraits:
    """Try the optimizer on a small layer: step, save, load and step again.

    The random state of this process is left unchanged.

    Args:
        config: the options. ``--opt`` names the optimizer.
        device: device of the layer.
        sharding: the way in which an engine shards tensors. The function then tries the optimizer
            on shards, too, and all ranks call it. None: try whole tensors only.

    Returns:
        The optimizer's traits.

    Raises:
        MotleyError: ``--opt`` fails to step, draws random numbers that differ between ranks, does
            not continue exactly from a checkpoint, or computes different values on shards.
    """
    rows = _ROWS * (sharding.ranks if sharding else 2)  # Adafactor does not factor small matrices
    config = dataclasses.replace(config, lr=TRIAL_RATE)  # the user's rate may lead to infinities
    whole, traits = _try(config, device, rows, True, None)
    if sharding is None:
        return traits
    error = None
    for fused in (True, False):
        try:
            parts, traits = _try(config, device, rows, fused, sharding)
            if all(torch.allclose(parts[key], value, atol=1e-6) for key, value in whole.items()):
                return traits
        except MotleyError as found:
            error = found
    raise MotleyError(
        f"{name_optimizer(config)} computes with whole tensors, and {sharding.words} gives it "
        "parts of tensors; take --strategy ddp, or an optimizer such as adamw"
    ) from error


def _try(
    config: Config, device: torch.device, rows: int, fused: bool, sharding: Sharding | None
) -> tuple[dict[str, Tensor], OptimizerTraits]:
    """Run one trial, and return the unsharded parameters afterwards and the optimizer's traits."""
    before = random_state(device)
    try:
        with torch.compiler.set_stance("force_eager"):  # compiling takes longer than the trial
            straight, resumed = (_Trial(config, device, rows, fused, sharding) for _ in range(2))
            straight.steps(0, _STEPS)
            _check_random(config, before, random_state(device))
            resumed.load(straight.save())
            for trial in (straight, resumed):
                trial.steps(_STEPS, _MORE)
            ends = [trial.save().tensors for trial in (straight, resumed)]
    except Exception as error:
        if isinstance(error, MotleyError) or out_of_memory(error):
            raise
        raise MotleyError(
            f"{name_optimizer(config)} fails in a trial on a small model "
            f"({_describe_error(error)}); {_CHOOSE}"
        ) from error
    finally:
        load_random_state(before, device)
    one, other = ends
    if one.keys() != other.keys() or not all(torch.equal(one[key], other[key]) for key in one):
        raise MotleyError(
            f"{name_optimizer(config)} has state that it does not save, so a run that continues "
            f"from a checkpoint would compute other values than one without a stop; {_CHOOSE}"
        )
    slots = straight.memory.slots().values()
    traits = OptimizerTraits(
        fused=fused,
        wraps=bool(slots) and not straight.optimizer.state,
        nests=any(isinstance(v, list | tuple | dict) for each in slots for v in each.values()),
        counts=any(straight.memory.changed()),
    )
    return {key: value for key, value in one.items() if key.startswith("model.")}, traits


def try_types(config: Config, net: nn.Module, device: torch.device) -> None:
    """Try the optimizer on small copies of the trained parameters that are scalars or not fp32.

    The random state of this process is left unchanged.

    Raises:
        MotleyError: ``--opt`` cannot step one of these parameters.
    """
    unusual: dict[tuple[torch.dtype, int], str] = {}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad and (parameter.dtype != torch.float32 or not parameter.dim()):
            unusual.setdefault((parameter.dtype, parameter.dim()), name)
    before = random_state(device)
    for (dtype, dim), name in unusual.items():
        part = nn.Module()
        part.weight = nn.Parameter(torch.ones((2,) * dim, dtype=dtype, device=device))
        # LAMB computes a norm over both.
        part.beside = nn.Parameter(torch.ones(2, 2, device=device))
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
        try:
            with torch.compiler.set_stance("force_eager"):
                optimizer = make_optimizer(part, config)
                for _ in range(_MORE):
                    optimizer.step()
        except Exception as error:
            shape = f"{dtype} of {dim} dimensions".removeprefix("torch.")
            raise MotleyError(
                f"{name_optimizer(config)} cannot train the parameter {name} ({shape}): "
                f"{_describe_error(error)}; {_CHOOSE}"
            ) from error
    load_random_state(before, device)


def _describe_error(error: Exception) -> str:
    """Return an error's type and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _check_random(config: Config, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    if any(not torch.equal(after[name], value) for name, value in before.items()):
        raise MotleyError(
            f"{name_optimizer(config)} draws random numbers, which differ between ranks, so the "
            f"parameters of the ranks would become different; {_CHOOSE}"
        )


def is_elementwise(config: Config) -> bool:
    """Return True if ``--opt`` steps each element independently of the rest of its tensor.

    See :func:`steps_elementwise`.
    """
    config = dataclasses.replace(config, lr=TRIAL_RATE)
    plain = dataclasses.replace(config, weight_decay=0.0)  # vectors have no decay
    return steps_elementwise(
        lambda net: make_optimizer(net, config), lambda net: make_optimizer(net, plain)
    )


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def steps_elementwise(make: MakeOptimizer, make_plain: MakeOptimizer) -> bool:
    """Return True if an optimizer steps each element independently of the rest of its tensor.

    The result comes from a trial on a small tensor, which draws no random numbers. AdamW steps each
    element independently. LAMB and MARS use whole tensors.

    Args:
        make: function that returns the optimizer of a module, with the learning rate TRIAL_RATE.
        make_plain: function that returns this optimizer without weight decay.
    """
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    # In fp64. The two halves differ from each other.
    values = torch.linspace(0.1, 2, 64 * 64, dtype=torch.float64).reshape(64, 64)

    def stepped(values: Tensor, make: MakeOptimizer) -> Tensor:
        net = nn.Module()
        net.weight = nn.Parameter(values.clone())
        optimizer = make(net)
        for step in range(9):
            here = net.weight.detach()
            net.weight.grad = (
                (here.square() * 5 + step).sin(),
                signs.repeat(values.numel() // 2).view_as(values),  # almost orthogonal
                torch.where(values > 1, 1.0, signs[step // 3 % 2]),  # one half changes sign
            )[step % 3]
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
        return net.weight.detach().flatten()

    def are_equal(one: Tensor, other: Tensor) -> bool:
        moved = float((one - values.flatten()).abs().max())
        return torch.allclose(one, other, rtol=0.0, atol=1e-5 * moved)

    halves = torch.cat([stepped(half, make) for half in torch.split(values, 32)])
    flat = stepped(values.flatten(), make_plain)
    return are_equal(stepped(values, make), halves) and are_equal(stepped(values, make_plain), flat)


def kept_numbers(config: Config) -> float:
    """Return the size of the optimizer's state, in 32-bit values per element of a parameter.

    The result comes from a trial on a small layer. The trial draws no random numbers, because a
    resumed run continues with the random state of the checkpoint.
    """
    layer = nn.Module()
    row = find_row(config.opt)
    shape = (64, row if row > 1 else 256)
    layer.weight = nn.Parameter(torch.zeros(shape))
    layer.weight.grad = torch.zeros(shape)
    try:
        optimizer = make_optimizer(layer, config)
        memory = OptimizerMemory(layer, optimizer)
        with torch.compiler.set_stance("force_eager"):
            for _ in range(_LOOKS_BACK):
                optimizer.step()
    except Exception:  # an optimizer may need a GPU, and an estimate must not end a run
        return _USUAL_SLOTS
    saved = memory.state().tensors.values()
    return sum(value.nbytes for value in saved) / layer.weight.nbytes
