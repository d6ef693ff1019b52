"""The GPUs of this machine and the processes on them, read without torch.

NVML serves NVIDIA's GPUs, and amdsmi (the Python package that comes with ROCm) serves AMD's.

The module expects the return values of amdsmi 7.0 (amdsmi_interface.py): dictionaries, memory in
MiB, power in watts, degrees Celsius, and "N/A" for a value that a card lacks. Not every card has
every sensor, and an older amdsmi lacks functions. A missing value is None.

GPUtil provides the names of GPUs, because older logs have the names in GPUtil's form. GPUtil also
replaces NVML where NVML does not answer. NVML reports load, memory, power and processes in a
fraction of a millisecond, if there is a driver. Without a driver of NVIDIA's, amdsmi is used for
AMD's GPUs. A value that no source reports is None, never 0.
"""

import contextlib
import importlib
import math
import os
import platform
import pwd
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import GPUtil  # type: ignore[import-untyped]
import pynvml  # type: ignore[import-untyped]

from motley.cluster.launcher import node_of_device, read_launch

MIB = 2**20


@dataclass(frozen=True)
class DeviceFacts:
    """The properties and the present load of one GPU.

    Attributes:
        index: number of the GPU on its machine, in PCI order as nvidia-smi counts.
        uuid: unique id of the GPU.
        name: product name.
        capability: CUDA compute capability, for example (8, 6).
        memory_total_mib: memory of the GPU, MiB.
        memory_used_mib: memory in use, summed over all users, MiB.
        load: fraction of the time in which the GPU computes, 0 to 1.
        temperature_c: temperature in degrees Celsius.
        power_w: power in watts.
        others_mib: GPU memory of other users' processes, MiB; None if the driver does not report
            it.
        others: names of the other users with processes on the GPU, for example ("alice",).
        memory_node: number of the memory (NUMA) node to which the GPU is attached; None: unknown.
    """

    index: int
    uuid: str
    name: str
    capability: tuple[int, int] | None
    memory_total_mib: float | None
    memory_used_mib: float | None
    load: float | None
    temperature_c: float | None
    power_w: float | None
    others_mib: float | None
    others: tuple[str, ...]
    memory_node: int | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU.

    Attributes:
        gpu: index of the GPU, as in :class:`DeviceFacts`.
        uuid: unique id of the GPU.
        pid: process id.
        user: name of the user who owns the process; "?" if the name is hidden.
        mib: GPU memory of the process, MiB; None if the driver does not report it.
    """

    gpu: int
    uuid: str
    pid: int
    user: str
    mib: float | None


def others_among(
    processes: Iterable[tuple[int, float | None]] | None,
) -> tuple[float | None, tuple[str, ...]]:
    """Return the GPU memory (MiB) and the names of other users with processes on a GPU.

    Args:
        processes: process id and memory, MiB, of each process; None: unknown.
    """
    if processes is None:
        return None, ()
    used, names = 0.0, set()
    for pid, mib in processes:
        uid = _owner(pid)
        if uid != os.getuid():
            used += mib or 0.0
            names.add(_user_name(uid))
    return used, tuple(sorted(names))


def get_process_user(pid: int) -> str:
    """Return the name of the user who owns a process; "?" if the owner is hidden."""
    return _user_name(_owner(pid))


def _owner(pid: int) -> int | None:
    """Return the user id of a process; None if it is hidden, as for another container."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def _user_name(uid: int | None) -> str:
    if uid is None:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


_DRIVER = Path("/dev/kfd")  # of AMD's driver for computing; without it amdsmi has no GPU
_HOTTEST_FIRST = ("JUNCTION", "HOTSPOT", "EDGE")  # Instinct cards have no sensor at the edge
_POWER_NOW_FIRST = ("socket_power", "current_socket_power", "average_socket_power")


class AmdSmi:
    """A connection to amdsmi, from :meth:`open` to :meth:`close`; also a context manager."""

    def __init__(self, driver: Path = _DRIVER) -> None:
        self._driver = driver
        self._smi: ModuleType | None = None
        self._missing = False

    def __enter__(self) -> "AmdSmi":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> bool:
        """Open the connection; return True if amdsmi works.

        A missing package is looked up only once.
        """
        if self._smi is None and not self._missing and self._driver.exists():
            try:
                with contextlib.redirect_stdout(sys.stderr):  # amdsmi prints missing libraries
                    smi = importlib.import_module("amdsmi")
            except Exception:  # the package or its library is missing; the type of error varies
                self._missing = True
                return False
            with contextlib.suppress(smi.AmdSmiException):
                smi.amdsmi_init()
                self._smi = smi
        return self._smi is not None

    def close(self) -> None:
        """Close the connection to amdsmi."""
        if self._smi is not None:
            self._ask("amdsmi_shut_down")
            self._smi = None

    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the facts of all GPUs that answer."""
        result = [self._device(*each) for each in enumerate(self._handles())]
        return tuple(device for device in result if device is not None)

    def processes(self) -> tuple[GpuProcess, ...]:
        """Return the processes that hold memory of each GPU."""
        return tuple(
            GpuProcess(index, str(self._ask("amdsmi_get_gpu_device_uuid", handle)), pid,
                       get_process_user(pid), mib)
            for index, handle in enumerate(self._handles())
            for pid, mib in self._held(handle) or ()
        )  # fmt: skip

    def uuid_at(self, place: str) -> str | None:
        """Return the UUID of the GPU at a PCI address; None if no GPU is there."""
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
            result = self._ask("amdsmi_get_temp_metric", handle, kind, now)
            if isinstance(result, int | float):
                return float(result)
        return None

    def _held(self, handle: Any) -> list[tuple[int, float | None]] | None:
        """Return the pid and memory in MiB of each process on a GPU.

        None: amdsmi does not report the processes, or the memory of a process.
        """
        listed = self._ask("amdsmi_get_gpu_process_list", handle)
        if listed is None or not all(isinstance(each, dict) for each in listed):
            return None  # before ROCm 6.1 amdsmi returned handles
        held = [(each["pid"], _number(each.get("memory_usage"), "vram_mem")) for each in listed]
        return [(pid, None if size is None else size / MIB) for pid, size in held]

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call a function of amdsmi. Return None if the card, driver or package lacks it."""
        question = getattr(self._smi, name, None)
        with contextlib.suppress(self._smi.AmdSmiException):  # type: ignore[union-attr]
            return question and question(*arguments)
        return None


def _first(power: Any) -> float | None:
    result = (_number(power, name) for name in _POWER_NOW_FIRST)
    return next((each for each in result if each is not None), None)


def _number(answer: Any, name: str) -> float | None:
    """Return a number from an answer of amdsmi; None if it has no number of this name."""
    value = answer.get(name) if isinstance(answer, dict) else None
    return float(value) if isinstance(value, int | float) else None


GPUTIL_EVERY_S = 300.0  # a call takes 0.225 s, so calls take 0.08 % of the time
NVIDIA_SMI_LIMIT_S = 20.0  # nvidia-smi starts in seconds if no process keeps the driver loaded


_NO_GPUS = b"No devices were found"  # nvidia-smi prints this in place of a table
_COLUMNS, _NAME_COLUMN = 12, 7  # columns of the table that GPUtil reads, and the column of names


class LimitedSmi(subprocess.Popen[bytes]):
    """The process of nvidia-smi that GPUtil starts, with a time limit.

    GPUtil treats an OSError as a machine without GPUs. Once nvidia-smi has hung, this process does
    not start it again. If nvidia-smi fails, this process prints the error once.
    """

    has_timed_out = False
    has_failed = False

    def __init__(self, *args: Any, **options: Any) -> None:
        if LimitedSmi.has_timed_out:
            raise OSError("nvidia-smi did not answer earlier")
        super().__init__(*args, **options)

    def communicate(
        self, input: bytes | None = None, timeout: float | None = None
    ) -> tuple[bytes, bytes]:
        """Return the output; kill nvidia-smi and raise OSError if it does not end in time.

        In the output, a GPU's name has "," in place of ", ", because GPUtil splits lines at ", ".
        """
        try:
            output, errors = super().communicate(input, timeout or NVIDIA_SMI_LIMIT_S)
            if self.returncode != 0 and not output.startswith(_NO_GPUS):
                self._report_failure(output)
            return b"\n".join(map(_join_name, output.split(b"\n"))), errors
        except subprocess.TimeoutExpired:
            LimitedSmi.has_timed_out = True
            self.kill()  # without a wait: a process that hangs in the driver cannot end
            print(
                f"motley: nvidia-smi on {platform.node()} did not end within "
                f"{NVIDIA_SMI_LIMIT_S:g} s, so Motley does not start it again: its driver or a "
                "GPU hangs. Run `dmesg | grep -i nvrm` there, and restart the machine",
                file=sys.stderr,
            )
            raise OSError("nvidia-smi did not end in time") from None

    def _report_failure(self, output: bytes) -> None:
        """Print the first line of nvidia-smi's output, once per host, and raise OSError."""
        if not LimitedSmi.has_failed and read_launch().local_rank in (None, 0):
            LimitedSmi.has_failed = True
            words = output.decode(errors="replace").partition("\n")[0].strip() or "no message"
            print(
                f"motley: nvidia-smi on {platform.node()} ended with status {self.returncode} "
                f"({words}), so its GPUs may be missing; ask its administrator to restart the "
                "machine or to reinstall the driver",
                file=sys.stderr,
            )
        raise OSError("nvidia-smi failed")


def _join_name(line: bytes) -> bytes:
    """Return a line of nvidia-smi's table with as many columns as GPUtil expects."""
    fields = line.split(b", ")
    end = len(fields) - _COLUMNS + _NAME_COLUMN + 1
    if end <= _NAME_COLUMN + 1:
        return line
    name = b",".join(fields[_NAME_COLUMN:end])
    return b", ".join([*fields[:_NAME_COLUMN], name, *fields[end:]])


GPUtil.GPUtil.Popen = LimitedSmi


def read_driver() -> str | None:
    """Return the version of the NVIDIA driver; None without one."""
    with _nvml() as nvml_works:
        return str(pynvml.nvmlSystemGetDriverVersion()) if nvml_works else None


def read_devices() -> tuple[DeviceFacts, ...]:
    """Return the GPUs of this machine, with their present load; () without GPUs.

    A call takes 40 to 225 ms if there is a driver, because GPUtil starts nvidia-smi. For repeated
    reads, keep a :class:`GpuSampler`.
    """
    with GpuSampler() as sampler:
        return sampler.sample()


class GpuSampler:
    """A reader that samples this machine's GPUs repeatedly. NVML stays open between samples.

    Args:
        gputil_every_s: seconds between two calls of GPUtil. If NVML answers, GPUtil only adds the
            GPUs' names. If NVML does not answer, the call looks for GPUs. Once such a call finds
            GPUs, GPUtil is called for every sample, whatever this value.
    """

    def __init__(self, gputil_every_s: float = GPUTIL_EVERY_S) -> None:
        self._every_s, self._asked = gputil_every_s, -math.inf
        self._of_gputil: dict[str, Any] = {}  # by UUID
        self._is_open, self._amd = False, AmdSmi()

    def __enter__(self) -> "GpuSampler":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._amd.close()

    def sample(self) -> tuple[DeviceFacts, ...]:
        """Return all GPUs with their present load; () if no GPU exists or answers."""
        if time.monotonic() >= self._asked + self._every_s:
            self._ask_gputil()
        for _ in range(2):  # NVML has to be opened again after a restart of the driver
            if not self._open():
                break
            if (result := _nvml_devices(self._of_gputil)) is not None:
                return result
            self._close()
        if self._of_gputil:  # GPUtil has found GPUs before, although NVML does not answer
            self._ask_gputil()
            return tuple(_gputil_device(gpu) for gpu in self._of_gputil.values())
        return self._amd.devices() if self._amd.open() else ()

    def _ask_gputil(self) -> None:
        self._of_gputil = {}
        with contextlib.suppress(ValueError, IndexError):  # GPUtil parses any output as numbers
            self._of_gputil = {gpu.uuid: gpu for gpu in GPUtil.getGPUs()}
        self._asked = time.monotonic()

    def _open(self) -> bool:
        if not self._is_open:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._is_open = True
        return self._is_open

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def read_gpu_processes() -> tuple[GpuProcess, ...] | None:
    """Return the processes that hold memory of this machine's GPUs; None without a driver."""
    result = []
    with _nvml() as nvml_works:
        if not nvml_works:
            with AmdSmi() as amd:
                return amd.processes() if amd.open() else None
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
            uuid = str(handle and _ask(pynvml.nvmlDeviceGetUUID, handle))
            running = handle and _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
            for process in running or ():
                held = process.usedGpuMemory
                mib = None if held is None else held / MIB
                result.append(
                    GpuProcess(index, uuid, process.pid, get_process_user(process.pid), mib)
                )
    return tuple(result)


def amd_uuid_at(place: str) -> str | None:
    """Return the UUID of the AMD GPU at a PCI address such as ``0000:c1:00.0``, or None."""
    with AmdSmi() as amd:
        return amd.uuid_at(place) if amd.open() else None


@contextlib.contextmanager
def _nvml() -> Iterator[bool]:
    """Open NVML for the ``with`` block; yield False without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _ask(question: Any, *arguments: Any) -> Any:
    """Call a function of NVML. Return None if the card or the driver lacks the value."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _nvml_devices(of_gputil: Mapping[str, Any]) -> tuple[DeviceFacts, ...] | None:
    """Return all GPUs that answer; None if neither the driver nor any GPU answers."""
    count = _ask(pynvml.nvmlDeviceGetCount)
    if count is None:
        return None
    result = [_nvml_device(index, of_gputil) for index in range(count)]
    answered = tuple(device for device in result if device is not None)
    return answered if answered or not count else None


def _nvml_device(index: int, of_gputil: Mapping[str, Any]) -> DeviceFacts | None:
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    uuid = None if handle is None else _ask(pynvml.nvmlDeviceGetUUID, handle)
    if uuid is None:
        return None  # a lost card does not hide the others
    named = of_gputil.get(str(uuid))
    load = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    celsius = _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    milliwatts = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    processes = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    others_mib, others = others_among(
        None if processes is None
        else [(each.pid, (each.usedGpuMemory or 0) / MIB) for each in processes]
    )  # fmt: skip
    place = _ask(pynvml.nvmlDeviceGetPciInfo, handle)
    return DeviceFacts(
        index=index,
        uuid=str(uuid),
        name=str(named.name if named else _ask(pynvml.nvmlDeviceGetName, handle)),
        capability=_ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        memory_total_mib=memory.total / MIB if memory else None,
        memory_used_mib=memory.used / MIB if memory else None,
        load=load.gpu / 100 if load else None,
        temperature_c=None if celsius is None else float(celsius),
        power_w=None if milliwatts is None else milliwatts / 1000,
        others_mib=others_mib,
        others=others,
        memory_node=node_of_device(_text(place.busId)) if place else None,
    )


def _gputil_device(gpu: Any) -> DeviceFacts:
    return DeviceFacts(
        index=int(gpu.id),
        uuid=str(gpu.uuid),
        name=str(gpu.name),
        capability=None,
        memory_total_mib=_known(gpu.memoryTotal),
        memory_used_mib=_known(gpu.memoryUsed),
        load=_known(gpu.load),
        temperature_c=_known(gpu.temperature),
        power_w=None,
        others_mib=None,
        others=(),
    )


def _text(word: str | bytes) -> str:
    """Return a value of NVML as a str, since older releases of its Python package return bytes."""
    return word.decode() if isinstance(word, bytes) else word


def _known(value: float) -> float | None:
    """Return the value, or None for NaN, which GPUtil returns for an unsupported field."""
    return None if value != value else float(value)
