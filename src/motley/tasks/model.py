"""timm's models, wrapped so that all engines see one module with one rule for dtypes."""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import timm
import torch
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from motley.config.options import Config
from motley.data.batch import Tensors
from motley.data.dataset import find_dataset
from motley.data.images import Images
from motley.errors import MotleyError
from motley.text import did_you_mean

AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@register_model
def vit_digits(pretrained: bool = False, **options: Any) -> VisionTransformer:
    """A ViT the size of the digits: 8x8 pixels in patches of 4, 0.45 M parameters."""
    size = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10}
    shape = {"embed_dim": 96, "depth": 4, "num_heads": 3, "global_pool": "avg"}
    options.pop("pretrained_cfg", None)
    options.pop("pretrained_cfg_overlay", None)
    options.pop("cache_dir", None)
    return VisionTransformer(**{**size, **shape, **options})


def model_name(config: Config) -> str:
    """``--model``, or what suits the dataset."""
    return config.model or find_dataset(config.dataset).model


def image_size(config: Config) -> int:
    """``--img-size``, or the model's own: pixels a side."""
    name = model_name(config)
    if not timm.is_model(name):
        raise MotleyError(
            f"--model {name} is unknown to timm {timm.__version__}"
            f"{did_you_mean(name, timm.list_models())}"
        )
    if config.img_size:
        return config.img_size
    if name == "vit_digits":
        return 8
    pretrained = timm.get_pretrained_cfg(name)
    return int(pretrained.input_size[-1]) if pretrained else 224


def build_model(config: Config, images: Images) -> nn.Module:
    """The timm model for these images, with weights drawn from ``--seed``."""
    name = model_name(config)
    options: dict[str, Any] = {"num_classes": images.classes, "in_chans": images.channels}
    optional = {"drop_rate": config.drop, "drop_path_rate": config.drop_path}
    options |= {key: value for key, value in optional.items() if value}
    if config.img_size:
        options["img_size"] = config.img_size
    torch.manual_seed(config.seed)
    try:
        net = timm.create_model(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise MotleyError(f"--model {name} cannot be built with {given}: {error}") from None
    for part_name, part in net.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise MotleyError(
                f"--model {name} has batch statistics ({part_name}), which unequal shares would "
                "make differ between ranks; choose a model with layer norm, such as a ViT"
            )
    if config.grad_checkpointing:
        recompute(net, config.grad_checkpointing)
    return net


def blocks_of(net: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a timm model by name, in order: what is sharded and recomputed as one."""
    return {
        name: part for name, part in net.named_modules()
        if name.split(".")[-2:-1] == ["blocks"]
    }  # fmt: skip


def recompute(net: nn.Module, names: Iterable[str]) -> None:
    """Have modules keep their inputs alone, and compute the rest again in the backward pass.

    Args:
        names: paths, as in ``blocks.0.mlp``; or their last words, as in ``mlp``, for all such;
            ``blocks``: each block.
    """
    parts = {name: part for name, part in net.named_modules() if name}
    for name in names:
        found = blocks_of(net) if name == "blocks" else {
            path: part for path, part in parts.items() if name in (path, path.rsplit(".", 1)[-1])
        }  # fmt: skip
        if not found:
            known = dict.fromkeys(
                word for path in parts for word in (path.rsplit(".", 1)[-1], path)
            )
            raise MotleyError(
                f"--grad-checkpointing {name}: the model has no such module"
                f"{did_you_mean(name, known)}; without a name it takes all blocks"
            )
        for part in found.values():
            # Not twice: then it would be computed three times.
            if not isinstance(part.forward, partial):
                part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def set_attention(net: nn.Module, kind: str) -> None:
    """Take this process's attention kernels for ``--attention``."""
    parts: list[Any] = [part for part in net.modules() if hasattr(part, "fused_attn")]
    if kind != "auto" and not parts:
        raise MotleyError(
            f"--attention {kind}: the model has no attention whose kernel can be chosen; leave it "
            "at auto"
        )
    for part in parts:
        part.fused_attn = kind != "plain" and part.fused_attn
    only = {"fused": "flash", "efficient": "mem_efficient"}.get(kind)
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(only in (None, name))


class _Idle(torch.autograd.Function):
    """No samples: no losses, and a gradient of zeros for every parameter.

    A rank without work must still take part in every collective, so its parameters need
    gradients and their hooks must fire. EngineTraits an empty batch through the network would
    do, but costs more, and torch 2.11's attention returns None for it in 16 bits on CUDA.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        """Losses of no samples, [0]."""
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Zeros."""
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class Classifier(nn.Module):
    """Images and labels in, each sample's loss out; autocast, normalisation and loss inside.

    Autocast sits inside ``forward``, where DDP and DeepSpeed wrap it, and the output is
    fp32, so that the wrappers never see a rank's dtype and ranks may differ in it.

    Args:
        net: the timm model.
        precision: this rank's; see motley.plan.precision.
        smoothing: of the labels, in training.
    """

    measuring_s = 11.0  # that measuring its speed may take; all ranks measure at once

    def __init__(
        self,
        net: nn.Module,
        images: Images,
        img_size: int,
        precision: str,
        device: torch.device,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.net, self._smoothing = net.to(device), smoothing
        self._image = (images.channels, img_size, img_size)
        self._autocast = AUTOCAST[precision]
        # Plain tensors and no buffers: DDP would send buffers around at every step.
        dtype = next(net.parameters()).dtype  # fp32; tests check gradients in fp64
        shape = (1, images.channels, 1, 1)
        self._mean = 255 * torch.tensor(images.mean, device=device, dtype=dtype).view(shape)
        self._std = 255 * torch.tensor(images.std, device=device, dtype=dtype).view(shape)

    def forward(self, data: Tensors, scored: bool = False) -> Any:
        """The cross-entropy of each sample, fp32 [n]; n may be 0.

        Args:
            data: see motley.data.batch.Batch.
            scored: held-out samples: without smoothing, and whether each answer is right, [n].
        """
        images, labels = data["images"], data["labels"]
        if scored:
            logits = self.logits(images)
            losses = functional.cross_entropy(logits, labels, reduction="none")
            return losses, logits.argmax(dim=1) == labels
        if len(images) == 0:
            return _Idle.apply(*(p for p in self.net.parameters() if p.requires_grad))
        return functional.cross_entropy(
            self.logits(images), labels, label_smoothing=self._smoothing, reduction="none"
        )

    def logits(self, images: Tensor) -> Tensor:
        """fp32 [n, classes], of ``images``, uint8 [n, C, H, W]."""
        pixels = (images.to(self._mean.dtype) - self._mean) / self._std
        with torch.autocast(images.device.type, self._autocast, enabled=self._autocast is not None):
            logits: Tensor = self.net(pixels)
        return logits.to(self._mean.dtype)

    def blank(self) -> Tensors:
        """A sample to compute where only a pass counts, on the model's device: a black image."""
        device = self._mean.device
        return {
            "images": torch.zeros((1, *self._image), dtype=torch.uint8, device=device),
            "labels": torch.zeros(1, dtype=torch.int64, device=device),
        }

    def try_attention(self, kind: str) -> None:
        """MotleyError if a kernel that the user has chosen cannot compute this model here."""
        if kind not in ("fused", "efficient"):
            return
        with warnings.catch_warnings(record=True) as said, torch.no_grad():
            warnings.simplefilter("always")
            try:
                self(self.blank())
            except RuntimeError as error:
                words = [str(warning.message).splitlines()[0] for warning in said]
                raise MotleyError(
                    f"--attention {kind} cannot compute this model on {self._mean.device}: "
                    f"{'; '.join(words) or str(error).splitlines()[0]}. Take another one, or auto"
                ) from None

    def noise(self, count: int) -> Tensors:
        """``count`` samples of random pixels, always the same, on the model's device.

        For timing: a GPU draws less power on images that are all alike, and computes faster
        than it would in training.
        """
        device = self._mean.device
        dice = torch.Generator(device).manual_seed(0)
        return {
            "images": torch.randint(
                256, (count, *self._image), dtype=torch.uint8, device=device, generator=dice
            ),
            "labels": torch.zeros(count, dtype=torch.int64, device=device),
        }


def set_matmul_precision(precision: str) -> None:
    """fp32 means IEEE arithmetic, in matrix products and in the patch convolution; tf32 is
    a precision of its own."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
