"""More than half of the ranks say what is right."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.tasks import check as module
from motley.tasks.check import fingerprint
from motley.train.agreement import arithmetic, differing, unsound, vote


@pytest.mark.parametrize(
    ("digests", "right", "wrong"),
    [
        ("aaa", 0, []), ("aba", 0, [1]), ("baa", 1, [0]), ("a", 0, []), ("ab", None, [1]),
        ("aabb", None, [2, 3]), ("aabbb", 2, [0, 1]), ("abc", None, [1, 2]),
        ("abcc", None, [1, 2, 3]),
    ],
)  # fmt: skip
def test_more_than_half_say_what_is_right(
    digests: str, right: int | None, wrong: list[int]
) -> None:
    assert vote(digests) == (right, wrong)


KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128)


@given(st.sampled_from(KINDS), st.integers(1, 200), st.data())
def test_a_flipped_bit_and_a_swap_change_the_fingerprint(
    kind: torch.dtype, size: int, data: st.DataObject
) -> None:
    torch.manual_seed(size)
    tensor = (torch.randn(size) * 100).to(kind)
    found = fingerprint(tensor)
    assert found == fingerprint(tensor.clone()) and found.dtype == torch.int64
    flipped = tensor.clone()
    bits = flipped.view(torch.uint8)
    place = data.draw(st.integers(0, len(bits) - 1))
    bits[place] ^= 1 if kind == torch.bool else 1 << data.draw(st.integers(0, 7))
    assert found != fingerprint(flipped)
    swapped = tensor.flip(0)
    assert (found == fingerprint(swapped)) == torch.equal(swapped, tensor)


def test_a_long_tensor_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = fingerprint(tensor)
    monkeypatch.setattr(module, "_CHUNKS", {"cpu": 7})
    assert fingerprint(tensor) == whole
    monkeypatch.setattr(module, "_CHUNKS", {})
    assert fingerprint(tensor) == whole, "as on a GPU"
    assert fingerprint(tensor.reshape(10, 100).T) == fingerprint(tensor.reshape(10, 100).T.clone())


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_larger_tensor_has_its_own_fingerprint(kind: torch.dtype) -> None:
    whole = (torch.randn(40) * 100).to(kind)
    for first in range(1, 9):
        assert fingerprint(whole[first:]) == fingerprint(whole[first:].clone())
    assert fingerprint(whole[:0]) == fingerprint(whole[5:5]) == 0
    assert fingerprint(whole[7]) == fingerprint(whole[7:8]), "a number"


def test_a_device_is_blamed_for_its_arithmetic_alone() -> None:
    told = [arithmetic(torch.device("cpu")) for _ in range(3)]
    assert unsound(told) == []
    assert unsound([told[0], [told[1][0] + 1] * 3, told[2]]) == [1]
    assert unsound([told[0], told[1], [*told[2][1:], told[2][0] + 1]]) == [2]
    values = [{"model.a": "1", "model.b": "2"}, {"model.a": "1", "model.b": "3"}]
    assert differing(values, [1], 0) == ["model.b"]
