"""How fast one rank is, as it was measured. Pure.

Source of the arithmetic: ARITHMETIC.md. A rank needs

    t(n) = step_s + k * micro(n / k),    k = ceil(n / m)

seconds for n samples in k micro-batches of like size, from a measured table of micro(b), the
time of one micro-batch of b. Reading the samples takes input_s each, before that, or beside it:

    t(n) = max(step_s + k * micro(n / k), n * input_s)    where loader processes read ahead
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

_AS_FAST = 0.99  # of the best rate; what is less apart is the clock's noise


@dataclass(frozen=True)
class SpeedTable:
    """How long one rank computes, as measured.

    Attributes:
        sizes: micro-batch sizes that were timed, ascending from 1; all of them fit in memory.
        seconds: forward and backward pass of a micro-batch of each.
        step_s: once a step, whatever the batch: clipping and the optimizer, seconds.
        memory_mib: peak memory at each size; None where unknown.
        preferred: one of the sizes, to be m though others may be faster; 0: none.
        grain: samples that stay together; all sizes are multiples of it.
        compiled: it is of a model that is compiled.
        input_s: to read a sample, by all of the rank's loader processes together; 0: not counted.
        reads_ahead: they do so beside what the rank computes; else it reads before it computes.
        rest_mib: memory between two passes, as it was timed; None where unknown.
        readers: how many they are; None: as many as is usual.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    step_s: float
    memory_mib: tuple[float | None, ...] = ()
    preferred: int = 0
    grain: int = 1
    compiled: bool = False
    input_s: float = 0.0
    reads_ahead: bool = False
    readers: int | None = None
    rest_mib: float | None = None

    def activations_mib(self, samples: int) -> float | None:
        """What a micro-batch takes in memory besides what is there between two, on a straight line
        between sizes and beyond; None where unknown."""
        pairs = zip(self.sizes, self.memory_mib, strict=False)
        known = [(size, mib) for size, mib in pairs if mib is not None]
        if self.rest_mib is None or not known:
            return None
        if len(known) == 1:
            size, mib = known[0]
            return (mib - self.rest_mib) * samples / size
        right = min(max(1, bisect_right([size for size, _ in known], samples)), len(known) - 1)
        (low, less), (high, more) = known[right - 1 : right + 1]
        return less + (more - less) * (samples - low) / (high - low) - self.rest_mib

    @cached_property
    def micro_batch(self) -> int:
        """m: the largest measured size that is as fast as any, per sample; or the preferred one.

        The largest, since most shares are no multiple of it: cut into few micro-batches, all
        of them stay near the best rate.
        """
        if self.preferred:
            return self.preferred
        rates = [size / seconds for size, seconds in zip(self.sizes, self.seconds, strict=True)]
        enough = _AS_FAST * max(rates)
        return max(s for s, rate in zip(self.sizes, rates, strict=True) if rate >= enough)

    @cached_property
    def rate(self) -> float:
        """Samples a second that it computes, step by step without an end: the best measured."""
        return max(size / seconds for size, seconds in zip(self.sizes, self.seconds, strict=True))

    @cached_property
    def rising(self) -> tuple[float, ...]:
        """``seconds`` without the noise of a clock.

        Fewer samples never take more time: what disturbs a measurement makes it longer. And none
        below m is faster per sample than m.
        """
        place = self.sizes.index(self.micro_batch)
        shortest = [*accumulate(reversed(self.seconds), min)][::-1]
        least = shortest[place] / self.micro_batch
        below = [max(least * self.sizes[at], shortest[at]) for at in range(place)]
        return (*below, *shortest[place:])

    def micro_s(self, samples: float) -> float:
        """Seconds of one micro-batch, between measured sizes on a straight line; 0 for none."""
        if samples <= 0:
            return 0.0
        if samples <= self.sizes[0] or len(self.sizes) == 1:
            return self.rising[0] * max(1.0, samples / self.sizes[0])
        right = min(bisect_right(self.sizes, samples), len(self.sizes) - 1)
        (low, high), (start, end) = (
            self.sizes[right - 1 : right + 1],
            self.rising[right - 1 : right + 1],
        )
        return start + (end - start) * (samples - low) / (high - low)

    def seconds_of(self, samples: float) -> float:
        """t(n): a rank's own time for its part of a step."""
        parts = max(1, math.ceil(samples / self.micro_batch))
        computed = self.step_s + parts * self.micro_s(samples / parts)
        read = samples * self.input_s
        return max(computed, read) if self.reads_ahead else computed + read

    def waits_s(self, samples: float) -> float:
        """Of these, what it waits for its samples."""
        return self.seconds_of(samples) - self.computing().seconds_of(samples)

    def computing(self) -> "SpeedTable":
        """The same that reads nothing."""
        return replace(self, input_s=0.0, reads_ahead=False, readers=None)

    def slower(self, factor: float) -> "SpeedTable":
        """The same that takes so many times as long, but for ``step_s``."""
        seconds = tuple(factor * each for each in self.seconds)
        return replace(self, seconds=seconds, input_s=factor * self.input_s)

    def with_size(self, size: int, seconds: float, memory_mib: float | None = None) -> "SpeedTable":
        """The same with one more size, that was not in it."""
        place = bisect_right(self.sizes, size)
        memory = self.memory_mib or (None,) * len(self.sizes)
        return replace(
            self,
            sizes=(*self.sizes[:place], size, *self.sizes[place:]),
            seconds=(*self.seconds[:place], seconds, *self.seconds[place:]),
            memory_mib=(*memory[:place], memory_mib, *memory[place:]),
        )

    def compiled_as(self, seconds: Mapping[int, float]) -> "SpeedTable":
        """The same of a compiled model, of which some sizes were timed, of those in the table or
        others: between and beyond them it is taken to be faster by as much as the largest is.

        Args:
            seconds: of a micro-batch, by its size.
        """
        most = max(seconds)
        part = seconds[most] / self.micro_s(most)
        found = replace(self, compiled=True, seconds=tuple(part * each for each in self.seconds))
        for size, each in seconds.items():
            if size in found.sizes:
                place = found.sizes.index(size)
                times = (*found.seconds[:place], each, *found.seconds[place + 1 :])
                found = replace(found, seconds=times)
            else:
                found = found.with_size(size, each)
        return found

    def in_one(self, samples: int) -> "SpeedTable":
        """The same that takes so many samples in one micro-batch, or in as few as were timed."""
        if samples <= 0:
            return self
        enough = next((size for size in self.sizes if size >= samples), self.sizes[-1])
        return replace(self, preferred=enough)

    def at_most(self, micro_batch: int) -> "SpeedTable":
        """The same with no micro-batch above this size, of one grain at least."""
        micro_batch = max(1, micro_batch // self.grain) * self.grain
        kept = [index for index, size in enumerate(self.sizes) if size < micro_batch]
        memory = self.memory_mib or (None,) * len(self.sizes)
        return (
            replace(
                self,
                sizes=(*(self.sizes[index] for index in kept), micro_batch),
                seconds=(*(self.seconds[index] for index in kept), self.micro_s(micro_batch)),
                memory_mib=(*(memory[index] for index in kept), None),
                preferred=min(self.preferred, micro_batch),
            )
            if micro_batch < self.sizes[-1]
            else self
        )

    def as_json(self) -> dict[str, Any]:
        """For run.json and for the cache; :meth:`from_json` reads it."""
        return {"sizes": self.sizes, "seconds": self.seconds, "step_s": self.step_s,
                "memory_mib": self.memory_mib, "preferred": self.preferred,
                "grain": self.grain, "compiled": self.compiled, "input_s": self.input_s,
                "reads_ahead": self.reads_ahead, "readers": self.readers,
                "rest_mib": self.rest_mib}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SpeedTable":
        """Raises ValueError, KeyError or TypeError for anything that is no such table."""
        sizes = tuple(int(size) for size in content["sizes"])
        seconds = tuple(float(value) for value in content["seconds"])
        step_s, memory = float(content["step_s"]), tuple(content["memory_mib"])
        if not sizes or not len(sizes) == len(seconds) == len(memory or sizes):
            raise ValueError("no table of speeds")
        if min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError("sizes do not ascend")
        if not all(0 < value < math.inf for value in seconds) or not 0 <= step_s < math.inf:
            raise ValueError("no times")
        preferred = int(content.get("preferred", 0))
        if preferred not in (0, *sizes):
            raise ValueError("a preferred size that was not timed")
        grain = int(content.get("grain", 1))
        if grain < 1 or any(size % grain for size in sizes):
            raise ValueError("sizes are no multiples of the grain")
        input_s, readers = float(content.get("input_s", 0.0)), content.get("readers")
        if not 0 <= input_s < math.inf or not (readers is None or int(readers) >= 0):
            raise ValueError("no time to read a sample")
        return cls(
            sizes, seconds, step_s, memory, preferred, grain, bool(content.get("compiled", False)),
            input_s, bool(content.get("reads_ahead", False)), readers, content.get("rest_mib"),
        )  # fmt: skip
