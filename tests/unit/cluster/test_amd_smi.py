"""AMD's GPUs: what is made of amdsmi's answers, which are written down as its 7.0 builds them."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from motley.cluster import gpus
from motley.cluster.gpus import AmdSmi, GpuSampler, amd_uuid_at, read_gpu_processes

MI300X, RX7900 = "28ff74a1-0000-1000-805b-9a2b3c4d5e6f", "58ff744c-0000-1000-800e-7b1f0c2d3e4a"


class NotSupportedError(Exception):
    """As amdsmi.AmdSmiException."""


class Cards:
    """amdsmi on a machine with an Instinct and a Radeon."""

    def __init__(self) -> None:
        self.lost, self.open = set[int](), 0

    def bdf(self, card: int) -> str:
        return ("0000:0c:00.0", "0000:E3:00.0")[card]

    def uuid(self, card: int) -> str:
        if card in self.lost:
            raise NotSupportedError
        return (MI300X, RX7900)[card]

    def asic(self, card: int) -> dict[str, Any]:
        names = ("AMD Instinct MI300X", "N/A")
        return {"market_name": names[card], "vendor_id": "0x1002", "device_id": "0x74a1",
                "target_graphics_version": "gfx942"}  # fmt: skip

    def activity(self, card: int) -> dict[str, Any]:
        return {"gfx_activity": (87, "N/A")[card], "umc_activity": 12, "mm_activity": "N/A"}

    def power(self, card: int) -> dict[str, Any]:
        if card:  # of an older one, which has no field for what is valid
            return {"current_socket_power": "N/A", "average_socket_power": 45}
        return {"socket_power": 310, "current_socket_power": 310, "average_socket_power": "N/A"}

    def temperature(self, card: int, kind: str, metric: str) -> int:
        assert metric == "current"
        if kind == "edge" and card == 0:
            raise NotSupportedError
        return {"edge": 41, "junction": 63}[kind]

    def processes(self, card: int) -> list[dict[str, Any]]:
        if card:
            raise NotSupportedError
        return [{"name": "python", "pid": 1, "mem": 0, "memory_usage":
                 {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": 600 << 20}}]  # fmt: skip

    def opened(self, by: int) -> None:
        self.open += by

    def module(self) -> ModuleType:
        """All, as amdsmi names it."""
        made = ModuleType("amdsmi")
        vars(made).update(
            AmdSmiException=NotSupportedError,
            AmdSmiTemperatureType=type("Kind", (), {"EDGE": "edge", "JUNCTION": "junction"}),
            AmdSmiTemperatureMetric=type("Metric", (), {"CURRENT": "current"}),
            amdsmi_init=lambda: self.opened(1), amdsmi_shut_down=lambda: self.opened(-1),
            amdsmi_get_processor_handles=lambda: [0, 1],
            amdsmi_get_gpu_device_bdf=self.bdf, amdsmi_get_gpu_device_uuid=self.uuid,
            amdsmi_get_gpu_asic_info=self.asic, amdsmi_get_gpu_activity=self.activity,
            amdsmi_get_power_info=self.power, amdsmi_get_temp_metric=self.temperature,
            amdsmi_get_gpu_process_list=self.processes, amdsmi_get_gpu_vram_usage=lambda card:
            {"vram_total": (196592, 24560)[card], "vram_used": (283, 1024)[card]},
        )  # fmt: skip
        return made


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """A machine that has them, and nothing of NVIDIA's."""
    found = Cards()
    monkeypatch.setitem(sys.modules, "amdsmi", found.module())
    monkeypatch.setattr(gpus, "AmdSmi", lambda: AmdSmi(Path("/dev/null")))
    monkeypatch.setattr(gpus.GPUtil, "getGPUs", list)

    def no_driver() -> None:
        raise gpus.pynvml.NVMLError(gpus.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(gpus.pynvml, "nvmlInit", no_driver)
    return found


def test_what_cards_tell_has_units_and_what_they_do_not_is_unknown(cards: Cards) -> None:
    with GpuSampler() as sampler:
        instinct, radeon = sampler.sample()
        assert (instinct.name, radeon.name) == ("AMD Instinct MI300X", "AMD GPU")
        assert (instinct.uuid, radeon.index, instinct.capability) == (MI300X, 1, None)
        assert (instinct.memory_total_mib, radeon.memory_used_mib) == (196592, 1024)
        assert (instinct.load, radeon.load) == (0.87, None)
        assert (instinct.temperature_c, radeon.temperature_c) == (63, 63)
        assert (instinct.power_w, radeon.power_w) == (310, 45)
        assert (radeon.others_mib, radeon.others) == (None, ())
        cards.lost.add(0)
        assert [device.uuid for device in sampler.sample()] == [RX7900]
        assert cards.open == 1
    assert cards.open == 0


def test_who_holds_memory_and_which_card_is_where(cards: Cards) -> None:
    (process,) = read_gpu_processes() or ()
    assert (process.uuid, process.pid, process.mib) == (MI300X, 1, 600)
    assert amd_uuid_at("0000:e3:00.0") == RX7900
    assert amd_uuid_at("0000:01:00.0") is None
    assert cards.open == 0


def test_without_amds_driver_or_its_library_there_is_nothing(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not AmdSmi(tmp_path / "kfd").open()
    monkeypatch.setitem(sys.modules, "amdsmi", None)  # so that importing it fails
    with GpuSampler() as sampler:
        assert sampler.sample() == ()
    assert read_gpu_processes() is None
    assert cards.open == 0
