"""A run that is being written, step by step, as a real one writes it."""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from motley.records.run_folder import RunFolder
from motley.records.training import MOST_WRITERS, StepRecord, others_ready

LAB = ("tesla0", "tesla1", "tesla2", "tesla3", "tesla4")
_COMM_S, _OPT_S = 0.004, 0.003


class LiveRun:
    """Writes the records of a run, which others look at meanwhile.

    Args:
        folder: of the run. hosts: of each rank. last_step: with which it would end.
        compute_s: of a step, usually. now: when it begins, seconds since the epoch.
        samples_s: between two of a logger of devices.
    """

    def __init__(
        self, folder: Path, hosts: Sequence[str] = LAB, last_step: int = 200,
        compute_s: float = 0.1, now: float | None = None, samples_s: float = 2.0, **about: Any,
    ) -> None:  # fmt: skip
        self.run, self.hosts, self.step = RunFolder(folder), hosts, 0
        self._compute_s = compute_s
        self.now = time.time() if now is None else now
        self.run.create()
        self._lock = self.run.lock()  # else it is thought to have stopped
        writers = range(len(hosts)) if len(hosts) <= MOST_WRITERS else range(1)
        self._steps = [self.run.steps(rank) for rank in writers]
        self._logs = {host: self.run.gpu_log(host) for host in dict.fromkeys(hosts)}
        self.run.write_run({
            "status": "running", "started": self.now, "result": None, "last_step": last_step,
            "config": {"model": "vit_digits", "gpu_log_interval": samples_s},
            "task": {"name": "image", "unit": "images", "weight": 1.0, "title": "ViT on digits"},
            "ranks": [
                {"rank": rank, "group_rank": rank, "host": host,
                 "device": "NVIDIA GeForce RTX 3070", "uuid": f"GPU-{rank}", "precision": "bf16"}
                for rank, host in enumerate(hosts)
            ],
            "plan": {
                "global_batch": 20 * len(hosts), "counts": [20] * len(hosts),
                "forecast": {"global_batch": 20 * len(hosts), "limit_s": compute_s},
            },
            **about,
        })  # fmt: skip

    def take_step(
        self, slow: Mapping[int, float] | None = None, comm_s: float = _COMM_S,
        silent: Sequence[int] = (), **fields: Any,
    ) -> None:  # fmt: skip
        """All ranks but silent ones record a step; ``slow``: by rank, times the usual compute."""
        compute = [self._compute_s * (slow or {}).get(rank, 1.0) for rank in range(len(self.hosts))]
        ready = [0.001 + seconds for seconds in compute]
        count = 20 * len(self.hosts)
        seconds = max(ready) + comm_s + _OPT_S
        self.now += seconds
        others = None
        if len(self.hosts) > MOST_WRITERS:
            others = others_ready(ready, [20] * len(ready), range(len(ready)))
        for rank, lines in enumerate(self._steps):
            if rank in silent:
                continue
            record = StepRecord(
                step=self.step, epoch=self.step // 40, loss=2.3 / (1 + self.step / 20), lr=5e-4,
                loss_scale=1.0, overflow=False, grad_norm=1.0, n_local=20, n_global=count,
                t_data=0.001, t_compute=compute[rank], t_wait=max(ready) - ready[rank],
                t_comm=comm_s, t_opt=_OPT_S, mem_peak_mib=400.0, samples_per_s=count / seconds,
                weight=float(count), time=self.now, others_ready=others,
            )  # fmt: skip
            lines.write({**vars(record), **fields})
        self.step += 1

    def take_samples(self, silent: Sequence[str] = (), others: str = "") -> None:
        """All loggers but those of silent hosts write a row a GPU."""
        for rank, host in enumerate(self.hosts):
            if host not in silent:
                self._logs[host].write({
                    "Timestamp": datetime.fromtimestamp(self.now).isoformat(" ", "milliseconds"),
                    "Rank": rank, "Step": self.step, "GPU_ID": rank, "GPU_Name": "RTX 3070",
                    "GPU_Load": 0.93, "GPU_Used_Mem_MB": 5120, "GPU_Total_Mem_MB": 8192,
                    "GPU_Temp_C": 64, "Host": host, "GPU_UUID": f"GPU-{rank}", "Power_W": 198.5,
                    "Others_Mem_MB": 600 if others else 0, "Others": others,
                })  # fmt: skip

    def close(self) -> None:
        """Its process ends."""
        for file in (*self._steps, *self._logs.values(), self._lock):
            file.close()
