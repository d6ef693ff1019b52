"""One rank's part of an inference: a trained model, and what it says of images."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from motley.checkpoint.store import checkpoints_at, newest_whole
from motley.config.options import Config
from motley.data.dataset import load_images
from motley.data.images import NO_LABEL, Images, Source, UnreadableImage, of_files, read
from motley.data.transforms import evaluation_transform
from motley.engines.memory import in_halves
from motley.errors import MotleyError
from motley.plan.precision import best_precision
from motley.planner.process_group import confirmed
from motley.tasks.model import Classifier, build_model, set_matmul_precision
from motley.train.command_line import config_from

COLUMNS = ("index", "image", "label", "predicted", "confidence")


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and the data that it was trained on.

    Attributes:
        folder: of the checkpoint. weights: ``<name>``, on the CPU.
        problems: what was wrong with newer ones.
    """

    folder: Path
    weights: dict[str, Tensor]
    config: Config
    images: Images
    img_size: int
    problems: tuple[str, ...] = ()


def open_trained(path: Path, data_dir: str | None, own: Path | None = None) -> Trained:
    """Load the newest whole checkpoint of a run.

    Args:
        path: one checkpoint's folder, ``checkpoints/``, or a run folder.
        data_dir: where the images are now; None: where they were.
        own: a folder of other images, which take the place of the held-out ones.
    """
    found = checkpoints_at(path)
    if not found:
        raise MotleyError(f"--checkpoint {path}: no checkpoint is there; name a run's folder")
    folder, tensors, progress, problems = newest_whole(found, ("config",))
    config = config_from(progress["config"])
    if data_dir is not None:
        config = replace(config, data_dir=data_dir)
    img_size = int(progress["config"]["img_size"])
    weights = {
        name.removeprefix("model."): value
        for name, value in tensors.items() if name.startswith("model.")
    }  # fmt: skip
    images = load_images(config, img_size)
    if own is not None:
        images = of_files(images, own)
    return Trained(folder, weights, config, images, img_size, tuple(problems))


def precision_of(asked: str, device: torch.device) -> str:
    """What ``--precision`` means on this device."""
    if asked != "auto":
        return asked
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return confirmed(*best_precision(capability), device)[0]


@dataclass
class Predictor:
    """The model on one device.

    Attributes:
        images: so many were computed; seconds: it took so long.
    """

    trained: Trained
    source: Source
    device: torch.device
    precision: str
    threads: int
    images: int = 0
    seconds: float = 0.0
    _model: Classifier = field(init=False)

    def __post_init__(self) -> None:
        set_matmul_precision(self.precision)
        t = self.trained
        net = build_model(t.config, t.images)
        net.load_state_dict(t.weights)
        self._model = Classifier(net, t.images, t.img_size, self.precision, self.device).eval()
        self._look = evaluation_transform(t.images, t.img_size)
        self._pool = ThreadPoolExecutor(self.threads, "read")

    def rows(self, items: Sequence[int]) -> Iterator[tuple[object, ...]]:
        """One row of COLUMNS an image, in the order of ``items``."""
        start = time.perf_counter()
        found = list(self._pool.map(self._read, items))
        logits = self._logits(torch.stack([pixels for pixels, _ in found]))
        best = logits.softmax(dim=1).max(dim=1)
        answers = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        self.images += len(items)
        self.seconds += time.perf_counter() - start
        name = self.trained.images.name_of
        for index, (_, label), (predicted, confidence) in zip(items, found, answers, strict=True):
            known = "" if label == NO_LABEL else label
            yield index, name(self.source, index), known, predicted, f"{confidence:.4f}"

    @property
    def mem_peak_mib(self) -> float:
        """Of the GPU, or of this process where there is none."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return float(psutil.Process().memory_info().rss) / 2**20

    def _read(self, index: int) -> tuple[Tensor, int]:
        try:
            image, label = read(self.source, index)
        except UnreadableImage as error:
            name = self.trained.images.name_of(self.source, index)
            raise MotleyError(f"cannot read {name} ({error}); repair it, or remove it") from None
        return torch.as_tensor(self._look(image), dtype=torch.uint8), label

    @torch.inference_mode()
    def _logits(self, pixels: Tensor) -> Tensor:
        """fp32 [n, classes], on the CPU."""

        def compute(part: slice) -> Tensor:
            logits: Tensor = self._model.logits(pixels[part].to(self.device))
            return logits.cpu()

        return torch.cat(in_halves(compute, slice(0, len(pixels))))
