"""The GPUs of this machine and who uses them, asked without torch.

GPUtil names the GPUs, as the lab's logs always did, and stands in where NVML does not answer.
NVML tells their load, memory, power and processes in a fraction of a millisecond, where there is a
driver. A question that nobody answers gives None, never 0.
"""

import contextlib
import math
import os
import pwd
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import GPUtil  # type: ignore[import-untyped]
import pynvml  # type: ignore[import-untyped]

from motley.cluster.binding import node_of_device

MIB = 2**20
GPUTIL_EVERY_S = 300.0  # 0.225 s in these are 0.08 % of the time


@dataclass(frozen=True)
class DeviceFacts:
    """One GPU.

    Attributes:
        index: number on its machine, in PCI order as nvidia-smi counts.
        capability: CUDA compute capability, for example (8, 6).
        memory_total_mib, memory_used_mib: of everybody.
        others_mib: held by other users' processes; None where the driver does not tell.
        others: their names, for example ("alice",).
        memory_node: the number of the memory node next to it; None: unknown.
        load: 0 to 1. temperature_c: degrees Celsius. power_w: watts.
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


def read_driver() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    with _nvml() as nvml_works:
        return str(pynvml.nvmlSystemGetDriverVersion()) if nvml_works else None


def read_devices() -> tuple[DeviceFacts, ...]:
    """The GPUs of this machine, with their load at this moment; () if there is none.

    Costs 40 to 225 ms where there is a driver: GPUtil starts nvidia-smi. Who asks again and again
    keeps a :class:`GpuSampler`.
    """
    with GpuSampler() as sampler:
        return sampler.sample()


class GpuSampler:
    """Asks for this machine's GPUs again and again; NVML stays open in between.

    Args:
        gputil_every_s: seconds between two questions to GPUtil, where NVML answers or where there
            is no GPU. Where GPUtil alone knows of GPUs, it is asked for each sample.
    """

    def __init__(self, gputil_every_s: float = GPUTIL_EVERY_S) -> None:
        self._every_s, self._asked = gputil_every_s, -math.inf
        self._of_gputil: dict[str, Any] = {}  # by UUID
        self._is_open = False

    def __enter__(self) -> "GpuSampler":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def sample(self) -> tuple[DeviceFacts, ...]:
        """All GPUs at this moment; () if there is none, or none answers."""
        if time.monotonic() >= self._asked + self._every_s:
            self._ask_gputil()
        for _ in range(2):  # a driver that was restarted has to be opened anew
            if not self._open():
                break
            if (found := _nvml_devices(self._of_gputil)) is not None:
                return found
            self._close()
        if self._of_gputil:  # of the last time: it may be as good as the driver is bad
            self._ask_gputil()
        return tuple(_gputil_device(gpu) for gpu in self._of_gputil.values())

    def _ask_gputil(self) -> None:
        self._of_gputil = {}
        with contextlib.suppress(ValueError):  # it takes nvidia-smi's "has failed" for numbers
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


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU.

    Attributes:
        gpu, uuid: of the GPU, as in :class:`DeviceFacts`.
        user: its owner; "?" where that is hidden.
        mib: memory that it holds there; None where the driver does not tell.
    """

    gpu: int
    uuid: str
    pid: int
    user: str
    mib: float | None


def read_gpu_processes() -> tuple[GpuProcess, ...] | None:
    """Who holds memory of this machine's GPUs; None where there is no driver to ask."""
    found = []
    with _nvml() as nvml_works:
        if not nvml_works:
            return None
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
            uuid = str(handle and _ask(pynvml.nvmlDeviceGetUUID, handle))
            running = handle and _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
            for process in running or ():
                held = process.usedGpuMemory
                user = _user_name(_owner(process.pid))
                mib = None if held is None else held / MIB
                found.append(GpuProcess(index, uuid, process.pid, user, mib))
    return tuple(found)


@contextlib.contextmanager
def _nvml() -> Iterator[bool]:
    """NVML open for the duration; False where there is no driver to ask."""
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
    """NVML's answer, or None where this card or driver has none."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def _nvml_devices(of_gputil: Mapping[str, Any]) -> tuple[DeviceFacts, ...] | None:
    """All GPUs that answer; None if the driver does not, or none of them does."""
    count = _ask(pynvml.nvmlDeviceGetCount)
    if count is None:
        return None
    found = [_nvml_device(index, of_gputil) for index in range(count)]
    answered = tuple(device for device in found if device is not None)
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
    others_mib, others = _others(processes)
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
    """Older releases of NVML's Python answer in bytes."""
    return word.decode() if isinstance(word, bytes) else word


def _known(value: float) -> float | None:
    """GPUtil says NaN for what nvidia-smi does not support."""
    return None if value != value else float(value)


def _others(processes: Iterable[Any] | None) -> tuple[float | None, tuple[str, ...]]:
    """Memory (MiB) and names of the users, other than this one, with processes on a GPU."""
    if processes is None:
        return None, ()
    used, names = 0.0, set()
    for process in processes:
        uid = _owner(process.pid)
        if uid != os.getuid():
            used += (process.usedGpuMemory or 0) / MIB
            names.add(_user_name(uid))
    return used, tuple(sorted(names))


def _owner(pid: int) -> int | None:
    """User id of a process; None where this machine hides it (another container's, say)."""
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
