"""The blocks of a network, modules that are sharded and recomputed as one; and what is around."""

from collections.abc import Collection, Hashable, Sequence

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)


def find_blocks(net: nn.Module, classes: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Modules by name, in order; none is inside another.

    Args:
        classes: names of the classes that they are of; empty: two or more modules of one class in
            a list, as transformers are made of. The outermost such list counts, but a list of
            lists is gone into: those are stages.
    """
    found: dict[str, nn.Module] = {}
    for name, part in net.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if classes:
            if type(part).__name__ in classes:
                found[name] = part
        elif isinstance(part, _LISTS) and _are_blocks(list(part)):
            prefix = f"{name}." if name else ""
            found |= {f"{prefix}{key}": each for key, each in part.named_children()}
    return found


def parts_around(net: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """The largest modules that hold parameters and have nothing of a block, in order: of a vision
    transformer what makes tokens of pixels, the last norm and the head."""
    found: list[nn.Module] = []
    for part in net.children():
        if part in blocks or not any(True for _ in part.parameters()):
            continue
        if isinstance(part, nn.ModuleList) or any(each in blocks for each in part.modules()):
            found += parts_around(part, blocks)
        else:
            found.append(part)
    return list(dict.fromkeys(found))  # one may be used in two places


def kind_of(block: nn.Module) -> Hashable:
    """Blocks of the same kind have the same modules, which hold tensors of the same shapes."""
    return tuple(
        (name, type(module), tuple(
            (key, tensor is not None and (tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
            for table in (module._parameters, module._buffers) for key, tensor in table.items()
        ))
        for name, module in block.named_modules()
    )  # fmt: skip


def _are_blocks(parts: Sequence[nn.Module]) -> bool:
    """Two or more of one class, not lists themselves, that learn."""
    kinds = {type(part) for part in parts}
    return (
        len(parts) > 1 and len(kinds) == 1 and not isinstance(parts[0], _LISTS)
        and all(any(p.requires_grad for p in part.parameters()) for part in parts)
    )  # fmt: skip
