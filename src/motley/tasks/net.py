"""The blocks of a network, and the changes that options make to a network.

Options freeze parts, recompute them in the backward pass, keep them in fp32, and select the
attention kernels.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from motley.config.options import Config
from motley.errors import MotleyError
from motley.tasks.task import Task, is_in
from motley.text import did_you_mean

_LISTS = (nn.ModuleList, nn.Sequential)


def find_blocks(net: nn.Module, classes: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Return the blocks of a network by name, in order. No block is inside another.

    Args:
        net: the network.
        classes: class names of the blocks. Empty: the blocks are the members of each outermost list
            of two or more modules of one class, as in a transformer. The members of a list of lists
            are stages, and are searched for blocks.
    """
    result: dict[str, nn.Module] = {}
    for name, part in net.named_modules():
        if any(name.startswith(f"{outer}.") for outer in result):
            continue
        if classes:
            if type(part).__name__ in classes:
                result[name] = part
        elif isinstance(part, _LISTS) and _are_blocks(list(part)):
            prefix = f"{name}." if name else ""
            result |= {f"{prefix}{key}": each for key, each in part.named_children()}
    return result


def parts_around(net: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules outside of the blocks that have parameters, in order.

    A module in the result is not inside another module without blocks. In a vision transformer,
    the result is the patch embedding, the last norm and the head.
    """
    result: list[nn.Module] = []
    for part in net.children():
        if part in blocks or not any(True for _ in part.parameters()):
            continue
        if isinstance(part, nn.ModuleList) or any(each in blocks for each in part.modules()):
            result += parts_around(part, blocks)
        else:
            result.append(part)
    return list(dict.fromkeys(result))  # one may be used in two places


def get_kind(block: nn.Module) -> Hashable:
    """Return a key that is equal for blocks of the same kind.

    Blocks of the same kind have the same modules, with tensors of the same shapes.
    """
    return tuple(
        (name, type(module), tuple(
            (key, tensor is not None and (tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
            for table in (module._parameters, module._buffers) for key, tensor in table.items()
        ))
        for name, module in block.named_modules()
    )  # fmt: skip


def _are_blocks(parts: Sequence[nn.Module]) -> bool:
    """Return True if ``parts`` are two or more trainable modules of one class, and no lists."""
    kinds = {type(part) for part in parts}
    return (
        len(parts) > 1 and len(kinds) == 1 and not isinstance(parts[0], _LISTS)
        and all(any(p.requires_grad for p in part.parameters()) for part in parts)
    )  # fmt: skip


def build_net(task: Task, config: Config) -> nn.Module:
    """Build the task's network with weights drawn from ``--seed``, and apply the user's options."""
    torch.manual_seed(config.seed)
    return prepared(task.model(), task, config)


def prepared(net: nn.Module, task: Task, config: Config) -> nn.Module:
    """Apply the options that freeze or recompute parts of a network, and return the network."""
    if config.freeze:
        freeze(net, config.freeze, task.head(net))
    if config.grad_checkpointing:
        recompute(net, config.grad_checkpointing, task.blocks(net))
    return net


def freeze(net: nn.Module, names: Iterable[str], head: Sequence[str]) -> None:
    """Freeze parameters of a network.

    Args:
        net: the network.
        names: paths of parameters or modules, or the last words of these paths. The name
            ``backbone`` stands for all parameters except those in ``head``.
        head: paths of the head's modules.

    Raises:
        MotleyError: no part has such a name, or ``backbone`` is frozen and the head is unknown.
    """
    parameters = dict(net.named_parameters(remove_duplicate=False))  # tied ones under every name
    in_head = {each for path, each in parameters.items() if is_in(path, head)}
    paths = [path for path, _ in (*net.named_modules(), *parameters.items()) if path]
    for name in names:
        if name == "backbone" and not head:
            raise MotleyError(
                "--freeze backbone: the task does not declare which part is the head; name the "
                f"parts that stay as they are, as in --freeze {paths[0]}"
            )
        chosen = [path for path in paths if name in (path, path.rsplit(".", 1)[-1])]
        if name == "backbone":
            chosen = [path for path, each in parameters.items() if each not in in_head]
        if not chosen:
            known = dict.fromkeys(
                word for path in paths for word in (path.rsplit(".", 1)[-1], path)
            )
            raise MotleyError(
                f"--freeze {name}: the model has no such part{did_you_mean(name, known)}; name "
                "parts by path, as in blocks.0, or by the last word of the path, or take backbone"
            )
        for path, parameter in parameters.items():
            if is_in(path, chosen):
                parameter.requires_grad_(False)


def recompute(net: nn.Module, names: Iterable[str], blocks: Mapping[str, nn.Module]) -> None:
    """Make modules store only their inputs, and recompute their activations in the backward pass.

    Args:
        net: the network.
        names: names of modules: a path such as ``blocks.0.mlp``, the last word of paths such as
            ``mlp``, the name of a class, or the word ``blocks`` for all modules in the argument
            ``blocks``.
        blocks: blocks of the network by path.

    Raises:
        MotleyError: no module has such a name.
    """
    parts = {name: part for name, part in net.named_modules() if name}
    for name in names:
        words = {path: (path.rsplit(".", 1)[-1], path, type(part).__name__)
                 for path, part in parts.items()}  # fmt: skip
        result = blocks if name == "blocks" else {
            path: part for path, part in parts.items() if name in words[path]
        }  # fmt: skip
        if not result:
            known = dict.fromkeys(word for each in words.values() for word in each)
            raise MotleyError(
                f"--grad-checkpointing {name}: the model has no such "
                f"module{did_you_mean(name, known)}; leave out the name to take all blocks"
            )
        for part in result.values():
            # A module that is wrapped twice would be computed three times.
            if not isinstance(part.forward, partial):
                part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def is_recomputed(part: nn.Module) -> bool:
    """Return True if :func:`recompute` has changed the module."""
    return isinstance(part.forward, partial) and part.forward.func is checkpoint


def set_attention(net: nn.Module, kind: str) -> None:
    """Select the attention kernels of this process by the value of ``--attention``.

    Raises:
        MotleyError: the model has no attention whose kernel can be selected.
    """
    parts: list[Any] = [part for part in net.modules() if hasattr(part, "fused_attn")]
    if kind != "auto" and not parts:
        raise MotleyError(
            f"--attention {kind}: the model has no attention layer whose kernel can be chosen; "
            "take auto"
        )
    for part in parts:
        part.fused_attn = kind != "plain" and part.fused_attn
    only = {"fused": "flash", "efficient": "mem_efficient"}.get(kind)
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(only in (None, name))


def keep_fp32(net: nn.Module, names: Iterable[str]) -> None:
    """Make modules compute in fp32, whatever the dtype of other modules.

    Args:
        net: the network.
        names: paths of modules, or their last words.
    """
    for path, part in net.named_modules():
        if path in names or path.rsplit(".", 1)[-1] in names:
            part.forward = partial(_in_fp32, part.forward)


def _in_fp32(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    tensors = [value for value in tree_leaves((given, named)) if isinstance(value, Tensor)]
    kind = tensors[0].device.type if tensors else "cpu"
    with torch.autocast(kind, enabled=False):
        return forward(*tree_map(wide, given), **tree_map(wide, named))
