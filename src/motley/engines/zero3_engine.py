"""DeepSpeed's stage 3: each rank keeps a part of every parameter, from its first numbers on."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from motley.engines.average import Named, ParameterAverage
from motley.engines.named_state import parameter_of, snapshot
from motley.engines.optimizer_state import State
from motley.engines.rows import is_by_rows, rows_of_rank
from motley.engines.zero_cut import cut_model, true_shapes
from motley.engines.zero_engine import ZeroEngine
from motley.engines.zero_state import AverageOfParts, rows_in


class Zero3Engine(ZeroEngine):
    """Implements Engine, and HoldsParts."""

    def _prepared(self, config: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """See ZeroEngine. A model that no rank could hold whole is cut before DeepSpeed sees it."""
        cut_model(self._model, config)
        return true_shapes(self._model.net)

    def _held(self) -> Named:
        """See EngineBase. No rank holds a whole parameter between two passes."""
        parts: dict[str, Any] = self._trained
        return {name: each.ds_tensor for name, each in parts.items()}

    def _make_average(self, decay: float, warmup: bool) -> ParameterAverage:
        return AverageOfParts(self._trained, self._held, decay, warmup)

    def part(self) -> State:
        """See HoldsParts. Parts of DeepSpeed's end within a row, so a parameter is put together,
        and each rank takes its rows."""
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def kept(value: Tensor) -> Tensor:
            return snapshot(value[slice(*rows_of_rank(len(value), rank, ranks))]
                            if value.ndim else value)  # fmt: skip

        state = self._put_together(kept)
        tensors = {name: each for name, each in state.tensors.items() if each.ndim or rank == 0}
        return State(tensors, state.plain)

    def rows_of(self, name: str, shape: Sequence[int]) -> tuple[int, int] | None:
        """See HoldsParts."""
        own: Any = parameter_of(name, self._model.net)
        if not shape or own is None or not is_by_rows(shape, own.ds_shape):
            return None
        return rows_in(own)

    def load_part(self, state: State) -> None:
        """See HoldsParts."""
        self.load_state(state)
