"""Vision Transformers that take next to no time: what goes wrong does so at any size.

``vit_fuzz`` is a plain one. The others have one or two parts that real models have and it lacks;
their names say which, as in ``fuzz_twice_tied``.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

PLAIN, PIXELS, WIDTH = "vit_fuzz", 8, 16
EXPERTS = 4
# Held-out images are cut to this part of a side: 8 pixels of 8.89, of which some make 8, some 9.
CROP = 0.9
_SHAPE = {"img_size": PIXELS, "patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": 2,
          "global_pool": "avg"}  # fmt: skip


class Experts(nn.Module):
    """Linear layers of which each row takes one, by its first number; the last is rare."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """[n, WIDTH] and int64 [n] to [n, WIDTH]."""
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.each):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                made = made.index_add(0, rows, expert(x[rows]).to(made.dtype))
        return made


class Moving(nn.Module):
    """Adds the mean of all rows that it has had so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[n, WIDTH] to the same."""
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(dim=0), 0.1)
        return x + self.mean


class Tied(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        """[n, WIDTH] to the same."""
        return x + self.out(self.into(x).tanh())


class Turned(nn.Module):
    """Turns rows by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        """[n, WIDTH] to the same."""
        pairs = torch.view_as_complex(x.to(self.by.real.dtype).unflatten(1, (-1, 2)).contiguous())
        return x + torch.view_as_real(pairs * self.by).flatten(1).to(x.dtype)


class Wide(nn.Module):
    """A linear layer in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """[n, WIDTH] to the same."""
        return x + self.layer(x.double()).to(x.dtype)


def bounded() -> nn.Module:
    """Return an embedding whose rows a forward pass scales."""
    return nn.Embedding(EXPERTS, WIDTH, max_norm=0.5)


# How a part is made. Each changes what blocks made of an image, but for "stem".
PARTS: dict[str, Callable[[], nn.Module]] = {
    "stem": lambda: nn.BatchNorm2d(1, affine=False),  # of all pixels
    "still": lambda: nn.BatchNorm1d(WIDTH),  # always in eval mode
    "twice": lambda: nn.BatchNorm1d(WIDTH),  # called twice in a pass
    "tokens": lambda: nn.BatchNorm1d(WIDTH),  # of rows of tokens
    "experts": Experts,
    "tied": Tied,
    "wide": Wide,
    "turned": Turned,
    "scalar": lambda: nn.ParameterList([torch.tensor(1.5)]),
    "unused": lambda: nn.Linear(3, 3),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "moving": Moving,
    "bounded": bounded,
    "spectral": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}
BY_BATCH = {"stem", "twice", "tokens", "still"}
CHANGED_IN_FORWARD = {"moving", "bounded", "spectral"}


class OddVit(VisionTransformer):
    """A Vision Transformer with other parts behind its blocks.

    Args:
        parts: names in ``PARTS``.
    """

    def __init__(self, parts: tuple[str, ...], **options: Any) -> None:
        super().__init__(**options)
        self.parts = nn.ModuleDict({name: PARTS[name]() for name in parts})

    def train(self, mode: bool = True) -> "OddVit":
        """See nn.Module."""
        super().train(mode)
        for name in self.parts if "parts" in self._modules else ():
            if name == "still":
                self.parts[name].eval()
        return self

    def forward(self, x: Tensor, attn_mask: Any = None) -> Tensor:
        """[n, 3, H, W] to [n, classes]."""
        parts = self.parts
        # A sample's own: the level of one pixel, which no rounding changes.
        levels = (x.detach()[:, 0, PIXELS // 2, PIXELS // 2].double() * 0.5 + 0.5) * 255
        chosen = levels.round().long() % 16 // 5
        if "stem" in parts:
            x = parts["stem"](x.flatten(1, 2)[:, None]).view_as(x)
        tokens = self.forward_features(x)
        if "tokens" in parts:
            tokens = parts["tokens"](tokens.flatten(0, 1)).view_as(tokens)
        found = self.fc_norm(tokens.mean(dim=1))
        if "still" in parts:
            found = parts["still"](found)
        if "twice" in parts:
            found = parts["twice"](found) + parts["twice"](3 * found + 1)
        for name in ("tied", "wide", "turned", "moving", "frozen", "spectral"):
            if name in parts:
                found = parts[name](found)
        if "experts" in parts:
            found = found + parts["experts"](found, chosen)
        if "bounded" in parts:
            found = found + parts["bounded"](chosen)
        if "scalar" in parts:
            found = found * parts["scalar"][0]
        return self.head(found)


def name_of(parts: tuple[str, ...]) -> str:
    """Return the name under which timm knows the model with these parts."""
    return "_".join(("fuzz", *sorted(parts))) if parts else PLAIN


@register_model
def vit_fuzz(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """8x8 pixels in patches of 4, two blocks, 4,000 parameters."""
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        options.pop(name, None)
    return VisionTransformer(**_SHAPE | options)


def _register(parts: tuple[str, ...]) -> None:
    def make(pretrained: bool = False, **options: Any) -> Any:
        return build_model_with_cfg(OddVit, name, pretrained, parts=parts, **_SHAPE | options)

    make.__name__ = name = name_of(parts)
    make.__module__ = __name__
    setattr(sys.modules[__name__], name, make)
    register_model(make)


_ALL = [parts for count in (1, 2) for parts in itertools.combinations(sorted(PARTS), count)]
default_cfgs = generate_default_cfgs({
    name_of(parts): {"input_size": (3, PIXELS, PIXELS), "crop_pct": CROP, "fixed_input_size": True,
                     "interpolation": "bicubic", "num_classes": 10}
    for parts in _ALL
})  # fmt: skip
for _parts in _ALL:
    _register(_parts)
