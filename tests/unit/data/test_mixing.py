"""Neighbours of the global order are mixed alike, however a batch is cut."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.comm.modes.numbers import EXACT
from motley.data.source import slices
from motley.data.transforms import Mixing, mix
from motley.plan.plan import make_plan


@given(
    st.integers(2, 40), st.sampled_from([2, 4, 6]), st.lists(st.integers(0, 3), max_size=3),
    st.integers(1, 3), st.sampled_from([(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)]),
)  # fmt: skip
def test_pairs_are_mixed_alike_whoever_has_them(
    n: int, grain: int, shares: list[int], most: int, alphas: tuple[float, float]
) -> None:
    torch.manual_seed(0)
    images = torch.randint(256, (n, 1, 6, 5), dtype=torch.uint8)
    labels = torch.arange(n)
    drawn = torch.stack([Mixing(*alphas).draw() for _ in range(n)])
    found = []
    for parts, size in (([1], n), ([*shares, 1], most)):
        plan = make_plan(1000 * grain, parts, [size * grain] * len(parts), EXACT, grain=grain)
        rows: dict[int, tuple[list[float], int, float]] = {}
        for rank in range(len(parts)):
            for cut in slices(range(n), plan.for_batch(n), rank):
                batch = mix(images[cut], labels[cut], drawn[cut], grain)
                kept = (batch["images"].tolist(), batch["partners"].tolist(), batch["own"].tolist())
                rows |= dict(zip(cut, zip(*kept, strict=True), strict=True))
        found.append(rows)
    assert found[0] == found[1] and len(found[0]) == n
    for row, (pixels, partner, own) in found[0].items():
        alone = n % 2 and row == n - 1
        assert partner == (row if alone else row ^ 1) and 0 <= own <= 1
        if own == 1:
            assert pixels == images[row].tolist()


def test_a_box_takes_as_much_of_an_image_as_its_label_loses() -> None:
    images = torch.stack([torch.zeros(3, 20, 30), torch.full((3, 20, 30), 200)]).to(torch.uint8)
    drawn = torch.tensor([[1.0, 0.7, 0.5, 0.5], [1.0, 0.1, 0.0, 0.0]])
    batch = mix(images, torch.tensor([3, 8]), drawn, 2)
    part = (batch["images"][0] == 200).float().mean()
    assert abs(float(part) - 0.3) < 0.05
    assert torch.allclose(batch["own"], (1 - part).expand(2))
    assert batch["partners"].tolist() == [8, 3]
