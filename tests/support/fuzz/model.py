"""A Vision Transformer that takes next to no time: what goes wrong does so at any size."""

from typing import Any

from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer

NAME = "vit_fuzz"
PIXELS = 8


@register_model
def vit_fuzz(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """8x8 pixels in patches of 4, two blocks, 4,000 parameters."""
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        options.pop(name, None)
    shape = {"img_size": PIXELS, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return VisionTransformer(**{**shape, "global_pool": "avg", **options})
