"""Small records of runs, to draw."""

from datetime import datetime
from pathlib import Path

from motley.records.gpu_csv import LAB_GPU_COLUMNS
from motley.records.run_folder import RunFolder
from motley.records.training import EpochRecord, StepRecord

START = 1763693554.0


def write_run(folder: Path, *, status: str = "finished", known: bool = True) -> RunFolder:
    """Two ranks, 60 steps; ``known``: waiting and communication are told from compute."""
    run = RunFolder(folder)
    run.create()
    for rank in range(2):
        with run.steps(rank) as lines:
            for step in range(60):
                overflow = step in (2, 30)
                lines.write(
                    StepRecord(
                        step=step, epoch=step // 20, loss=2.3 / (1 + step / 10), lr=5e-4,
                        loss_scale=2.0 ** (16 - (step > 2) - (step > 30)), overflow=overflow,
                        grad_norm=None if overflow else 1.0, n_local=20, n_global=40,
                        t_data=0.001, t_compute=0.1, t_wait=0.02 if known else None,
                        t_comm=0.03 if known else None, t_opt=0.004, mem_peak_mib=400.0,
                        samples_per_s=250.0 + step % 7, weight=128.0, time=START + 0.16 * step,
                    )
                )  # fmt: skip
    with run.epochs() as lines:
        for epoch in range(3):
            metrics = {"top1": 0.5 + epoch / 10, "loss": 1.0}
            record = EpochRecord(20 * epoch + 20, epoch, 360, 1.0, START, metrics)
            lines.write(record.as_json())
    run.write_run(
        {
            "status": status,
            "result": {"top1": 0.7},
            "config": {"model": "vit_digits", "dataset": "digits"},
            "ranks": [
                {"rank": 0, "host": "a", "device": "Tesla P4", "precision": "fp32"},
                {"rank": 1, "host": "b", "device": "CPU", "precision": "fp32"},
            ],
        }
    )
    return run


def write_gpu_log(run: RunFolder, host: str, *, gpu: bool) -> None:
    log = run.gpu_log(host)
    for second in range(0, 20, 2):
        row = {
            "Timestamp": datetime.fromtimestamp(START + second).isoformat(" ", "milliseconds"),
            "Host": host, "Rank": 0, "Epoch": second // 7, "Step": second, "CPU_Name": "EPYC",
            "CPU_Load": 0.5, "RAM_Used_MB": 4000, "RAM_Total_MB": 16000,
        }  # fmt: skip
        on_gpu = {
            "GPU_ID": 0, "GPU_Name": "Tesla P4", "GPU_Load": 0.9, "GPU_Used_Mem_MB": 5000,
            "GPU_Total_Mem_MB": 7680, "GPU_Temp_C": 60 + second, "Power_W": 70.5,
            "Others_Mem_MB": 600,
        }  # fmt: skip
        log.write(row | on_gpu if gpu else row)
    log.close()


def write_lab_log(folder: Path) -> None:
    """The lab's own file: eleven columns, one row a GPU at the end of each epoch."""
    lines = [",".join(LAB_GPU_COLUMNS)]
    for epoch in range(1, 6):
        for rank in range(2):
            lines += [
                f"2024-11-21 0{epoch}:12:4{rank},{rank},{epoch},713.2,{gpu},Tesla P4,88.0%,"
                f"2600.0,5080.0,7680.0,7{epoch}.0"
                for gpu in range(2)
            ]
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n2024-11-21 06:12")  # cut short
