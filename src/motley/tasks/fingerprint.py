"""A hash of a tensor's bits, which any device computes alike."""

import torch
from torch import Tensor

_WORD = 8  # bytes that are mixed at once
_CHUNKS = {"cpu": 1 << 15}  # words at a time: what is read twice is still in the core's own cache
_CHUNK = 1 << 23  # on a GPU, which wants much to do at once; they take three times that meanwhile
_GOLDEN = -0x61C8864680B583EB
_FACTOR = -0x40A7B892E31B1A47


def fingerprint(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits, int64 []; computed where the tensor is, alike on any device.

    The sum, modulo 2**64, of each eight bytes mixed with their place (as SplitMix64 mixes, but for
    its last factor, which a sum may have as well): sums of whole numbers do not depend on their
    order, as those of floating-point numbers do. What is less than eight bytes at the end is filled
    up with zeros.
    """
    words = _words(tensor)
    chunk = min(_CHUNKS.get(tensor.device.type, _CHUNK), words.numel()) or 1
    places = torch.arange(1, chunk + 1, device=words.device).mul_(_GOLDEN)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        mixed = places[: part.numel()] + _wrapped(start * _GOLDEN)
        mixed ^= part
        mixed ^= mixed >> 30
        mixed *= _FACTOR
        mixed ^= mixed >> 27
        total += mixed.sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """Its bytes, int64 [words]; a view where they are whole words."""
    found = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if missing := -found.numel() % _WORD:
        found = torch.nn.functional.pad(found, (0, missing))
    if found.storage_offset() % _WORD:  # of a part of a larger one
        found = found.clone()
    return found.view(torch.int64)


def _wrapped(value: int) -> int:
    """Modulo 2**64, as a signed number of 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
