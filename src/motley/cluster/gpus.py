"""The GPUs of this machine and who uses them, asked without torch.

GPUtil names the GPUs, as the lab's logs always did, and stands in where NVML does not answer.
NVML tells their load, memory, power and processes in a fraction of a millisecond, where there is a
driver; where there is none of NVIDIA's, amdsmi is asked for AMD's. A question that nobody answers
gives None, never 0.
"""

import contextlib
import math
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import GPUtil  # type: ignore[import-untyped]
import pynvml  # type: ignore[import-untyped]

from motley.cluster.amd_smi import AmdSmi
from motley.cluster.binding import node_of_device
from motley.cluster.device_facts import MIB, DeviceFacts, GpuProcess, others_among, user_of
from motley.cluster.launcher import launch_of

GPUTIL_EVERY_S = 300.0  # 0.225 s in these are 0.08 % of the time
NVIDIA_SMI_LIMIT_S = 20.0  # it takes seconds to start where no process keeps the driver loaded


_NO_GPUS = b"No devices were found"  # which nvidia-smi prints in place of a table
_COLUMNS, _NAME_COLUMN = 12, 7  # of the table that GPUtil asks for


class LimitedSmi(subprocess.Popen[bytes]):
    """The nvidia-smi that GPUtil starts, with a time limit.

    GPUtil takes an OSError for a machine without GPUs. A process that has seen nvidia-smi hang
    does not start it again. A process that has seen it fail prints that once.
    """

    has_timed_out = False
    has_failed = False

    def __init__(self, *args: Any, **options: Any) -> None:
        if LimitedSmi.has_timed_out:
            raise OSError("nvidia-smi did not answer before")
        super().__init__(*args, **options)

    def communicate(
        self, input: bytes | None = None, timeout: float | None = None
    ) -> tuple[bytes, bytes]:
        """Return the output; kill nvidia-smi and raise OSError if it does not end in time.

        A comma in a GPU's name loses the blank behind it, at which GPUtil would split.
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
                f"{NVIDIA_SMI_LIMIT_S:g} s, and is not asked again: its driver or a GPU hangs; "
                "see `dmesg | grep -i nvrm` there, and restart the machine",
                file=sys.stderr,
            )
            raise OSError("nvidia-smi did not end in time") from None

    def _report_failure(self, output: bytes) -> None:
        """Print the first words of nvidia-smi, once on a host."""
        if not LimitedSmi.has_failed and launch_of().local_rank in (None, 0):
            LimitedSmi.has_failed = True
            words = output.decode(errors="replace").partition("\n")[0].strip() or "no message"
            print(
                f"motley: nvidia-smi on {platform.node()} ended with status {self.returncode} "
                f"({words}), so its GPUs may be missing; have its administrator restart the "
                "machine or reinstall the driver",
                file=sys.stderr,
            )
        raise OSError("nvidia-smi failed")


def _join_name(line: bytes) -> bytes:
    """Return a line of the table with as many columns as GPUtil expects."""
    fields = line.split(b", ")
    end = len(fields) - _COLUMNS + _NAME_COLUMN + 1
    if end <= _NAME_COLUMN + 1:
        return line
    name = b",".join(fields[_NAME_COLUMN:end])
    return b", ".join([*fields[:_NAME_COLUMN], name, *fields[end:]])


GPUtil.GPUtil.Popen = LimitedSmi


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
        self._is_open, self._amd = False, AmdSmi()

    def __enter__(self) -> "GpuSampler":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._amd.close()

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
        return self._amd.devices() if self._amd.open() else ()

    def _ask_gputil(self) -> None:
        self._of_gputil = {}
        with contextlib.suppress(ValueError, IndexError):  # it takes any words for numbers
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
    """Who holds memory of this machine's GPUs; None where there is no driver to ask."""
    found = []
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
                found.append(GpuProcess(index, uuid, process.pid, user_of(process.pid), mib))
    return tuple(found)


def amd_uuid_at(place: str) -> str | None:
    """The UUID of the AMD GPU at a place on the PCI bus, such as ``0000:c1:00.0``; None if there is
    none."""
    with AmdSmi() as amd:
        return amd.uuid_at(place) if amd.open() else None


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
    """Older releases of NVML's Python answer in bytes."""
    return word.decode() if isinstance(word, bytes) else word


def _known(value: float) -> float | None:
    """GPUtil says NaN for what nvidia-smi does not support."""
    return None if value != value else float(value)
