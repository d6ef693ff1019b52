"""What does an image cost before a model sees it? A folder of JPEGs, beside the same packed.

    .venv/bin/python benchmarks/input.py --json benchmarks/results/input.json
    .venv/bin/python benchmarks/input.py --quick --json /tmp/input.json

On one core: read, decode, crop and flip at random for ViT-B/16 at 224 pixels, and put together, as
training does without loader processes. Before each repeat the files are dropped from the page
cache ("disk"), or are read once ("memory"). Repeats are interleaved, a rate is the median, its
spread (largest - smallest) / median; beside it the processor's own time, which other programs of
this machine change less. The reference is PIL and torchvision's transforms, one after another
(input_tasks.py); all that is not shrunk must have its pixels. The JPEGs (quality 90) are blurred
noise with grain on it: of about as many bytes a pixel as photos with much detail, so that decoding
costs what theirs does.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import result

SIZES = ((224, 224), (500, 400))  # width, height
BATCH = 64
GRAIN = 12  # standard deviation, of 255
REFERENCE = "PIL and torchvision"
Way = tuple[Callable[[], Any], Sequence[Path]]  # makes a task; the files that it reads


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
    rows += time_small(count, repeats)
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
    from input_tasks import ByDecodeJpeg, NotResized, Reference

    from motley.data.packed_file import Keep, list_folder, pack
    from motley.tasks.builtin.image import ImageTask

    jpegs, listed = sorted(root.rglob("*.jpg")), list_folder(root)
    places = {}
    for name, keep in {"": Keep(), ", --longest 256": Keep("pixels", 256),
                       ", --longest 256 --keep jpeg": Keep("jpeg", 256)}.items():  # fmt: skip
        places[name] = root.with_name(f"{root.name}-{len(places)}.packed")
        pack(listed, keep, places[name], 1, lambda _: None)
    whole = places[""]
    ways: dict[str, Way] = {
        REFERENCE: (partial(Reference, dataset="folder", data_dir=str(root)), jpegs),
        "folder": (partial(ImageTask, dataset="folder", data_dir=str(root)), jpegs),
        "folder, decode_jpeg": (partial(ByDecodeJpeg, dataset="folder", data_dir=str(root)), jpegs),
    }
    for name, place in places.items():
        task = partial(ImageTask, dataset="packed", data_dir=str(place))
        ways[f"packed{name}"] = task, [place]
    compare([make for make, _ in list(ways.values())[:4]])
    ways["packed, not resized"] = (
        partial(NotResized, dataset="packed", data_dir=str(whole)), [whole]
    )  # fmt: skip
    return rows_of(root.name, ways, ("disk", "memory"), count, repeats)


def time_small(count: int, repeats: int) -> list[dict[str, object]]:
    """Rows of images as small as CIFAR's, for a model of 224 pixels."""
    from input_tasks import SMALL, small_task

    ways: dict[str, Way] = {
        REFERENCE: (partial(small_task, count, True), []),
        "enlarged by the device": (partial(small_task, count, False), []),
    }
    return rows_of(f"{SMALL}x{SMALL}", ways, ("memory",), count, repeats)


def compare(ways: Sequence[Callable[[], Any]]) -> None:
    """End if these have not the same pixels."""
    import torch

    from motley.data.source import first_batch

    first, *others = (first_batch(make(), BATCH)[0].data["images"] for make in ways)
    if not all(torch.equal(first, other) for other in others):
        raise SystemExit("the pixels differ from the reference's")


def rows_of(
    images: str, ways: Mapping[str, Way], states: Sequence[str], count: int, repeats: int
) -> list[dict[str, object]]:
    """Time all, in turns."""
    results: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for _ in range(repeats):
        for state in states:
            for name, (make, files) in ways.items():
                prepare(files, state)
                results.setdefault((state, name), []).append(timed(make(), count))
    rows: list[dict[str, object]] = []
    for (state, name), each in results.items():
        rates, computing, travels = zip(*each, strict=True)
        middle = statistics.median(rates)
        of_pil = middle / statistics.median(rate for rate, *_ in results[state, REFERENCE])
        files = ways[name][1]
        size = sum(file.stat().st_size for file in files) / (count + 2) if files else 3 * 32 * 32
        rows.append({
            "images": images, "mode": name, "from": state, "n": count, "bytes_an_image": size,
            "bytes_in_a_batch": travels[0], "images_per_s": middle, "times_pil": of_pil,
            "cpu_ms_an_image": statistics.median(computing), "repeats": rates,
            "spread": (max(rates) - min(rates)) / middle,
        })  # fmt: skip
        print(
            f"{images} from {state:6} {name:34} {size / 1e3:6.1f} KB an image {middle:7.0f} "
            f"images/s, {of_pil:.2f} of PIL's, {statistics.median(computing):.3f} ms of the "
            "processor", flush=True,
        )  # fmt: skip
    return rows


def prepare(files: Sequence[Path], state: str) -> None:
    """Have files in the page cache, or not."""
    for file in files:
        with file.open("rb") as opened:
            if state == "memory":
                opened.read()
            else:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(task: Any, count: int) -> tuple[float, float, float]:
    """images/s of one pass over the training images in a random order, milliseconds of the
    processor an image, and bytes of an image in a batch.

    Args:
        task: opened anew; what is mapped would stay in the page cache.
    """
    import torch

    from motley.data.source import Key, Keyed

    keyed = Keyed(task, training=True)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    keyed.batch(keyed.__getitems__([Key(order[0], 0)]))  # makes the transforms
    travels, start, computed = 0, time.perf_counter(), time.process_time()
    for at in range(0, count, BATCH):
        batch = keyed.batch(
            keyed.__getitems__([Key(index, index) for index in order[at : at + BATCH]])
        )
        travels += batch.data["images"].nbytes
    seconds, computing = time.perf_counter() - start, time.process_time() - computed
    return count / seconds, 1e3 * computing / count, travels / count


if __name__ == "__main__":
    main()
