"""The same samples, whoever computes them."""

import argparse
import builtins
import dataclasses
import importlib
import io
import pickle
import struct
import threading
import zlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from forked import run_fork
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import picture_folder
from PIL import Image

import motley.data.images
from motley.comm.modes.numbers import EXACT
from motley.config.options import Config
from motley.data.images import Images
from motley.data.loader import Loader
from motley.data.loader_memory import explain_workers
from motley.data.source import Batch, Order, first_batch, make_seeds, slices
from motley.errors import MotleyError
from motley.plan.plan import Plan
from motley.tasks.builtin import get_task
from motley.tasks.builtin.image import ImageTask
from motley.train.command_line import read_config, training_parser

CPU = torch.device("cpu")


def config(*words: str) -> Config:
    return read_config(training_parser("test"), [*words, "--workers", "0"])


def image_task(options: Config) -> ImageTask:
    task = get_task(options)
    assert isinstance(task, ImageTask)
    return task


def images_of(options: Config) -> Images:
    return image_task(options).images


def batches(loader: Loader, plan: Plan, epoch: int = 0, consumed: int = 0) -> list[list[Batch]]:
    return [[batch for batch, _ in micro] for _, micro in loader.steps(epoch, consumed, plan)]


@given(
    st.integers(1, 400), st.integers(1, 80), st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.integers(1, 9),
)  # fmt: skip
def test_ranks_take_every_sample_once_in_the_global_order(
    samples: int, n: int, shares: list[int], m: int
) -> None:
    if not sum(shares):
        shares[0] = 1
    order = Order(samples, seed=7).epoch(3)
    assert sorted(order) == list(range(samples))
    plan = Plan(n, tuple(map(float, shares)), (m,) * len(shares), EXACT)
    taken = []
    for start in range(0, samples, n):
        part = order[start : start + n]
        for rank in range(len(shares)):
            taken += [
                index for cut in slices(part, plan.for_batch(len(part)), rank) for index in cut
            ]
    assert taken == order


def test_seeds_of_samples_are_splitmix64() -> None:
    # The generator's first outputs for 0, as its authors' own code prints them; 63 bits of them.
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert make_seeds(0, range(3)) == [value >> 1 for value in known]
    assert make_seeds(9, [5, 2]) == [make_seeds(9, range(6))[5], make_seeds(9, [2])[0]]
    assert make_seeds(2**63 - 1, []) == []


def test_epochs_seeds_and_fractions() -> None:
    assert Order(50, 0).epoch(0) == Order(50, 0).epoch(0)
    assert Order(50, 0).epoch(0) != Order(50, 0).epoch(1) != Order(50, 1).epoch(1)
    half = Order(50, 0, fraction=0.5)
    assert len(half.epoch(0)) == 25
    assert set(half.epoch(0)) == set(half.epoch(9))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 7), st.integers(0, 60))
def test_augmented_pixels_do_not_depend_on_the_split(
    shares: list[int], m: int, consumed: int
) -> None:
    if not sum(shares):
        shares[0] = 1
    options = config("--dataset", "synthetic", "--data-fraction", "0.002", "--img-size", "16")
    images = get_task(options)

    def pixels(plan: Plan, start: int) -> list[torch.Tensor]:
        ranks = [
            batches(Loader(images, options, rank, CPU), plan, consumed=start)
            for rank in range(len(plan.shares))
        ]
        return [
            torch.cat([b.data["images"] for rank in ranks for b in rank[step] if len(b)])
            for step in range(len(ranks[0]))
        ]

    alone = torch.cat(pixels(Plan(30, (1.0,), (30,), EXACT), 0))
    split = torch.cat(
        pixels(Plan(30, tuple(map(float, shares)), (m,) * len(shares), EXACT), consumed)
    )
    assert torch.equal(alone[consumed:], split)
    assert alone.shape == (100, 3, 16, 16)


@pytest.mark.parametrize("room", [4, 3, None])
def test_worker_processes_change_nothing_and_serve_all_passes(room: int | None) -> None:
    """Args: room: samples that a process has room for to pass at once; batches are of 4."""
    options = config("--data-fraction", "0.05", "--eval-samples", "20")
    plan = Plan(16, (1.0,), (4,), EXACT)
    inside = Loader(get_task(options), options, 0, CPU)
    example, _ = first_batch(get_task(options), 2)
    beside = Loader(
        get_task(options), dataclasses.replace(options, workers=2), 0, CPU,
        *(() if room is None else (example, room)),
    )  # fmt: skip

    def processes() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    before = processes()
    for _ in range(3):  # broken off, as the search of a loss scale does it
        broken_off = next(iter(beside.steps(0, 0, plan)))[1]
        assert next(broken_off)[0].indices == batches(inside, plan)[0][0].indices
    workers = processes() - before
    for found, expected in (
        (batches(beside, plan, 1), batches(inside, plan, 1)),
        ([list(beside.test_batches(plan))], [list(inside.test_batches(plan))]),
        (batches(beside, plan, 1, 32), batches(inside, plan, 1, 32)),
    ):
        for one, other in zip(chain(*found), chain(*expected), strict=True):
            assert one.indices == other.indices
            assert torch.equal(one.data["images"], other.data["images"])
    assert len(workers) == 2 and workers == processes() - before


def test_processes_are_added_between_two_steps_and_no_sample_is_lost() -> None:
    options = config("--data-fraction", "0.1")
    plan = Plan(16, (1.0,), (4,), EXACT)
    expected = [
        [b.indices for b in step]
        for step in batches(Loader(get_task(options), options, 0, CPU), plan)
    ]
    example, _ = first_batch(get_task(options), 2)
    loader = Loader(get_task(options), dataclasses.replace(options, workers=1), 0, CPU, example, 4)
    found = []
    for number, (_, micro_batches) in enumerate(loader.steps(0, 0, plan)):
        found.append([batch.indices for batch, _ in micro_batches])
        loader.set_workers({2: 2, 5: 0, 7: 3}.get(number, loader.workers))
    assert found == expected and loader.workers == 3
    threads = {thread.name for thread in threading.enumerate()}
    loader.set_workers(0)
    assert "motley-prefetch" not in {thread.name for thread in threading.enumerate()}, threads


def test_an_epoch_that_was_prepared_is_the_same_whatever_is_read_meanwhile() -> None:
    options = config("--data-fraction", "0.1", "--eval-samples", "20")
    plan, inside = Plan(16, (1.0,), (4,), EXACT), Loader(get_task(options), options, 0, CPU)
    expected = [[batch.indices for batch in step] for step in batches(inside, plan, 1)]
    tests = [batch.indices for batch in inside.test_batches(plan)]
    beside = Loader(get_task(options), dataclasses.replace(options, workers=1), 0, CPU)
    for meanwhile in ("nothing", "held-out samples", "another epoch"):
        held_out = list(beside.test_batches(plan, (1, 0)))
        assert [each.indices for each in held_out] == tests
        if meanwhile == "held-out samples":
            list(beside.test_batches(plan))
        elif meanwhile == "another epoch":
            next(iter(beside.steps(2, 0, plan)))
        found = [[batch.indices for batch in step] for step in batches(beside, plan, 1)]
        assert found == expected, meanwhile
    list(inside.test_batches(plan, (1, 0)))  # without processes
    assert [[batch.indices for batch in step] for step in batches(inside, plan, 1)] == expected


def test_a_rank_without_samples_gets_as_many_empty_batches_from_processes() -> None:
    options = config("--data-fraction", "0.1", "--eval-samples", "20")
    plan = Plan(16, (1.0, 0.0), (4, 4), EXACT)
    beside = Loader(get_task(options), dataclasses.replace(options, workers=1), 1, CPU)
    inside = Loader(get_task(options), options, 1, CPU)
    found, expected = batches(beside, plan), batches(inside, plan)
    assert [[len(batch) for batch in step] for step in found] == [[0]] * len(expected)
    assert list(map(len, beside.test_batches(plan))) == list(map(len, inside.test_batches(plan)))


def test_an_error_of_a_loader_process_reaches_the_training_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise ValueError("sample 7 is broken")

    monkeypatch.setattr(ImageTask, "sample", broken)
    options = dataclasses.replace(config(), workers=1)
    with pytest.raises(ValueError, match="sample 7 is broken"):
        batches(Loader(get_task(options), options, 0, CPU), Plan(8, (1.0,), (8,), EXACT))


def test_a_loader_process_that_is_killed_is_named() -> None:
    options = dataclasses.replace(config(), workers=1)
    loader = Loader(get_task(options), options, 0, CPU)
    before = set(psutil.Process().children())
    steps = iter(loader.steps(0, 0, Plan(8, (1.0,), (8,), EXACT)))
    _, micro_batches = next(steps)
    (process,) = set(psutil.Process().children()) - before
    process.kill()
    says = r"a loader process on .* died: (DataLoader worker|its connection failed)"
    with pytest.raises(MotleyError, match=says), explain_workers(1):
        for _, micro_batches in steps:
            list(micro_batches)


@pytest.mark.parametrize(("words", "step"), [((), 1), (("--eval-images", "90"), 4)])
def test_every_held_out_image_is_taken_once_or_some_evenly(
    words: tuple[str, ...], step: int
) -> None:
    options = config(*words)
    images = get_task(options)
    plan = Plan(128, (3.0, 0.0, 2.0), (50, 50, 50), EXACT, equal_micro_steps=True)
    taken = [
        index
        for rank in range(3)
        for batch in Loader(images, options, rank, CPU).test_batches(plan)
        for index in batch.indices
    ]
    assert taken == list(range(0, 360, step))


def test_the_digits_are_real_images() -> None:
    images = images_of(config())
    assert (len(images.train), len(images.test), images.classes) == (1437, 360, 10)
    pixels = torch.stack([images.train[index][0] for index in range(len(images.train))]) / 255
    assert pixels.mean().item() == pytest.approx(images.mean[0], abs=0.002)
    assert pixels.std().item() == pytest.approx(images.std[0], abs=0.002)


def folder_images(root: Path, *words: str) -> tuple[ImageTask, Config]:
    where = ("--dataset", "folder", "--data-dir", str(root), "--img-size", "16")
    options = config(*where, *words)
    images = image_task(options)
    assert images.images  # is read here
    return images, options


def test_a_truncated_image_is_named_and_gives_its_place_to_the_next(tmp_path: Path) -> None:
    bad = ("train/cat/3.png", "val/dog/0.png")
    images, options = folder_images(picture_folder(tmp_path, bad))
    loader = Loader(images, options, 0, CPU)
    plan = Plan(8, (1.0,), (8,), EXACT)
    steps = [*chain(*batches(loader, plan))]
    assert sum(len(batch.indices) for batch in steps) == 20, "the batch keeps its size"
    named = [name for batch in steps for name in batch.unreadable]
    assert len(named) == 1 and "train/cat/3.png" in named[0] and "truncated" in named[0]
    assert sorted(index for batch in steps for index in batch.indices) == sorted(
        [*(index for index in range(20) if index != 3), 4]
    )
    tests = list(loader.test_batches(plan))
    assert sum(len(batch.indices) for batch in tests) == 7, "an unreadable answer is not counted"


def bomb() -> bytes:
    """A valid PNG of 1.6 gigapixels in 200 bytes."""
    file = io.BytesIO()
    Image.new("L", (1, 1)).save(file, "PNG")
    content = file.getvalue()
    ihdr = b"IHDR" + struct.pack(">II", 40_000, 40_000) + content[24:29]
    return content[:12] + ihdr + struct.pack(">I", zlib.crc32(ihdr)) + content[33:]


@pytest.mark.parametrize("kind", ["bomb", "TypeError", "KeyError", "RuntimeError"])
def test_whatever_a_decoder_raises_the_image_is_skipped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """TypeError: as PIL 13 does of some torn TIFFs; RuntimeError: of formats it only half knows."""
    root = picture_folder(tmp_path)
    bad = ("train/cat/3.png", "val/dog/0.png")
    for name in bad:
        (root / name).write_bytes(bomb())
    images, options = folder_images(root)
    if kind != "bomb":
        read = Image.open

        def raising(file: Any, *words: Any) -> Any:
            if str(file.name).endswith(bad):
                raise getattr(builtins, kind)
            return read(file, *words)

        monkeypatch.setattr(Image, "open", raising)
    loader = Loader(images, options, 0, CPU)
    plan = Plan(8, (1.0,), (8,), EXACT)
    steps = [*chain(*batches(loader, plan))]
    assert sum(len(batch.indices) for batch in steps) == 20
    tests = list(loader.test_batches(plan))
    assert sum(len(batch.indices) for batch in tests) == 7
    named = [name for batch in (*steps, *tests) for name in batch.unreadable]
    says = "1600000000 pixels" if kind == "bomb" else kind
    assert len(named) == 2 and all(says in name for name in named)
    assert [name.partition(" (")[0] for name in named] == [str(root / name) for name in bad]


def test_large_photos_are_no_reason_to_warn(tmp_path: Path) -> None:
    words = ["--dataset", "folder", "--data-dir", str(picture_folder(tmp_path))]

    def read() -> None:
        importlib.reload(motley.data.images)  # it says of what Python need not warn
        Image.MAX_IMAGE_PIXELS = 1000  # one of 1200 is large, one of 2400 would be a bomb
        image_task(config(*words)).data(held_out=False)[0]

    done = run_fork(read)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("breaks", ["no folder", "classes differ", "empty"])
def test_a_wrong_folder_is_refused(tmp_path: Path, breaks: str) -> None:
    root = tmp_path / "nothing"
    if breaks != "no folder":
        root = picture_folder(tmp_path)
        for path in sorted((root / "val").rglob("*"), reverse=True):
            if breaks == "empty" and path.is_file():
                path.unlink()
            elif breaks == "classes differ" and path.is_dir() and path.name == "dog":
                path.rename(path.with_name("horse"))
    with pytest.raises(MotleyError, match="--data-dir"):
        folder_images(root)


def test_cifar_is_read_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of CIFAR-10's own layout with other pixels, so only torchvision's checksum is told.
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name in names:
        content = {"data": np.full((4, 3072), 7, np.uint8), "labels": [0, 1, 2, 9]}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda _: True)
    options = config("--dataset", "cifar10", "--data-dir", str(tmp_path), "--img-size", "24")
    task = image_task(options)
    task.prepare()
    images = task.images
    assert (len(images.train), len(images.test), images.classes) == (20, 4, 10)
    step = next(iter(batches(Loader(task, options, 0, CPU), Plan(8, (1.0,), (8,), EXACT))))
    assert step[0].data["images"].shape == (8, 3, 24, 24)


def test_a_download_that_fails_says_what_to_do(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Nothing answers there, so this is the user without a network, on any machine.
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            patch.setenv(name, "http://127.0.0.1:9")
        with pytest.raises(MotleyError, match=r"cifar10 is not in .* copy its \.tar\.gz there"):
            image_task(config("--dataset", "cifar10", "--data-dir", str(tmp_path))).prepare()


def test_wrong_options_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        ("--epoch", "3"): "unknown option --epoch (nearest: --epochs",
        ("--batch-size", "0"): "0 is not a whole number of 1 or more",
        ("--tensorboard",): "python plots/publish.py logs/RUN --to tensorboard",
        ("--lr", "nan"): "nan is not a number above 0",
        ("--dataset", "mnist"): "--dataset mnist is unknown; choose cifar10",
    }
    for words, says in cases.items():
        with pytest.raises(SystemExit) as stop:
            read_config(training_parser("test"), words)
        assert stop.value.code == 2
        assert says in capsys.readouterr().err
    assert isinstance(training_parser("x"), argparse.ArgumentParser)
