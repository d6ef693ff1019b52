"""The next token of a language model."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from motley.tasks.writer import Sampling

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.0, 3.0]).log_softmax(0)


def draw_many(sampling: Sampling, count: int = 400) -> torch.Tensor:
    """Return how often each token is drawn, as a part of all."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.tensor([sampling.draw(LOGITS, generator) for _ in range(count)])
    return torch.bincount(drawn, minlength=len(LOGITS)) / count


def test_tokens_come_as_often_as_their_probability_says() -> None:
    found = draw_many(Sampling(temperature=2.0), 4000)
    torch.testing.assert_close(found, (LOGITS / 2).softmax(0), atol=0.03, rtol=0.0)
    assert draw_many(Sampling(temperature=0.0))[4] == 1.0


@given(st.integers(1, 9), st.floats(0.01, 1.0))
def test_only_the_most_probable_tokens_are_drawn(top_k: int, top_p: float) -> None:
    found = draw_many(Sampling(1.0, top_k, top_p), 60)
    order = LOGITS.argsort(descending=True)
    kept = LOGITS[order[:top_k]].softmax(0)
    nucleus = int((kept.cumsum(0) - kept < top_p).sum())
    assert not found[order[nucleus:]].any()
