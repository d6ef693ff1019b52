"""A run's records as columns."""

from pathlib import Path

import pandas
import pytest
from small_runs import write_gpu_log, write_run

from motley import records
from motley.errors import MotleyError


@pytest.fixture
def run(tmp_path: Path) -> records.Run:
    folder = write_run(tmp_path / "run", known=False)
    write_gpu_log(folder, "a", gpu=True)
    write_gpu_log(folder, "b", gpu=False)
    folder.event("overflow", step=2, loss_scale=65536.0)
    folder.event("fault", step=7, rank=1, host="b", text="out of memory")
    with folder.step_file(1).open("a") as file:
        file.write('{"step": 60, "loss": "high", "lr": 1}\n{"step": ')
    return records.load(tmp_path / "run")


def test_each_row_is_in_its_columns_and_what_is_unknown_is_none(run: records.Run) -> None:
    steps = pandas.DataFrame(run.steps)
    assert len(steps) == 121 and list(steps["rank"].unique()) == [0, 1]
    assert set(steps[steps["rank"] == 1]["host"]) == {"b"}
    assert run.steps["t_wait"] == [None] * 121 and run.steps["grad_norm"][2] is None
    assert (run.steps["loss"][120], run.steps["lr"][120]) == (None, 1.0)
    assert pandas.DataFrame(run.epochs)["top1"].tolist() == [0.5, 0.6, 0.7]
    gpus = pandas.DataFrame(run.gpus)
    assert gpus[gpus["host"] == "b"]["temperature_c"].isna().all()
    assert gpus[gpus["host"] == "a"]["temperature_c"].tolist() == [60 + 2 * n for n in range(10)]
    assert run.events["event"] == ["overflow", "fault"]
    assert run.events["text"] == [None, "out of memory"]
    assert run.events["more"] == ['{"loss_scale": 65536.0}', None]
    assert repr(run).endswith("run, finished: 121 steps, 3 evaluations, 2 events, 20 GPU samples>")


def test_a_column_has_one_type_and_is_told_with_its_unit(run: records.Run) -> None:
    for columns in (run.steps, run.epochs, run.events, run.gpus):  # polars takes nothing else
        for name, values in columns.items():
            assert len({type(value) for value in values} - {type(None)}) <= 1, name
            assert f"``{name}``" in str(records.Run.__doc__)


def test_a_folder_of_runs_is_none(run: records.Run) -> None:
    with pytest.raises(
        MotleyError, match=f"holds 1 run; name one of them .newest first.: {run.path}"
    ):
        records.load(run.path.parent)
