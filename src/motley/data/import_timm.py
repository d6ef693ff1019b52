"""The import of timm without W&B (Weights & Biases). No other module imports timm.

timm imports W&B, which only its own training script needs. Importing W&B would add half a second to
the start of each rank.
"""

import sys

_absent = "wandb" not in sys.modules
if _absent:
    sys.modules["wandb"] = None  # type: ignore[assignment]  # so its import fails, at once
try:
    import timm
    import timm.data
    import timm.layers
    import timm.models
    import timm.optim
    import timm.scheduler
    from timm.data import auto_augment
    from timm.data.random_erasing import RandomErasing
    from timm.optim._optim_factory import default_registry as optimizers
    from timm.scheduler.scheduler import Scheduler
finally:
    if _absent:
        del sys.modules["wandb"]

__all__ = ["RandomErasing", "Scheduler", "auto_augment", "optimizers", "timm"]
