"""Weather: fields as files have them, errors by area, and what is wrong with either."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from motley.comm.modes.numbers import EXACT
from motley.data.loader import Loader
from motley.data.source import UnreadableSample, first_batch, read
from motley.errors import MotleyError
from motley.plan.plan import Plan
from motley.tasks.aurora_model import as_batch, usual
from motley.tasks.builtin import get_task
from motley.tasks.builtin.weather import WeatherTask
from motley.tasks.check import check_task
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net
from motley.tasks.states import AIR, STATIC, SURFACE
from motley.train.command_line import read_config, training_parser

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"embed_dim": 64, "depths": (1, 1), "levels": (500, 850)}
WORDS = ("--task", "weather", "--embed-dim", "64", "--depths", "1,1", "--levels", "500,850")
ERA5 = {"2t": "t2m", "10u": "u10", "10v": "v10", "msl": "msl", "t": "temperature"}


def tiny(**more: Any) -> WeatherTask:
    return WeatherTask(**{**TINY, "grid": "9x16", "states": 24, **more})


def write_era5(folder: Path, change: Callable[[str, xr.Dataset], xr.Dataset]) -> tuple[str, ...]:
    """Made states as ERA5 writes them: from the south, from 180 degrees west, in three files.

    Args:
        change: one of these, by name.
    """
    made = tiny()
    grid, hours = made.source.grid, list(made.source.hours)
    surface, air = made.source.read(hours)
    east = np.where(grid.lon < 180, grid.lon, grid.lon - 360)
    place = {"latitude": grid.lat, "longitude": east}
    times = np.array(hours, dtype="datetime64[h]").astype("datetime64[ns]")
    flat, high = ("valid_time", "latitude", "longitude"), ("valid_time", "pressure_level")
    files = {
        "air": xr.Dataset(
            {ERA5.get(name, name): ((*high, *flat[1:]), air[:, n]) for n, name in enumerate(AIR)},
            {**place, "valid_time": times, "pressure_level": [500.0, 850.0]},
        ),
        "surface": xr.Dataset(
            {ERA5[name]: (flat, surface[:, n]) for n, name in enumerate(SURFACE)},
            {**place, "valid_time": times},
        ),
        "static": xr.Dataset(
            {name: (flat, made.source.static()[name][None]) for name in STATIC},
            {**place, "valid_time": times[:1]},
        ),
    }
    paths = []
    for name, file in files.items():
        paths.append(str(folder / f"{name}.nc"))
        change(name, file.sortby("latitude").sortby("longitude")).to_netcdf(paths[-1])
    return tuple(paths)


def test_files_are_read_as_what_was_written(tmp_path: Path) -> None:
    made, files = tiny(), WeatherTask(**TINY, fields=write_era5(tmp_path, lambda _, file: file))
    assert files.source.grid.text == made.source.grid.text == "9x16, 2 levels"
    for held_out in (False, True):
        ours, theirs = made.data(held_out), files.data(held_out)
        assert len(ours) == len(theirs) == (2 if held_out else 18)
        for index in (0, len(ours) - 1):
            for key, value in ours[index].items():
                assert np.array_equal(value, theirs[index][key]), key
            assert made.name_of(ours, index) == files.name_of(theirs, index)
    assert {k: v.tolist() for k, v in made.source.static().items()} == {
        k: v.tolist() for k, v in files.source.static().items()
    }
    assert made.identity() == files.identity() != tiny(states=25).identity()
    # A worker process opens files of its own.
    options = read_config(training_parser("t"), [*WORDS, "-j", "1", "--fields", *files.fields])
    task = get_task(options)
    _, parts = next(iter(Loader(task, options, 0, CPU).steps(0, 0, Plan(3, (1.0,), (3,), EXACT))))
    ((batch, _),) = parts
    expected = task.data(False)[batch.indices[0]]
    assert np.array_equal(batch.data["air"][0], expected["air"])


def test_made_fields_are_usual_and_none_that_is_held_out_is_trained_on() -> None:
    task = tiny(grid="17x32", states=200)
    surface, air = task.source.read(list(task.source.hours))
    mean, deviation = usual((500, 850)).air
    told = (air - mean[..., None, None]) / deviation[..., None, None]
    assert np.isfinite(surface).all() and 0.3 < told.std() < 2 and np.abs(told).max() < 4
    assert np.abs(np.diff(told, axis=0)).mean() > 0.02, "they move"
    training, held_out = task.data(False), task.data(True)
    hours = [
        {hour for index in range(len(part)) for hour in part.hours_at(index)}  # type: ignore[attr-defined]
        for part in (training, held_out)
    ]
    assert not hours[0] & hours[1] and len(held_out) == 19


def test_errors_count_by_area_and_by_their_usual_size() -> None:
    task = tiny()
    batch = first_batch(task, 2)[0].data

    def told(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[Any], Any]:
        """A net that tells what came, changed."""

        def net(_: Any) -> Any:
            given = (batch["surface"][:, 2, :, :8], batch["air"][:, 2, :, :, :8])
            surface, air = (change(each.double(), 1 + n)[:, None] for n, each in enumerate(given))
            return as_batch(surface, air, [0, 0], task._errors(batch).places, {}, (500, 850))

        return net

    exact = told(lambda each, _: each)
    assert task.losses(exact, batch).tolist() == [0, 0], "the ninth latitude is not told"

    # One row alone: 60 degrees north; 2t by 2 K there, t at 850 hPa by 1 K.
    def off(each: torch.Tensor, kind: int) -> torch.Tensor:
        each = each.clone()
        if kind == 1:
            each[:, 0, 1] += 2
        else:
            each[:, AIR.index("t"), 1, 1] -= 1
        return each

    lat = np.deg2rad(np.linspace(90, -90, 9)[:8])
    area = np.cos(lat)[1] / np.cos(lat).sum()
    scale, scale_air = usual((500, 850)).surface[1, 0], usual((500, 850)).air[1, 3, 1]
    expected = (0.25 * 3.0 * 2 * area / scale + 1.7 * area / scale_air / 2) / 9
    assert task.losses(told(off), batch).tolist() == pytest.approx([expected] * 2, rel=1e-4)
    scores = {name: float(value[0]) for name, value in task.scores(told(off), batch).items()}
    summary = task.summary(scores)
    assert summary["rmse_2t"] == pytest.approx(2 * area**0.5, rel=1e-4)
    assert summary["rmse_air_t"] == pytest.approx((area / 2) ** 0.5, rel=1e-4)
    assert summary["rmse_msl"] == summary["rmse_air_q"] == 0
    assert "off by 0.552 K at 2 m" in task.words(summary)
    table = task.predict(exact, batch)
    assert table["time"] == ["1970-01-01T12", "1970-01-01T18"] and table["rmse_2t"] == [0, 0]


def test_aurora_learns_in_16_bits_between_an_encoder_and_a_decoder_of_32() -> None:
    gradients = {}
    layers = "Basic3DEncoderLayer,Basic3DDecoderLayer"
    for precision, checkpointing in (("fp32", ""), ("fp32", layers), ("bf16", layers)):
        again = ["--grad-checkpointing", checkpointing] if checkpointing else []
        options = read_config(training_parser("t"), [*WORDS, *again])
        task = get_task(options)
        model = TaskModel(task, build_net(task, options), precision, CPU)
        seen: dict[str, torch.dtype] = {}
        for name, part in model.net.named_modules():
            if isinstance(part, torch.nn.Linear):
                part.register_forward_hook(
                    lambda _, __, made, name=name, seen=seen: seen.update({name: made.dtype})
                )
        check_task(model)
        model(model.example.data).sum().backward()
        half = {name.split(".")[0] for name, kind in seen.items() if kind == torch.bfloat16}
        assert half == ({"backbone"} if precision == "bf16" else set())
        grads = [p.grad.flatten() for p in model.net.parameters() if p.grad is not None]
        gradients[precision, checkpointing] = torch.cat(grads)
        noise = model.noise(3)
        assert torch.isfinite(model(noise)).all() and len(model(noise)) == 3
    whole, again, half_bits = gradients.values()
    assert torch.allclose(whole, again, rtol=1e-4, atol=1e-7)
    assert 0 < (whole - half_bits).norm() < 0.1 * whole.norm()
    assert next(iter(task.blocks(model.net))) == "backbone.encoder_layers.0"


def test_a_time_is_the_same_wherever_a_host_is(monkeypatch: pytest.MonkeyPatch) -> None:
    task = tiny()
    batch = first_batch(task, 1)[0].data
    places = task._errors(batch).places
    for zone in ("UTC", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        made = as_batch(batch["surface"], batch["air"], [438294], places, {}, (500, 850))
        assert made.metadata.time[0].timestamp() == 438294 * 3600
        assert made.metadata.time[0].isoformat().startswith("2020-01-01T06:00")


def _missing(name: str) -> Callable[[str, xr.Dataset], xr.Dataset]:
    return lambda _, file: file.drop_vars(name, errors="ignore")


def _celsius(_: str, file: xr.Dataset) -> xr.Dataset:
    return file.assign(t2m=file.t2m - 273.15) if "t2m" in file else file


def _coarse(name: str, file: xr.Dataset) -> xr.Dataset:
    return file.isel(latitude=slice(0, 8)) if name == "static" else file


def _late(name: str, file: xr.Dataset) -> xr.Dataset:
    later = file.valid_time + np.timedelta64(9000, "h")
    return file.assign_coords(valid_time=later) if name == "surface" else file


def _torn(_: str, file: xr.Dataset) -> xr.Dataset:
    return file.where(file.latitude < 80) if "lsm" in file else file


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_missing("t2m"), r"no file has 2t without levels \(also known as t2m, 2m_temp"),
        (_missing("q"), r"no file has q on pressure levels .*specific_humidity.*rename the"),
        (_missing("slt"), "no file has slt without levels"),
        (
            _celsius,
            r"mean of t2m in .*surface.nc is .*, and about 278.* is expected.*convert it to K",
        ),
        (
            _coarse,
            r"lsm of .*static.nc has the grid 8x16 .* z of .*air.nc has 9x16 points.*cdo remapbil",
        ),
        (_late, "no time is in all variables: z 24 from 1970-01-01T00 to"),
        (_torn, r"of .*static.nc, which is constant in time, has values that are NaN"),
    ],
    ids=["surface", "air", "static", "Celsius", "grid", "times", "NaN"],
)
def test_what_files_lack_is_named(
    tmp_path: Path, change: Callable[[str, xr.Dataset], xr.Dataset], says: str
) -> None:
    task = WeatherTask(**TINY, fields=write_era5(tmp_path, change))
    with pytest.raises(MotleyError, match=says):
        task.identity()


def test_a_level_that_is_not_there_and_what_is_no_number_are_named(tmp_path: Path) -> None:
    def torn(name: str, file: xr.Dataset) -> xr.Dataset:
        return file.where(file.valid_time != file.valid_time[3]) if name == "air" else file

    fields = write_era5(tmp_path, torn)
    with pytest.raises(MotleyError, match=r"of .*air.nc has no level of 250 hPa, only 500, 850"):
        WeatherTask(**{**TINY, "levels": (250,)}, fields=fields).data(False)
    source = WeatherTask(**TINY, fields=fields).data(False)
    read(source, 0)
    with pytest.raises(
        UnreadableSample, match=r"z of .*air.nc at 1970-01-01T18 has values that are NaN"
    ):
        read(source, 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"grid": "18x32"},
            "--grid 18x32 .* 4x4 points, as Aurora needs; it takes 16 or 17 latitudes and 32 long",
        ),
        ({"grid": "17x30"}, "--grid 17x30.* 16 or 17 latitudes and 32 longitudes"),
        ({"grid": "17"}, "--grid 17: give the numbers of latitudes and longitudes, as in 17x32"),
        ({"levels": (510,)}, "no pressure level of 510 hPa; give --levels out of 50,100,150"),
        (
            {"states": 5},
            "5 states, 6 hours apart.*make only 3 samples. A sample is 3 states.* need 6 of them",
        ),
        ({"embed_dim": 100}, "--embed-dim 100 is not a multiple of 64.*take 128"),
        ({"depths": (2,)}, "--depths 2: give the number of blocks of each stage, for two stages"),
        ({"latent_levels": 3}, "--latent-levels 3 is odd"),
        (
            {"fields": ("none.nc",)},
            "--fields none.nc: the file does not exist on this host, and every host",
        ),
        ({"fields": (__file__,)}, "test_weather.py cannot be read as NetCDF"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_said(options: dict[str, Any], says: str) -> None:
    task = tiny(**options)
    with pytest.raises(MotleyError, match=says):
        task.data(False)
        task.model()


@pytest.mark.parametrize(
    ("package", "says"),
    [
        ("aurora.normalisation", r"--task weather needs .*pip install microsoft-aurora"),
        ("xarray", r"--fields needs .*: .venv/bin/pip install xarray netCDF4"),
    ],
)
def test_what_is_not_installed_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, says: str
) -> None:
    fields = write_era5(tmp_path, lambda _, file: file) if package == "xarray" else ()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MotleyError, match=says):
        WeatherTask(**TINY, fields=fields).data(False)
