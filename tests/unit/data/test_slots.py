"""What loader processes pass to their rank."""

import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import motley.data.loader_memory
from motley.data.loader_memory import OF_EACH, PREFETCH, Passed, Slots
from motley.data.source import Batch

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.float64)


class _Worker:
    id = 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
             max_size=5),
    st.integers(0, 3), st.booleans(), st.one_of(st.integers(0, 2000), st.just(2**46)),
)  # fmt: skip
def test_a_batch_is_as_it_was_in_a_slot_or_beside_it(
    kinds: list[tuple[torch.dtype, list[int]]], n: int, weighs: bool, room: int
) -> None:
    data = {
        str(place): torch.randint(0, 2, (n, *shape)).to(dtype).transpose(0, -1)
        for place, (dtype, shape) in enumerate(kinds)
    }
    weights = torch.rand(n) if weighs else None
    batch = Batch(data, tuple(range(n)), weights, ("bad.png",))
    slots = Slots(1, room, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(motley.data.loader_memory, "get_worker_info", _Worker)
        passed = [slots.put(batch) for _ in range(OF_EACH + 1)]
    if room in (0, 2**46):  # of so much none is granted
        assert not any(isinstance(each, Passed) for each in passed)
    for each in passed:
        found = slots.take(each)
        assert (found.indices, found.unreadable) == (batch.indices, batch.unreadable)
        assert list(found.data) == list(data)
        for name, tensor in data.items():
            assert found.data[name].dtype == tensor.dtype
            assert torch.equal(found.data[name], tensor)
            assert found.data[name].stride() == tensor.clone().stride() or not tensor.numel()
        assert (found.weights is None) == (weights is None)
        assert weights is None or torch.equal(found.weights, weights)


class _Counted(torch.utils.data.Dataset[int]):
    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        return list(keys)


def test_no_slot_is_written_before_what_is_in_it_is_copied() -> None:
    """However far the processes are ahead; what the rank has not copied yet is the last it took."""
    slots = Slots(3, 80_000, CPU)

    def put(keys: list[int]) -> Passed | Batch:
        return slots.put(Batch({"x": torch.full((len(keys), 10_000), keys[0])}, tuple(keys)))

    loader = DataLoader(
        _Counted(), batch_sampler=[[key] for key in range(200)], num_workers=3, collate_fn=put,
        prefetch_factor=PREFETCH, multiprocessing_context="fork", persistent_workers=True,
    )  # fmt: skip
    used = set()
    for passes in range(3):
        for count, passed in enumerate(loader):
            assert isinstance(passed, Passed)
            used.add(passed.slot)
            if count % 40 == 0:
                time.sleep(0.01)  # they make what they may
            assert slots.take(passed).data["x"].eq(passed.batch.indices[0]).all()
            if count == 20 * passes:
                break  # the next pass begins while they make what nobody takes
    assert used == set(range(3 * OF_EACH))
