"""Images of a folder packed into one file on each host's disk; see setup/stage_cn.sh."""

import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.data.datasets import Dataset
from motley.errors import MotleyError

if TYPE_CHECKING:
    from motley.data.images import Images
    from motley.data.packed_file import Packed

_STALE = "MOTLEY_STALE_PACK"


class _Part:
    """A source that reads a range of the images of a packed file."""

    def __init__(self, packed: "Packed", begin: int, end: int) -> None:
        self._packed, self.begin = packed, begin
        self._rows = packed.rows[begin:end]

    @property
    def targets(self) -> list[int]:
        """Label of each sample. The attribute has the name that torchvision uses."""
        result: list[int] = self._rows[:, 4].tolist()
        return result

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return an image in the form of :class:`motley.data.images.Images`, and its label.

        Pixels are not copied. The tensor [C, H, W] is a view of [H, W, C], like torchvision's
        tensors from PIL images, so that transforms read pixels in the same memory order.

        Raises:
            UnreadableSample: the image could not be read when it was packed.
        """
        import torch
        from PIL import Image

        from motley.data.images import decoded
        from motley.data.packed_file import PIXELS
        from motley.data.source import UnreadableSample

        begin, size, height, width, label = self._rows[index].tolist()
        if not size:
            why = self._packed.about.unreadable.get(self.begin + index, "it was not read")
            raise UnreadableSample(f"the image could not be read when it was packed: {why}")
        content = self._packed.content[begin : begin + size]
        if self._packed.about.kept == PIXELS:
            return torch.from_numpy(content.reshape(height, width, 3)).permute(2, 0, 1), label
        return decoded(Image.open(BytesIO(content.tobytes()))), label


def _open(place: Path, img_size: int) -> "Images":
    from motley.data.images import Images
    from motley.data.packed_file import has_changed, open_packed

    packed = open_packed(_file(place))
    about = packed.about
    if not os.environ.get(_STALE) and has_changed(about):
        raise MotleyError(
            f"{packed.path} holds packed images of {about.source}, which have changed since. Pack "
            f"them again with: bash setup/stage_cn.sh --data-dir {about.source}, or set "
            f"{_STALE}=1 to train on the packed images"
        )
    train, test = (
        _Part(packed, begin, end)
        for begin, end in ((0, about.train), (about.train, len(packed.rows)))
    )
    return Images(
        train, test, classes=len(about.classes), channels=3,
        mean=None, std=None, native_size=None, identity=packed.identity,
        class_names=about.classes,
        name_of=lambda source, index: f"image {source.begin + index} of {packed.path}",  # type: ignore[attr-defined]
    )  # fmt: skip


def _file(place: Path) -> Path:
    """Return the path of a packed file, given this path or a folder with one packed file.

    Raises:
        MotleyError: the folder has no packed file, or several.
    """
    from motley.data.packed_file import SUFFIX

    if not place.is_dir():
        return place
    result = sorted(place.glob(f"*{SUFFIX}"))
    if len(result) != 1:
        names = f"{len(result)} files: {', '.join(each.name for each in result[:5])}"
        raise MotleyError(
            f"--data-dir {place} has {names if result else 'no file'} with a name of the form "
            f"NAME{SUFFIX}; "
            + ("name one of them" if result else "create one with: bash setup/stage_cn.sh")
        )
    return result[0]


DATASETS = (
    Dataset("packed", "is a file of setup/stage_cn.sh, in or at --data-dir on each host", _open),
)
