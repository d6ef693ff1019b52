"""The GPU logger: a thread on each host that samples the host's GPUs during training.

One rank per host samples all GPUs of the host every 2 s, in a thread that keeps NVML open. A sample
takes at most a thousandth of these 2 s, however long nvidia-smi takes to start.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psutil

from motley.cluster.facts import cpu_name
from motley.cluster.gpus import MIB, DeviceFacts, GpuSampler
from motley.records.gpu_csv import GpuLog

_SHARED = "/dev/shm"  # shared memory, in which loader processes pass batches
_FULL, _ROOM = 0.8, 0.7  # used fraction that causes a warning; fraction that re-arms it


@dataclass(frozen=True)
class Progress:
    """The position of training at which the logger takes a sample of a GPU.

    A field is None before the first step.

    Attributes:
        epoch: number of the epoch.
        step: number of the step.
        compute_s: seconds of this rank's forward and backward pass in the last step.
    """

    epoch: int | None = None
    step: int | None = None
    compute_s: float | None = None


class GpuLogger:
    """A logger that samples this host until it is closed.

    Args:
        log: log that receives the rows.
        host: name of this host.
        ranks: rank that uses each GPU, by the GPU's UUID. The key "" has the host's first rank.
        progress: function that returns the position of training. The thread of the logger calls it.
        interval: seconds between samples.
    """

    def __init__(
        self,
        log: GpuLog,
        host: str,
        ranks: Mapping[str, int],
        progress: Callable[[], Progress],
        interval: float = 2.0,
    ) -> None:
        self._log, self._host, self._ranks = log, host, ranks
        self._progress, self._interval = progress, interval
        self._cpu = cpu_name()
        self._shared_is_full = False
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._sample_until_closed, name="gpu-log", daemon=True
        )

    def __enter__(self) -> "GpuLogger":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take a last sample, and close the log."""
        self._stop.set()
        self._thread.join(timeout=10)
        self._log.close()

    def _sample_until_closed(self) -> None:
        # psutil reports the load since this thread's last call, so the first value is meaningless.
        psutil.cpu_percent()
        wait, running = min(0.5, self._interval), True
        with GpuSampler() as sampler:
            while running:
                running = not self._stop.wait(wait)
                wait = self._interval
                # A single bad answer of a driver, or a temporarily full disk, must not end the log.
                with contextlib.suppress(Exception):
                    for row in self._rows(sampler):
                        self._log.write(row)

    def _shared_memory(self) -> tuple[int, int] | None:
        """Return the used and total bytes of /dev/shm (shared memory); None if it does not exist.

        If the shared memory is nearly full, print a warning once.
        """
        try:
            there = shutil.disk_usage(_SHARED)
        except OSError:
            return None
        if not there.total:
            return None
        part = there.used / there.total
        if part > _FULL and not self._shared_is_full:
            print(full_text(self._host, there.used, there.total), file=sys.stderr, flush=True)
        self._shared_is_full = part > (_ROOM if self._shared_is_full else _FULL)
        return there.used, there.total

    def _rows(self, sampler: GpuSampler) -> Iterator[dict[str, Any]]:
        progress, memory = self._progress(), psutil.virtual_memory()
        shared = self._shared_memory()
        common = {
            "Timestamp": datetime.now().isoformat(sep=" ", timespec="milliseconds"),
            "Monotonic_s": round(time.monotonic(), 3),
            "Host": self._host,
            "Rank": self._ranks.get(""),
            "Epoch": progress.epoch,
            "Step": progress.step,
            "Computation_Time": progress.compute_s,
            "CPU_Name": self._cpu,
            "CPU_Load": psutil.cpu_percent() / 100,
            "RAM_Used_MB": round((memory.total - memory.available) / MIB),
            "RAM_Total_MB": round(memory.total / MIB),
            "SHM_Used_MB": shared and round(shared[0] / MIB),
            "SHM_Total_MB": shared and round(shared[1] / MIB),
        }
        devices = sampler.sample()
        if not devices:
            yield common
        for device in devices:
            yield {**common, "Rank": self._ranks.get(device.uuid), **_gpu_columns(device)}


def full_text(host: str, used: float, total: float) -> str:
    """Return the warning about nearly full shared memory.

    Args:
        host: name of this host.
        used: used bytes.
        total: total bytes.
    """
    return (
        f"motley: {_SHARED} on {host} is {used / total:.0%} full ({used / MIB:,.0f} of "
        f"{total / MIB:,.0f} MiB), and a loader process that finds no room in it dies. Start "
        f"fewer loader processes with --workers (0: none), or enlarge {_SHARED} (in a container: "
        "--shm-size)"
    )


def _gpu_columns(device: DeviceFacts) -> dict[str, Any]:
    total, used = device.memory_total_mib, device.memory_used_mib
    return {
        "GPU_ID": device.index,
        "GPU_Name": device.name,
        "GPU_Load": device.load,
        "GPU_Free_Mem_MB": None if total is None or used is None else round(total - used),
        "GPU_Used_Mem_MB": None if used is None else round(used),
        "GPU_Total_Mem_MB": None if total is None else round(total),
        "GPU_Temp_C": device.temperature_c,
        "GPU_UUID": device.uuid,
        "Power_W": device.power_w,
        "Others_Mem_MB": None if device.others_mib is None else round(device.others_mib),
        "Others": " ".join(device.others),
    }
