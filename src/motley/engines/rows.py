"""Tensors that are cut over ranks along their first dimension, as FSDP cuts parameters; and what an
optimizer keeps beside one."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_by_rows(shape: Sequence[int], parameter: Sequence[int]) -> bool:
    """Whether what is kept of a parameter is cut with it: it has its shape, or as many rows of a
    matrix of its own, as the scales of blocks of numbers."""
    if torch.Size(shape) == torch.Size(parameter):
        return True
    return len(shape) == 2 and len(parameter) > 1 and shape[0] == parameter[0]


def rows_of_rank(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows that a rank has, as torch.chunk cuts: from the first to before the second."""
    each = -(-rows // ranks)
    first = min(rank * each, rows)
    return first, min(first + each, rows)


def own_rows(value: Tensor) -> Tensor:
    """What this rank has of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def rows_as(value: Tensor, parameter: DTensor) -> Tensor:
    """This rank's rows as a part of a whole tensor, which is cut as the parameter is; where they
    are now, which is the host's memory where a GPU's parameters are kept there."""
    shape = torch.Size((parameter.shape[0], *value.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(  # takes them to the mesh's device
        value, parameter.device_mesh, parameter.placements, run_check=False, shape=shape,
        stride=stride,
    )  # fmt: skip
    return whole.to(value.device)
