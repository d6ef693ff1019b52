"""AMD's GPUs, through amdsmi: AMD's own Python, which comes with ROCm or from PyPI.

What its functions return is theirs of 7.0 (amdsmi_interface.py): dictionaries, memory in MiB, power
in watts, degrees Celsius, and "N/A" where a card has no answer. Not every card has every sensor,
and an older amdsmi lacks functions: what is not told is None.
"""

import contextlib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from motley.cluster.binding import node_of_device
from motley.cluster.device_facts import MIB, DeviceFacts, GpuProcess, others_among, user_of

_DRIVER = Path("/dev/kfd")  # of AMD's driver for computing; without it there is nobody to ask
_HOTTEST_FIRST = ("JUNCTION", "HOTSPOT", "EDGE")  # Instinct cards have no sensor at the edge
_POWER_NOW_FIRST = ("socket_power", "current_socket_power", "average_socket_power")


class AmdSmi:
    """amdsmi, from :meth:`open` to :meth:`close`; a context closes it."""

    def __init__(self, driver: Path = _DRIVER) -> None:
        self._driver = driver
        self._smi: ModuleType | None = None
        self._missing = False

    def __enter__(self) -> "AmdSmi":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> bool:
        """Whether it answers. Where it is missing, it is looked for once."""
        if self._smi is None and not self._missing and self._driver.exists():
            try:
                with contextlib.redirect_stdout(sys.stderr):  # it prints what it misses
                    smi = importlib.import_module("amdsmi")
            except Exception:  # it is not there, or its library: it raises whatever comes
                self._missing = True
                return False
            with contextlib.suppress(smi.AmdSmiException):
                smi.amdsmi_init()
                self._smi = smi
        return self._smi is not None

    def close(self) -> None:
        """Let go of the driver."""
        if self._smi is not None:
            self._ask("amdsmi_shut_down")
            self._smi = None

    def devices(self) -> tuple[DeviceFacts, ...]:
        """All GPUs that answer."""
        found = [self._device(*each) for each in enumerate(self._handles())]
        return tuple(device for device in found if device is not None)

    def processes(self) -> tuple[GpuProcess, ...]:
        """Who holds memory of which."""
        return tuple(
            GpuProcess(index, str(self._ask("amdsmi_get_gpu_device_uuid", handle)), pid,
                       user_of(pid), mib)
            for index, handle in enumerate(self._handles())
            for pid, mib in self._held(handle) or ()
        )  # fmt: skip

    def uuid_at(self, place: str) -> str | None:
        """Of the GPU at a place on the PCI bus; None if there is none."""
        for handle in self._handles():
            if str(self._ask("amdsmi_get_gpu_device_bdf", handle)).lower() == place:
                uuid: str | None = self._ask("amdsmi_get_gpu_device_uuid", handle)
                return uuid
        return None

    def _handles(self) -> list[Any]:
        return self._ask("amdsmi_get_processor_handles") or []

    def _device(self, index: int, handle: Any) -> DeviceFacts | None:
        uuid = self._ask("amdsmi_get_gpu_device_uuid", handle)
        if uuid is None:
            return None  # a lost card does not hide the others
        memory = self._ask("amdsmi_get_gpu_vram_usage", handle) or {}
        load = _number(self._ask("amdsmi_get_gpu_activity", handle), "gfx_activity")
        others_mib, others = others_among(self._held(handle))
        place = self._ask("amdsmi_get_gpu_device_bdf", handle)
        return DeviceFacts(
            index=index,
            uuid=str(uuid),
            name=self._name(handle),
            capability=None,
            memory_total_mib=_number(memory, "vram_total"),
            memory_used_mib=_number(memory, "vram_used"),
            load=None if load is None else load / 100,
            temperature_c=self._temperature(handle),
            power_w=_first(self._ask("amdsmi_get_power_info", handle)),
            others_mib=others_mib,
            others=others,
            memory_node=node_of_device(str(place)) if place else None,
        )

    def _name(self, handle: Any) -> str:
        asic = self._ask("amdsmi_get_gpu_asic_info", handle) or {}
        name = str(asic.get("market_name", "N/A"))
        return "AMD GPU" if name == "N/A" else name

    def _temperature(self, handle: Any) -> float | None:
        kinds, now = self._smi.AmdSmiTemperatureType, self._smi.AmdSmiTemperatureMetric.CURRENT  # type: ignore[union-attr]
        for name in _HOTTEST_FIRST:
            if (kind := getattr(kinds, name, None)) is None:
                continue
            found = self._ask("amdsmi_get_temp_metric", handle, kind, now)
            if isinstance(found, int | float):
                return float(found)
        return None

    def _held(self, handle: Any) -> list[tuple[int, float | None]] | None:
        """Number and memory, MiB, of each process; None where that is not told."""
        listed = self._ask("amdsmi_get_gpu_process_list", handle)
        if listed is None or not all(isinstance(each, dict) for each in listed):
            return None  # before ROCm 6.1 it gave handles
        held = [(each["pid"], _number(each.get("memory_usage"), "vram_mem")) for each in listed]
        return [(pid, None if size is None else size / MIB) for pid, size in held]

    def _ask(self, name: str, *arguments: Any) -> Any:
        """An answer, or None where this card, driver or amdsmi has none."""
        question = getattr(self._smi, name, None)
        with contextlib.suppress(self._smi.AmdSmiException):  # type: ignore[union-attr]
            return question and question(*arguments)
        return None


def _first(power: Any) -> float | None:
    found = (_number(power, name) for name in _POWER_NOW_FIRST)
    return next((each for each in found if each is not None), None)


def _number(answer: Any, name: str) -> float | None:
    """One of an answer's numbers; None if there is none."""
    value = answer.get(name) if isinstance(answer, dict) else None
    return float(value) if isinstance(value, int | float) else None
