"""GPU logs as labs and other tools write them: each is read, or its cause is named."""

import re
import runpy
from pathlib import Path

import pytest
from forked import run_script
from small_runs import write_run

from motley.errors import MotleyError
from motley.records.gpu_csv import GpuSample, find_gpu_logs, read_gpu_log

MAKE = Path(__file__).parent / "gpulogs" / "make.py"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("gpulogs")
    runpy.run_path(str(MAKE))["make"](folder)
    return folder


def _read(logs: Path, name: str, said: list[str] | None = None) -> list[GpuSample]:
    (log,) = find_gpu_logs([logs / name])
    return read_gpu_log(log, (said if said is not None else []).append)


@pytest.mark.parametrize(
    ("name", "count", "load", "temperature"),
    [
        ("na", 60, None, None), ("err", 60, 0.5, None), ("gaps", 40, 0.88, 61.0),
        ("nan", 60, None, None), ("comma", 60, 0.88, 61.5), ("semicolon", 20, 0.88, 61.0),
        ("dup_header", 40, 0.88, 61.0), ("partial", 20, 0.88, 61.0), ("row1", 1, 0.88, 61.0),
        ("mig", 60, 0.88, 61.0), ("many", 320, 0.88, 61.0), ("bom", 20, 0.88, 61.0),
        ("crlf", 20, 0.88, 61.0), ("same_time", 20, 0.88, 61.0), ("iso", 20, 0.88, 61.0),
        ("nul", 40, 0.88, 61.0), ("neg", 20, None, -5.0), ("reordered", 20, 0.88, 61.0),
        ("nvsmi", 20, 0.88, 61.0), ("nounits", 1, 0.88, None), ("german", 1, 0.885, None),
        ("tabs", 1, 0.5, None), ("utf16", 20, 0.88, 61.0),
    ],
)  # fmt: skip
def test_it_is_read(
    logs: Path, name: str, count: int, load: float | None, temperature: float | None
) -> None:
    said = list[str]()
    samples = _read(logs, name, said)
    assert (len(samples), said) == (count, [])
    first = samples[0]
    assert first.load == (None if load is None else pytest.approx(load))
    assert first.temperature_c == temperature and first.time > 1.7e9


def test_the_time_has_its_zone_and_the_host_its_name(logs: Path) -> None:
    assert _read(logs, "iso")[0].time == 1709280000.0
    assert _read(logs, "nvsmi")[0].host == "host"
    assert {sample.gpu for sample in _read(logs, "mig")} == {"MIG-a", "MIG-b", "MIG-c"}
    assert _read(logs, "nounits")[0].power_w == 70.5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("comma_plain", r"none of its 60 rows.*13 fields.*11.*line 2.*decimal comma"),
        ("us_time", r"none of its 1 rows.*'03/01/2024 10:00'.*write it as 2024-03-01 10:00:00"),
        ("empty", r"is empty"),
    ],
)
def test_the_cause_is_named(logs: Path, name: str, said: str) -> None:
    with pytest.raises(MotleyError, match=said):
        _read(logs, name)
    (log,) = find_gpu_logs([logs / name])
    done = run_script("plots/plot_gpu.py", log.parent)
    assert done.returncode == 2 and re.search(said, done.stderr), done.stderr


def test_who_watches_is_told_of_a_log_that_is_none(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.gpu_file("a").write_text("utilization\n88\n")
    done = run_script("plots/watch.py", run.path, "--once")
    assert "gpu.a.csv is not a GPU log" in done.stdout, done.stdout


def test_a_log_without_a_row_is_no_picture_and_a_word(logs: Path) -> None:
    assert _read(logs, "rows0") == []
    done = run_script("plots/plot_gpu.py", logs / "rows0")
    assert done.returncode == 2 and "holds no sample" in done.stderr, done.stderr


def test_a_clock_that_was_not_set_is_left_out_with_a_word(logs: Path) -> None:
    said = list[str]()
    samples = _read(logs, "clock_1970", said)
    assert len(samples) == 20
    (words,) = said
    assert "5 of its 25 rows" in words and "clock" in words and "line 2" in words
    done = run_script("plots/plot_gpu.py", logs / "clock_1970")
    assert done.returncode == 0 and done.stderr.count("clock was") == 1, done.stderr
