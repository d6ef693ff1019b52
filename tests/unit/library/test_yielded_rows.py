"""Rows that a script moves to a device before it computes them, and rows that it changes."""

from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from motley.errors import MotleyError
from motley.library.yielded_rows import YieldedRows, move_rows

Pair = namedtuple("Pair", ["x", "y"])
META = torch.device("meta")


def make() -> dict[str, Any]:
    return {"x": torch.arange(6.0).view(3, 2), "more": [torch.ones(3), ("a", "b", "c")]}


def test_rows_may_be_copied_and_packed_anew() -> None:
    rows = make()
    yielded = YieldedRows(rows)
    assert yielded.find_devices(rows) == {}
    rows["x"][1, 1] = float("nan")  # a missing value
    yielded = YieldedRows(rows)
    copied = UserDict(x=rows["x"].clone(), more=tuple(rows["more"]))
    assert yielded.find_devices(copied) == {}


def scale(rows: dict[str, Any]) -> Any:
    return {**rows, "x": rows["x"] * 2}


def scale_in_place(rows: dict[str, Any]) -> Any:
    rows["x"] *= 2
    return rows


def narrow(rows: dict[str, Any]) -> Any:
    return {**rows, "x": rows["x"].half()}


def take_part(rows: dict[str, Any]) -> Any:
    return rows["x"]


@pytest.mark.parametrize("change", [scale, scale_in_place, narrow, take_part])
def test_changed_rows_are_refused(change: Callable[[Any], Any]) -> None:
    rows = make()
    yielded = YieldedRows(rows)
    with pytest.raises(MotleyError, match="change the rows inside the function"):
        yielded.find_devices(change(rows))


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_each_tensor_is_moved_and_the_source_stays(kind: type) -> None:
    rows = kind(make() | {"pair": Pair(torch.zeros(2), "y")})
    moved = move_rows(rows, {("x",): META, ("pair", 0): META})
    assert type(moved) is kind and isinstance(moved["pair"], Pair)
    assert moved["x"].device == moved["pair"].x.device == META
    assert moved["more"][0].device == rows["x"].device == torch.device("cpu")
    assert moved["more"][1] == ("a", "b", "c")
