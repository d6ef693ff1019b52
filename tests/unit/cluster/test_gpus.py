"""GPUs as NVML and GPUtil tell of them: a driver made up here, and a real card's nvidia-smi."""

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from motley.cluster import gpus
from motley.cluster.gpus import GpuSampler, read_devices
from motley.records import gpu_logger
from motley.records.gpu_csv import LAB_GPU_COLUMNS, GpuLog, read_gpu_log
from motley.records.gpu_logger import GpuLogger, Progress

# What an H200 answers (driver 580.159.04) to what GPUtil 1.4.0 asks.
H200 = (
    "0, GPU-0, 8, 143771, 0, 143156, 580.159.04, NVIDIA H200, 0, Disabled, "
    "[Requested functionality has been deprecated], 41"
)


class Driver:
    """NVML on a machine with some H200s.

    Attributes:
        lost: numbers of cards that answer nothing. here: there is a driver. opened: how often.
        epoch: of the driver; who opened it in an earlier one gets no answer.
    """

    def __init__(self, cards: int) -> None:
        self.cards, self.lost, self.here, self.opened, self.closed = cards, set[int](), True, 0, 0
        self.epoch, self._seen, self.load = 0, -1, 8

    def open(self) -> None:
        if not self.here:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self.opened, self._seen = self.opened + 1, self.epoch

    def close(self) -> None:
        self.closed += 1

    def count(self) -> int:
        if not self.here or self._seen != self.epoch:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return self.cards

    def card(self, index: int) -> int:
        if index in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def answers(self) -> dict[str, Any]:
        """All, as pynvml names it."""
        me = SimpleNamespace(pid=1, usedGpuMemory=600 << 20)
        return {
            "nvmlInit": self.open,
            "nvmlShutdown": self.close,
            "nvmlDeviceGetCount": self.count,
            "nvmlDeviceGetHandleByIndex": self.card,
            "nvmlDeviceGetUUID": lambda card: f"GPU-{card}",
            "nvmlDeviceGetName": lambda card: "H200 of NVML",
            "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=self.load, memory=3),
            "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(
                total=143771 << 20, used=600 << 20
            ),
            "nvmlDeviceGetTemperature": lambda card, sensor: 41,
            "nvmlDeviceGetPowerUsage": lambda card: 312_500,
            "nvmlDeviceGetComputeRunningProcesses": lambda card: [me],
            "nvmlDeviceGetCudaComputeCapability": lambda card: (9, 0),
        }


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(2)
    for name, answer in made.answers().items():
        monkeypatch.setattr(pynvml, name, answer)
    return made


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A nvidia-smi, which GPUtil starts; a file that has a line for each time it was."""
    log, tool = tmp_path / "asked", tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho asked >>{log}\ncat <<'END'\n{H200}\nEND\n")
    tool.chmod(0o755)
    log.write_text("")
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    return log


def test_nvml_stays_open_and_gputil_is_asked_at_first_and_seldom(
    driver: Driver, asked: Path
) -> None:
    with GpuSampler(gputil_every_s=3600) as sampler:
        for load in (8, 90, 0):
            driver.load = load
            first, second = sampler.sample()
            assert first.load == load / 100
        assert (driver.opened, driver.closed) == (1, 0)
    assert driver.closed == 1
    assert asked.read_text() == "asked\n"
    assert (first.name, second.name) == ("NVIDIA H200", "H200 of NVML")  # GPUtil knows the first
    assert (first.temperature_c, first.power_w, first.capability) == (41.0, 312.5, (9, 0))
    assert (first.memory_total_mib, first.memory_used_mib) == (143771, 600)
    with GpuSampler(gputil_every_s=0) as sampler:
        sampler.sample()
        sampler.sample()
    assert asked.read_text() == "asked\n" * 3


def test_a_lost_card_hides_no_other(driver: Driver, asked: Path) -> None:
    driver.lost = {0}
    with GpuSampler() as sampler:
        assert [device.index for device in sampler.sample()] == [1]
        driver.lost = set()
        assert [device.index for device in sampler.sample()] == [0, 1]
    assert driver.opened == 1, "the driver was well"


def test_a_driver_that_restarts_is_opened_anew(driver: Driver, asked: Path) -> None:
    with GpuSampler() as sampler:
        assert len(sampler.sample()) == 2
        driver.epoch += 1
        assert len(sampler.sample()) == 2 and (driver.opened, driver.closed) == (2, 1)
        driver.here = False  # for a while nvidia-smi answers alone, as on a machine without NVML
        (alone,) = sampler.sample()
        assert (alone.uuid, alone.load, alone.power_w) == ("GPU-0", 0.08, None)
        driver.here = True
        assert len(sampler.sample()) == 2
    assert driver.opened == driver.closed == 3


def test_where_nvml_is_missing_gputil_is_asked_each_time_and_elsewhere_seldom(
    driver: Driver, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.here = False
    with GpuSampler() as sampler:
        for _ in range(3):
            (device,) = sampler.sample()
            assert device.load == 0.08 and device.name == "NVIDIA H200"
    before = len(asked.read_text())
    monkeypatch.setenv("PATH", "/nowhere")
    assert read_devices() == () and len(asked.read_text()) == before
    calls = []
    monkeypatch.setattr(gpus.GPUtil, "getGPUs", lambda: calls.append(1) or [])
    with GpuSampler() as sampler:
        assert [sampler.sample() for _ in range(3)] == [()] * 3
    assert len(calls) == 1, "no GPU grows in a machine"


def test_the_log_outlives_a_driver_that_restarts(
    driver: Driver, asked: Path, tmp_path: Path
) -> None:
    path = tmp_path / "gpu.a.csv"
    logger = GpuLogger(GpuLog(path), "a", {"": 0, "GPU-1": 3}, Progress, interval=0.02)
    with logger:
        until(lambda: path.read_text().count("GPU-0") > 2)
        driver.here = False
        until(lambda: driver.closed > 0)
        driver.epoch, driver.here = 1, True
        there = path.read_text().count("GPU-1")
        until(lambda: path.read_text().count("GPU-1") > there + 2)
    samples = read_gpu_log(path)
    last = samples[-1]
    assert (last.gpu, last.uuid, last.load, last.power_w) == ("1", "GPU-1", 0.08, 312.5)
    assert path.read_text().splitlines()[-1].split(",")[1] == "3"
    assert driver.opened == driver.closed == 2


def test_shared_memory_that_becomes_full_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, seen = tmp_path / "gpu.a.csv", []
    parts = iter([0.5, 0.81, 0.9, 0.75, 0.82, 0.6, 0.85])

    def usage(_: str) -> SimpleNamespace:
        seen.append(next(parts, 0.3))
        return SimpleNamespace(used=int(seen[-1] * 64 * 2**20), total=64 * 2**20)

    monkeypatch.setattr(gpu_logger.shutil, "disk_usage", usage)
    with GpuLogger(GpuLog(path), "a", {"": 0}, Progress, interval=0.01):
        until(lambda: len(seen) > 8)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" full")[0].rpartition(" ")[2] for line in said] == ["81%", "85%"]
    assert said[0].startswith("motley: /dev/shm on a is 81% full (52 of 64 MiB)")
    rows = list(csv.DictReader(path.open()))
    assert {(row["SHM_Used_MB"], row["SHM_Total_MB"]) for row in rows} >= {("32", "64")}


def test_a_log_that_an_older_version_began_keeps_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "gpu.a.csv"
    older = [*LAB_GPU_COLUMNS, "Host", "CPU_Load"]
    path.write_text(",".join(older) + "\n")
    log = GpuLog(path)
    log.write({"Timestamp": "2026-11-21 03:12:44.120", "CPU_Load": 0.5, "SHM_Used_MB": 7})
    log.close()
    (sample,) = read_gpu_log(path)
    assert sample.load == 0.5 and path.read_text().splitlines()[1].count(",") == len(older) - 1


def until(true: Any) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
