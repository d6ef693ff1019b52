"""Writes GPU logs as labs and other tools write them, each into a folder of its own."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

HEAD = (
    "Timestamp,Rank,Epoch,Computation_Time,GPU_ID,GPU_Name,GPU_Load,GPU_Free_Mem_MB,"
    "GPU_Used_Mem_MB,GPU_Total_Mem_MB,GPU_Temp_C"
)
BEGIN = datetime(2024, 3, 1, 10, 0, 0)
NVIDIA_SMI = (
    "timestamp, index, name, utilization.gpu [%], memory.used [MiB], memory.total [MiB], "
    "temperature.gpu"
)


def at(second: int) -> datetime:
    return BEGIN + timedelta(seconds=second)


def row(
    second: int = 0, load: str = "88.0%", temperature: str = "61.0", when: str = "",
    gpu: str = "0", used: str = "4000",
) -> str:  # fmt: skip
    return (
        f"{when or at(second).isoformat(' ')},0,{second // 10},0.5,{gpu},NVIDIA GeForce RTX 3070,"
        f"{load},4000,{used},8192,{temperature}"
    )


def make(folder: Path) -> None:
    """Write all logs under a folder."""

    def write(
        name: str, lines: Sequence[str], file: str = "metrics.csv", end: str = "\n",
        encoding: str = "utf-8",
    ) -> None:  # fmt: skip
        path = folder / name / file
        path.parent.mkdir(parents=True)
        path.write_bytes("".join(line + end for line in lines).encode(encoding))

    plain = [row(second) for second in range(20)]
    late = [row(second) for second in range(20, 40)]
    write("na", [HEAD, *(row(n, "[N/A]", "[N/A]") for n in range(60))])
    odd = (row(n, "ERR!" if n % 3 else "50.0%", "[Unknown Error]") for n in range(60))
    write("err", [HEAD, *odd])
    write("gaps", [HEAD, *plain, *(row(n) for n in range(4000, 4020))])
    write("nan", [HEAD, *(row(n, "nan", "nan", used="nan") for n in range(60))])
    write("comma", [HEAD, *(row(n, '"88,0%"', '"61,5"', used='"4000,5"') for n in range(60))])
    write("comma_plain", [HEAD, *(row(n, "88,0%", "61,5") for n in range(60))])
    write("semicolon", [line.replace(",", ";") for line in (HEAD, *plain)])
    write("dup_header", [HEAD, *plain, HEAD, *late])
    write("clock_1970", [HEAD, *(row(when=f"1970-01-01 00:00:0{n}") for n in range(5)), *plain])
    write("rows0", [HEAD])
    write("row1", [HEAD, row()])
    write("empty", [])
    write("mig", [HEAD, *(row(n, gpu=f"MIG-{part}") for n in range(20) for part in "abc")])
    write("many", [HEAD, *(row(n, gpu=str(gpu)) for n in range(20) for gpu in range(16))])
    write("bom", [HEAD, *plain], encoding="utf-8-sig")
    write("utf16", [HEAD, *plain], encoding="utf-16")
    write("crlf", [HEAD, *plain], end="\r\n")
    write("same_time", [HEAD, *[row()] * 20])
    write("iso", [HEAD, *(row(when=f"{at(n).isoformat()}+02:00") for n in range(20))])
    write("nul", [HEAD, *plain, "\0" * 200, *late])
    write("neg", [HEAD, *(row(n, "-1.0%", "-5") for n in range(20))])
    swapped = [",".join((rank, when, *rest)) for when, rank, *rest in
               (line.split(",") for line in (HEAD, *plain))]  # fmt: skip
    write("reordered", swapped)
    write("partial", [HEAD, *plain, row(20)[:40]])
    torn = folder / "partial" / "metrics.csv"
    torn.write_text(torn.read_text().rstrip("\n"))
    told = [f"2024/03/01 10:00:{n:02d}.123, 0, NVIDIA GeForce RTX 3070, 88 %, 4000 MiB, 8192 MiB, "
            "61" for n in range(20)]  # fmt: skip
    write("nvsmi", [NVIDIA_SMI, *told], "gpu.host.csv")
    names = "timestamp, name, index, utilization.gpu [%], power.draw [W]"
    write("nounits", [names, "2024/03/01 10:00:00.5, P4, 1, 88, 70.5"], "gpu.host.csv")
    write("german", ["Timestamp;Rank;GPU_ID;GPU_Load", "2024-03-01 10:00:00;0;0;88,5%"])
    write("tabs", ["Timestamp\tRank\tGPU_ID\tGPU_Load", "2024-03-01 10:00:00\t0\t0\t0.5"])
    write("us_time", ["Timestamp,Rank,GPU_ID,GPU_Load", "03/01/2024 10:00,0,0,0.5"])
