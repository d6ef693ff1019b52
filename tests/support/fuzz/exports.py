"""The rule for exported models: plain timm says the same of the same files."""

import contextlib
import io
import shutil
from typing import TYPE_CHECKING, Any

import timm
import torch
from fuzz.model import PIXELS
from fuzz.play import Played, whole_checkpoints
from PIL import Image
from torch import Tensor, nn

from motley.errors import MotleyError
from motley.infer.export import export
from motley.infer.predictor import open_trained

if TYPE_CHECKING:
    from fuzz.rules import Due

TYPED = {"tied", "wide", "turned"}  # of parts: timm cannot write shared or keep mixed numbers


@torch.no_grad()
def broken(played: Played, due: "Due") -> list[str]:
    """Return problems of the last checkpoint, as inference and an export have it."""
    found = whole_checkpoints(played)
    if played.jobs[-1].killed or not found:
        return []
    for averaged in (False, True) if played.case.recipe.model_ema_decay else (False,):
        name = "--use-ema" if averaged else "plain"
        try:
            trained = open_trained(found[-1], None, averaged=averaged)
            net = trained.build()
        except MotleyError as error:
            return [f"export: {name}: {error}"]
        shape = (16, trained.task.images.channels, PIXELS, PIXELS)
        pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        wanted, *others = (
            made.outputs(pixels, averaged).float() for made in (due.wanted, *due.others)
        )
        rounding = max((float((wanted - other).abs().max()) for other in others), default=0.0)
        apart = float((net(pixels) - wanted).abs().max())
        if not apart <= 10 * due.bound * max(1.0, float(wanted.abs().max())) + 20 * rounding:
            return [f"export: {name}: outputs are {apart:.2g} off, rounding explains "
                    f"{rounding:.2g}"]  # fmt: skip
        parts = played.case.recipe.parts
        written = parts and TYPED.isdisjoint(parts)
        if written and (problem := _in_timm(played, trained, net, name)):
            return [problem]
    return []


def _in_timm(played: Played, trained: Any, net: nn.Module, name: str) -> str:
    """Compare an exported model in plain timm with the inference of held-out files."""
    folder = played.folder / f"exported-{name.strip('-')}"
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()):
        export(trained, folder, onnx=False)
    plain = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    files = sorted((played.folder / "images" / "val").rglob("*.png"))
    if not files or played.case.recipe.test_crops > 1:
        return ""
    config = timm.data.resolve_model_data_config(plain)
    transform: Any = timm.data.create_transform(**config)
    for path in files:
        image = Image.open(path).convert("RGB")
        own = trained.task.sample((image, 0), training=False)["images"]
        if not torch.equal(normalized(own, config), transform(image)):
            return f"export: {name}: timm cuts {image.size} pixels in another way"
        said = trained.task.logits(net, own[None])
        apart = float((plain(transform(image)[None]) - said).abs().max())
        if not apart <= 1e-5 * max(1.0, float(said.abs().max())):
            return f"export: {name}: plain timm's outputs are {apart:.2g} off"
    return ""


def normalized(pixels: Tensor, config: dict[str, Any]) -> Tensor:
    """Return an image as timm's last transform leaves it."""
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    return (pixels.float().div(255) - mean) / std
