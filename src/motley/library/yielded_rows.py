"""A comparison of the rows from the loader with the rows that a script gives to ``lab.step()``.

After an out-of-memory error, ``lab.step()`` reads this rank's rows once more, in smaller parts,
and calls the script's function with each part. Each part is moved to the devices to which the
script had moved the rows. A script may only move the rows before ``lab.step()``. If it changes
them, its first step is refused, because the smaller parts would lack the change.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from motley.errors import MotleyError

_Path = tuple[Any, ...]  # keys and positions that lead to a leaf


class YieldedRows:
    """The collated rows that the loader has yielded last.

    Args:
        rows: tensors and other objects in lists, tuples and mappings.
    """

    def __init__(self, rows: Any) -> None:
        # The leaves are listed now, because a script may put moved tensors into the same mapping.
        self._leaves = {path: (leaf, _count_changes(leaf)) for path, leaf in _list_leaves(rows)}

    def find_devices(self, rows: Any, by_value: bool = True) -> dict[_Path, torch.device]:
        """Return the device of each tensor that a script has moved, by the tensor's path.

        Args:
            rows: the rows that the script gives to ``lab.step()``.
            by_value: True: compare the values of copied tensors too, which takes time.

        Raises:
            MotleyError: the script has changed the rows in another way.
        """
        given = dict(_list_leaves(rows))
        changed = [path for path in given.keys() | self._leaves.keys()
                   if not self._is_unchanged(path, given, by_value)]  # fmt: skip
        if changed:
            where = "".join(f"[{key!r}]" for key in min(changed, key=repr))
            raise MotleyError(
                f"lab.step() got other rows than the loader has yielded: rows{where} differs. "
                "After an out-of-memory error, lab.step() reads the rows again in smaller pieces: "
                "give it the batch as the loader yields it, and change the rows inside the "
                "function"
            )
        return {
            path: leaf.device
            for path, leaf in given.items()
            if isinstance(leaf, Tensor) and leaf.device != self._leaves[path][0].device
        }

    def _is_unchanged(self, path: _Path, given: Mapping[_Path, Any], by_value: bool) -> bool:
        if path not in given or path not in self._leaves:
            return False
        now, (then, changes) = given[path], self._leaves[path]
        if not isinstance(then, Tensor):
            return now is then
        if _count_changes(then) != changes:
            return False
        if now is then:
            return True
        is_alike = isinstance(now, Tensor) and (now.shape, now.dtype) == (then.shape, then.dtype)
        return is_alike and (not by_value or _have_equal_values(now.cpu(), then.cpu()))


def move_rows(rows: Any, devices: Mapping[_Path, torch.device], path: _Path = ()) -> Any:
    """Return rows with each tensor moved to its device in ``devices``.

    Args:
        rows: tensors and other objects in lists, tuples and mappings.
        devices: result of :meth:`YieldedRows.find_devices`.
        path: keys and positions that lead to ``rows``.
    """
    if not devices:
        return rows
    if isinstance(rows, Mapping):
        moved: Any = copy.copy(rows)
        for key, value in rows.items():
            moved[key] = move_rows(value, devices, (*path, key))
        return moved
    if isinstance(rows, list | tuple):
        parts = [move_rows(each, devices, (*path, at)) for at, each in enumerate(rows)]
        return type(rows)(*parts) if hasattr(rows, "_fields") else type(rows)(parts)
    return rows.to(devices[path]) if path in devices else rows


def _list_leaves(rows: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    if isinstance(rows, Mapping):
        for key, value in rows.items():
            yield from _list_leaves(value, (*path, key))
    elif isinstance(rows, list | tuple):
        for at, value in enumerate(rows):
            yield from _list_leaves(value, (*path, at))
    else:
        yield path, rows


def _have_equal_values(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors of one shape have equal values; NaN counts as equal to NaN."""
    are_both_nan = (first != first) & (second != second)
    return bool(((first == second) | are_both_nan).all())


def _count_changes(leaf: Any) -> int:
    """Return the number of in-place changes of a tensor, as torch counts them."""
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0
