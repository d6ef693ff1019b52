"""State dictionaries as JSON and tensors, so that nothing is pickled."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motley.errors import MotleyError

_PLAIN = (bool, int, float, str)


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON, and move its tensors to a dictionary.

    Args:
        value: nested dictionaries, lists and tuples of tensors, arrays, numbers, texts and None.
        name: name of the state, with which names of tensors start.
        tensors: receives the tensors by name.

    Raises:
        MotleyError: the state has a value of another type.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(value.copy())
        return {"array": name}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [take_apart(key, "", {}), take_apart(each, f"{name}.{key}", tensors)]
                for key, each in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {
            kind: [take_apart(each, f"{name}.{place}", tensors) for place, each in enumerate(value)]
        }
    raise MotleyError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: have its "
        "state_dict() return tensors, numbers, texts, lists and dictionaries"
    )


def put_together(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that :func:`take_apart` has taken apart."""
    if not isinstance(content, dict):
        return content
    ((kind, value),) = content.items()
    match kind:
        case "tensor":
            return tensors[value]
        case "array":
            return tensors[value].numpy()
        case "dict":
            return {put_together(key, {}): put_together(each, tensors) for key, each in value}
        case "list":
            return [put_together(each, tensors) for each in value]
    return tuple(put_together(each, tensors) for each in value)
