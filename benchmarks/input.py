"""What does an image cost before a model sees it? A folder of JPEGs, beside the same packed.

    .venv/bin/python benchmarks/input.py --json benchmarks/results/input.json
    .venv/bin/python benchmarks/input.py --quick --json /tmp/input.json

On one core: read, decode, crop and flip at random for ViT-B/16 at 224 pixels, and put together, as
training does without loader processes. Before each repeat the files are dropped from the page
cache ("disk"), or are read once ("memory"). Repeats are interleaved, a rate is the median, its
spread (largest - smallest) / median. The JPEGs (quality 90) are blurred noise with grain on it: of
about as many bytes a pixel as photos with much detail, so that decoding costs what theirs does.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import result

SIZES = ((224, 224), (500, 400))  # width, height
BATCH = 64
GRAIN = 12  # standard deviation, of 255


def main() -> None:
    """Make images, time all, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="few images, one repeat")
    options = parser.parse_args()
    started = time.time()

    import PIL
    import torch

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    count, repeats = (BATCH, 1) if options.quick else (8 * BATCH, 7)
    rows = []
    with tempfile.TemporaryDirectory(prefix="motley-input-", dir=options.json.parent) as folder:
        for width, height in SIZES:
            root = Path(folder, f"{width}x{height}")
            make_folder(root, width, height, count)
            rows += time_all(root, count, repeats)
    result.write(
        options.json, rows, started, model="vit_base_patch16_224", precision=None,
        device=processor(), used_cores=1, pillow=PIL.__version__,
    )  # fmt: skip


def processor() -> str:
    """What this machine computes with."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def make_folder(root: Path, width: int, height: int, count: int) -> None:
    """``count`` JPEGs to train on, and two held out, of two classes."""
    import numpy as np
    from PIL import Image

    for number in range(count + 2):
        dice = np.random.default_rng(number)
        rough = dice.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
        large = Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(large) + dice.normal(0, GRAIN, (height, width, 1))
        part = "train" if number < count else "val"
        path = root / part / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def time_all(root: Path, count: int, repeats: int) -> list[dict[str, object]]:
    """Rows of one folder: as it is, and packed in several ways."""
    from motley.data.packer import Keep, list_folder, pack

    keeps = {
        "folder, PIL": None,
        "packed, not shrunk": Keep(),
        "packed, --longest 256": Keep("pixels", 256),
        "packed, --longest 256 --keep jpeg": Keep("jpeg", 256),
    }
    ways: dict[str, tuple[str, Path, list[Path]]] = {}
    for name, keep in keeps.items():
        if keep is None:
            ways[name] = "folder", root, sorted(root.rglob("*.jpg"))
            continue
        place = root.with_name(f"{root.name}-{len(ways)}.packed")
        pack(list_folder(root), keep, place, 1, lambda _: None)
        ways[name] = "packed", place, [place]
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for state in ("disk", "memory"):
            for name, way in ways.items():
                found.setdefault((state, name), []).append(rate(*way, count, state))
    rows = []
    for (state, name), rates in found.items():
        middle = statistics.median(rates)
        size = sum(file.stat().st_size for file in ways[name][2]) / (count + 2)
        of_pil = middle / statistics.median(found[state, "folder, PIL"])
        rows.append({
            "images": root.name, "mode": name, "from": state, "n": count,
            "bytes_an_image": size, "images_per_s": middle, "times_pil": of_pil,
            "repeats": rates, "spread": (max(rates) - min(rates)) / middle,
        })  # fmt: skip
        print(
            f"{root.name} from {state:6} {name:34} {size / 1e3:6.1f} KB an image "
            f"{middle:7.0f} images/s, {of_pil:.2f} of PIL's", flush=True,
        )  # fmt: skip
    return rows


def rate(dataset: str, place: Path, files: list[Path], count: int, state: str) -> float:
    """images/s of one pass over the training images in a random order."""
    import torch

    from motley.tasks.builtin.image import ImageTask

    for file in files:
        with file.open("rb") as opened:
            if state == "memory":
                opened.read()
            else:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    # Opened anew: what is mapped would stay in the page cache.
    task = ImageTask(dataset=dataset, data_dir=str(place))
    source = task.data(held_out=False)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    task.sample(source[order[0]], training=True)  # makes the transforms
    start = time.perf_counter()
    for at in range(0, count, BATCH):
        samples = []
        for index in order[at : at + BATCH]:
            torch.manual_seed(index)
            samples.append(task.sample(source[index], training=True))
        task.collate(samples)
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
