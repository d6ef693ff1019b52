"""The sum of gradients that is sent during a backward pass."""

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from motley.comm.reducer import Bucket
from motley.engines import gradient_sum
from motley.engines.gradient_sum import EarlySum

RANKS = 3.0


class Wire:
    """Ranks that all have this rank's gradients."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.is_broken = False

    def begin(self, bucket: Bucket) -> Future[Tensor]:
        if self.is_broken:
            raise ConnectionResetError("a rank was lost")
        self.sent.append(bucket.place)
        bucket.flat.mul_(RANKS)
        future: Future[Tensor] = Future()
        future.set_result(bucket.flat)
        return future


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    monkeypatch.setattr(gradient_sum, "_EARLY_BUCKET", 12.0)  # one layer
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))


def gradients(layers: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in layers.parameters() if each.grad is not None]


def test_buckets_are_sent_in_one_order_while_the_pass_computes(layers: nn.Sequential) -> None:
    wire, x = Wire(), torch.ones(2, 3)
    early = EarlySum(list(layers.parameters()), wire.begin)
    sent = list[int]()
    layers(x).sum().backward()
    assert not wire.sent and not early.has_begun  # not open
    layers.zero_grad()
    early.open()
    layers[0].register_full_backward_hook(lambda *_: sent.extend(wire.sent))
    layers(x).sum().backward()
    own = gradients(layers)
    assert sent[:3] == [0, 1, 2] and wire.sent == [0, 1, 2, 3]
    assert early.wait() == [] and not early.is_late and early.has_begun
    torch.testing.assert_close(gradients(layers), own)  # until they are taken
    early.take()
    torch.testing.assert_close(gradients(layers), [RANKS * each for each in own])
    assert not early.has_begun


def test_a_gradient_that_changes_after_it_was_sent_is_summed_again(layers: nn.Sequential) -> None:
    wire, x = Wire(), torch.ones(2, 3)
    early = EarlySum(list(layers.parameters()), wire.begin)
    early.open()
    layers(x).sum().backward()
    layers(x).sum().backward()
    early.wait()
    assert early.is_late
    early.forget()
    own = gradients(layers)
    early.wait()
    early.take()
    assert not early.is_late and wire.sent == [0, 1, 2, 3] * 2
    torch.testing.assert_close(gradients(layers), [RANKS * each for each in own])


def test_a_layer_without_a_gradient_holds_back_no_rank(layers: nn.Sequential) -> None:
    wire = Wire()
    early = EarlySum(list(layers.parameters()), wire.begin)
    early.open()
    layers[:3](torch.ones(2, 3)).sum().backward()  # the first bucket, of the last layer, is missing
    assert wire.sent == []
    early.flush()
    assert wire.sent == [0, 1, 2, 3]
    assert sorted(early.wait()) == [0, 1]
    early.take()
    assert all(not each.any() for each in gradients(layers[3]))


def test_an_error_of_the_wire_is_raised_after_the_pass(layers: nn.Sequential) -> None:
    wire = Wire()
    early = EarlySum(list(layers.parameters()), wire.begin)
    early.open()
    wire.is_broken = True
    layers(torch.ones(2, 3)).sum().backward()
    early.flush()
    with pytest.raises(ConnectionResetError):
        early.wait()
    early.close()
    layers(torch.ones(2, 3)).sum().backward()
    assert wire.sent == []
