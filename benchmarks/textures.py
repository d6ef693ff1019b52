"""A set of small colour images that has to be learnt: ten textures, on disk as --dataset folder."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10
PIXELS = 32
_NOISE = 0.2


def make(folder: Path, train: int, held_out: int) -> None:
    """Write ``train`` and ``held_out`` images a class below ``folder``, the same ones every time.

    A texture is the sum of two gratings, each of a direction, a width and a colour. An image
    shows it at a random place, contrast and brightness, turned a little, under noise: no pixel
    says anything by itself.
    """
    choose = np.random.default_rng(0)
    gratings = [
        [(choose.uniform(0, np.pi), choose.uniform(3, 9), choose.uniform(-1, 1, 3)) for _ in "ab"]
        for _ in range(CLASSES)
    ]
    y, x = np.mgrid[:PIXELS, :PIXELS]
    for part, count in (("train", train), ("val", held_out)):
        for texture, pair in enumerate(gratings):
            place = folder / part / f"texture{texture}"
            place.mkdir(parents=True)
            for number in range(count):
                turn = choose.normal(0, 0.15)
                image = np.full((PIXELS, PIXELS, 3), choose.uniform(0.35, 0.65))
                for angle, width, colour in pair:
                    along = x * np.cos(angle + turn) + y * np.sin(angle + turn)
                    wave = np.sin(2 * np.pi * along / width + choose.uniform(0, 2 * np.pi))
                    image += choose.uniform(0.1, 0.25) * wave[..., None] * colour
                image += choose.normal(0, _NOISE, image.shape)
                pixels = (255 * image.clip(0, 1)).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
