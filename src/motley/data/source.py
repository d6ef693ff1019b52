"""Samples, wherever they come from, and what the loader asks of whoever makes a batch of them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from motley.data.batch import Tensors
from motley.errors import MotleyError


class UnreadableSample(Exception):  # noqa: N818 - of the sample, not of the program
    """A sample cannot be read; the message says why."""


class Source(Protocol):
    """Samples that can be asked for by index."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, index: int) -> Any:
        """One, as it is kept; see :func:`read`."""


class Samples(Protocol):
    """What is asked for by the loader: a part of motley.tasks.task.Task, which says more."""

    needs_workers: bool
    weight: float

    def data(self, held_out: bool) -> Source:
        """Training samples, or held-out ones."""

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """What a model gets of an item of the source."""

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Tensors:
        """One batch of samples; there is one at least."""

    def weights(self, batch: Tensors) -> Tensor | None:
        """What each sample counts in the mean, [n]; None: ``weight`` each."""

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """Time that training samples take, in proportion; None: all the same."""

    def name_of(self, source: Source, index: int) -> str:
        """How to call a sample in an error."""


def read(source: Source, index: int) -> Any:
    """``source[index]``; raises UnreadableSample, whatever the decoder raised.

    Pillow has no type of error of its own: of torn or hostile files its decoders raise OSError,
    SyntaxError, ValueError, DecompressionBombError, TypeError and, by format, what else their
    authors did not think of; others do as well. Lack of memory is none of the sample's.
    """
    try:
        return source[index]
    except (MemoryError, MotleyError):
        raise
    except Exception as error:
        raise UnreadableSample(str(error) or type(error).__name__) from error
