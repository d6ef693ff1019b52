"""The blocks of a network: modules that are sharded and recomputed as one."""

from collections.abc import Sequence

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


def _are_blocks(parts: Sequence[nn.Module]) -> bool:
    """Two or more of one class, not lists themselves, that learn."""
    kinds = {type(part) for part in parts}
    return (
        len(parts) > 1 and len(kinds) == 1 and not isinstance(parts[0], _LISTS)
        and all(any(p.requires_grad for p in part.parameters()) for part in parts)
    )  # fmt: skip
