"""More than half of the ranks say what is right."""

import pytest

from motley.train.agreement import vote


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
