"""Changes to Lightning's optimizers and clipping, which see the gradient of the global batch."""

from functools import wraps
from types import MethodType
from typing import Any

from motley.library.lab import Lab


def run_closure_before(optimizer: Any) -> None:
    """Let an optimizer of the lab, which takes no closure, run a closure before its step."""
    step = optimizer.step

    @wraps(step)
    def run(_: Any, closure: Any = None) -> Any:
        result = closure() if closure else None
        step()
        return result

    optimizer.step = MethodType(run, optimizer)


def clip_over_ranks(lab: Lab, plugin: Any) -> None:
    """Let a precision plugin of Lightning add up the gradients of all ranks before it clips.

    Args:
        lab: the lab.
        plugin: the plugin, which is changed in place.
    """
    by_value = plugin.clip_grad_by_value

    def clip_grad_by_value(optimizer: Any, clip_val: float) -> None:
        if lab._gate.add_up_for(list(plugin.main_params(optimizer))):
            by_value(optimizer, clip_val)

    def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
        lab.clip_grad_norm_(plugin.main_params(optimizer), clip_val)

    plugin.clip_grad_by_value, plugin.clip_grad_by_norm = clip_grad_by_value, clip_grad_by_norm
