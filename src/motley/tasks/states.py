"""States of the atmosphere on a grid, from which Aurora learns: synthetic or from NetCDF files.

The files have the layout of ERA5's files. Each file may contain some of the variables at some of
the times.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from motley.data.source import UnreadableSample
from motley.errors import MotleyError
from motley.registry import import_extra
from motley.text import did_you_mean

Array = NDArray[np.float32]
SURFACE = ("2t", "10u", "10v", "msl")
STATIC = ("lsm", "z", "slt")
AIR = ("z", "u", "v", "t", "q")  # variables on pressure levels
UNITS = {"2t": "K", "10u": "m/s", "10v": "m/s", "msl": "Pa", "z": "m2/s2", "u": "m/s", "v": "m/s",
         "t": "K", "q": "kg/kg"}  # fmt: skip
INPUTS = 2  # states that the next one is predicted from
_WAVES = 3  # waves that are added up in each synthetic field
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Grid:
    """The points of the grid on which a field is given.

    Attributes:
        lat: latitudes in degrees, from north to south.
        lon: longitudes in degrees from 0 to 360, ascending.
        levels: pressure levels in hPa.
    """

    lat: Array
    lon: Array
    levels: tuple[int, ...]

    @property
    def text(self) -> str:
        """Size of the grid as text, such as ``721x1440, 13 levels``."""
        return f"{len(self.lat)}x{len(self.lon)}, {len(self.levels)} levels"


@dataclass(frozen=True)
class Usual:
    """Mean and standard deviation of each variable, for normalisation.

    Attributes:
        surface: means and standard deviations of the surface variables, [2, 4].
        air: means and standard deviations of the atmospheric variables on each level,
            [2, 5, levels].
    """

    surface: Array
    air: Array


class States(Protocol):
    """A source of states of the atmosphere, from which states are read by time."""

    grid: Grid
    hours: Sequence[int]  # hours since 1970 of all states, UTC, ascending

    def static(self) -> dict[str, Array]:
        """Return the constant fields, [lat, lon] by name."""

    def read(self, hours: Sequence[int]) -> tuple[Array, Array]:
        """Return the surface fields and the atmospheric fields at these hours.

        The shapes are [times, 4, lat, lon] and [times, 5, levels, lat, lon]. The variables are in
        the order of :data:`SURFACE` and :data:`AIR`.

        Args:
            hours: times in hours since 1970.
        """


class Made:
    """Synthetic states: smooth waves that travel east and west, equal on every host.

    Each state can be computed from the two states before it, so that a model can learn it.

    Args:
        grid: latitudes, longitudes and pressure levels.
        usual: mean and standard deviation of each variable.
        count: number of states.
        step: hours from one state to the next.
    """

    def __init__(self, grid: Grid, usual: Usual, count: int, step: int) -> None:
        self.grid, self._usual = grid, usual
        self.hours: Sequence[int] = range(0, count * step, step)

    def static(self) -> dict[str, Array]:
        """Return the constant fields, [lat, lon] by name."""
        height = self._waves(1000, 1, [0])[0, 0]
        return {
            "z": np.maximum(height, 0) * 2e4, "lsm": (height > 0).astype(np.float32),
            "slt": np.where(height > 0, 1 + np.floor(3 * height).clip(0, 6), 0).astype(np.float32),
        }  # fmt: skip

    def read(self, hours: Sequence[int]) -> tuple[Array, Array]:
        """Return the surface fields and the atmospheric fields at these hours."""
        high, wide = len(self.grid.lat), len(self.grid.lon)
        surface = self._waves(0, len(SURFACE), hours)
        _scale(surface, self._usual.surface)
        levels = len(self.grid.levels)
        air = self._waves(100, len(AIR) * levels, hours)
        air = air.reshape(len(hours), len(AIR), levels, high, wide)
        _scale(air, self._usual.air)
        return surface, air

    def _waves(self, first: int, count: int, hours: Sequence[int]) -> Array:
        """Return synthetic fields with values of about -2 to 2, [hours, count, lat, lon].

        Each field is a sum of waves. A wave is the product of a profile in latitude and a wave in
        longitude. Waves are not random, because versions of numpy may draw different numbers.
        """
        field, wave = np.ogrid[first : first + count, 0:_WAVES]
        dice = ((field * _WAVES + wave + 1) * _GOLDEN) % 1.0  # [count, waves]
        lat, lon = np.deg2rad(self.grid.lat, dtype=float), np.deg2rad(self.grid.lon, dtype=float)
        profile = np.cos(lat) * np.cos((wave + 1)[..., None] * lat + 7 * dice[..., None])
        speed = (dice - 0.5) / 12  # radians per hour
        when = np.asarray(hours, dtype=float)[:, None, None]
        phase = (2 * np.pi * dice - speed * when)[..., None]  # [hours, count, waves, 1]
        waves = np.cos((wave + 1)[..., None] * lon + phase)
        made: Array = profile.swapaxes(-1, -2).astype(np.float32) @ waves.astype(np.float32)
        return made


def _scale(fields: Array, usual: Array) -> None:
    mean, deviation = usual[..., None, None]
    fields *= deviation
    fields += mean


def even_grid(text: str, levels: tuple[int, ...]) -> Grid:
    """Return an even grid of the whole globe, poles included, for text such as ``17x32``.

    Args:
        text: numbers of latitudes and longitudes, as ``LATxLON``.
        levels: pressure levels in hPa.

    Raises:
        MotleyError: the text is not two numbers above 1.
    """
    words = text.lower().split("x")
    if len(words) != 2 or not all(word.isdecimal() and int(word) > 1 for word in words):
        raise MotleyError(
            f"--grid {text}: give the numbers of latitudes and longitudes, as in 17x32"
        )
    high, wide = map(int, words)
    lat = np.linspace(90, -90, high, dtype=np.float32)
    lon = np.arange(wide, dtype=np.float32) * np.float32(360 / wide)
    return Grid(lat, lon, levels)


class Forecasts:
    """Training samples or held-out samples, by index.

    A sample has two input states and the state that follows them. The three states are ``step``
    hours apart.

    Args:
        states: source of the states.
        starts: hour of the first state of each sample.
        step: hours from one state to the next.
    """

    def __init__(self, states: States, starts: Sequence[int], step: int) -> None:
        self._states, self.starts, self._step = states, starts, step

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        hours = self.hours_at(index)
        surface, air = self._states.read(hours)
        return {"surface": surface, "air": air, "hour": hours[INPUTS - 1]}

    def hours_at(self, index: int) -> list[int]:
        """Return the times of the states of one sample, in hours since 1970."""
        return [self.starts[index] + number * self._step for number in range(INPUTS + 1)]


def split(states: States, step: int) -> tuple[Forecasts, Forecasts]:
    """Return the training samples and the held-out samples, which are the last tenth.

    No state is part of both.

    Args:
        states: source of the states.
        step: hours from one state to the next.

    Raises:
        MotleyError: the source has too few states.
    """
    known, length = set(states.hours), INPUTS * step
    starts = [hour for hour in states.hours if {hour + step, hour + length} <= known]
    held_out = starts[-max(1, len(starts) // 10) :]
    training = [hour for hour in starts if hour + length < held_out[0]] if held_out else []
    if not training:
        apart = np.diff(states.hours)
        text = f", {apart.min()} hours apart at least" if len(apart) else ""
        raise MotleyError(
            f"{len(states.hours)} states{text} make only {len(starts)} samples. A sample is "
            f"{INPUTS + 1} states, each {step} hours after the one before, and one sample to "
            f"train with and one to hold out need {2 * INPUTS + 2} of them in a row. Give more "
            "states, or another --hours"
        )
    return Forecasts(states, training, step), Forecasts(states, held_out, step)


_PACKAGES = "xarray netCDF4"
# Names of ECMWF, of its NetCDF files, and of WeatherBench.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "2t": ("2t", "t2m", "2m_temperature"),
    "10u": ("10u", "u10", "10m_u_component_of_wind"),
    "10v": ("10v", "v10", "10m_v_component_of_wind"),
    "msl": ("msl", "mean_sea_level_pressure"),
    "lsm": ("lsm", "land_sea_mask"),
    "slt": ("slt", "soil_type"),
    "z": ("z", "geopotential", "geopotential_at_surface"),
    "u": ("u", "u_component_of_wind"),
    "v": ("v", "v_component_of_wind"),
    "t": ("t", "temperature"),
    "q": ("q", "specific_humidity"),
}
_TIME, _LEVEL = ("time", "valid_time"), ("level", "pressure_level", "isobaricInhPa", "plev")
_LAT, _LON = ("latitude", "lat"), ("longitude", "lon")
_FAR = 8.0  # a mean this many deviations off must be in another unit


@dataclass(frozen=True)
class _Variable:
    """A variable of the files, with the file and index at which each of its times is stored.

    Attributes:
        name: name of the variable in its files.
        places: for each time, the path of the file and the index of the time in the file. The keys
            are hours since 1970. The only key of a static variable is 0.
        levels: pressure levels of each file in hPa, in the file's order, by the path of the file.
    """

    name: str
    places: dict[int, tuple[str, int]]
    levels: dict[str, tuple[int, ...]]


class Files:
    """States of the atmosphere in NetCDF files.

    Files are opened anew for each sample, because an open file must not be shared with a worker
    process.

    Args:
        paths: paths of the files.
        levels: pressure levels to read, hPa; None: all levels in the files.

    Raises:
        MotleyError: a file cannot be read, or a variable that Aurora needs is in no file.
    """

    def __init__(self, paths: Sequence[str], levels: tuple[int, ...] | None) -> None:
        self._paths = paths
        self._air: dict[str, _Variable] = {}
        self._flat: dict[str, _Variable] = {}
        self._lat = self._lon = np.empty(0)  # grid of the first variable
        self._first = ""
        self._seen: dict[str, str] = {}  # name of every variable, and a file that has it
        for path in paths:
            self._add(path)
        for name in AIR:
            self._need(name, self._air, "on pressure levels")
        for name in (*SURFACE, *STATIC):
            self._need(name, self._flat, "without levels")
        moving = [self._air[name] for name in AIR] + [self._flat[name] for name in SURFACE]
        result = sorted(set.intersection(*({*each.places} for each in moving)))
        self.hours: Sequence[int] = result
        if not result:
            times = "; ".join(f"{each.name} {_span(each.places)}" for each in moving)
            raise MotleyError(f"--fields: no time is in all variables: {times}")
        self.grid = Grid(*self._points(), self._levels(levels))

    def static(self) -> dict[str, Array]:
        """Return the constant fields, [lat, lon] by name."""
        result = {}
        for name in STATIC:
            variable = self._flat[name]
            path, position = next(iter(variable.places.values()))
            with _opened(path) as file:
                result[name] = self._values(file, path, variable, position, None)
            if not np.isfinite(result[name]).all():
                raise MotleyError(
                    f"--fields: {variable.name} of {path}, which is constant in time, has values "
                    "that are NaN; fill them, as with 0 over the sea"
                )
        return result

    def read(self, hours: Sequence[int]) -> tuple[Array, Array]:
        """Return the surface fields and the atmospheric fields at these hours.

        Raises:
            UnreadableSample: a value is NaN or infinite.
        """
        shape = len(self.grid.lat), len(self.grid.lon)
        surface = np.empty((len(hours), len(SURFACE), *shape), dtype=np.float32)
        air = np.empty((len(hours), len(AIR), len(self.grid.levels), *shape), dtype=np.float32)
        kinds: list[tuple[_Variable, Array, tuple[int, ...] | None]] = [
            (self._flat[name], surface[:, n], None) for n, name in enumerate(SURFACE)
        ]
        kinds += [(self._air[name], air[:, n], self.grid.levels) for n, name in enumerate(AIR)]
        wanted: dict[str, list[tuple[_Variable, Array, Any, int, int]]] = {}
        for variable, into, levels in kinds:
            for row, hour in enumerate(hours):
                path, position = variable.places[hour]
                each = (variable, into[row], levels, position, hour)
                wanted.setdefault(path, []).append(each)
        for path, parts in wanted.items():
            with _opened(path) as file:
                for variable, into, levels, position, hour in parts:
                    into[:] = self._values(file, path, variable, position, levels)
                    if not np.isfinite(into).all():
                        raise UnreadableSample(
                            f"{variable.name} of {path} at {format_time(hour)} has values that "
                            "are NaN"
                        )
        return surface, air

    def check_units(self, usual: Usual) -> None:
        """Raise MotleyError if the unit of a variable differs from the unit that Aurora uses.

        The mean of the variable in the first state shows the unit.

        Args:
            usual: mean and standard deviation of each variable.
        """
        surface, air = self.read(self.hours[:1])
        for name, variable, values, (mean, deviation) in (
            *((name, self._flat[name], surface[0, n], usual.surface[:, n])
              for n, name in enumerate(SURFACE)),
            *((name, self._air[name], air[0, n, 0], usual.air[:, n, 0])
              for n, name in enumerate(AIR)),
        ):  # fmt: skip
            if abs(float(values.mean()) - mean) > _FAR * deviation:
                raise MotleyError(
                    f"--fields: the mean of {variable.name} in {self._seen[variable.name]} is "
                    f"{values.mean():.4g}, and about {mean:.4g} is expected, so the variable "
                    f"seems to have another unit; convert it to {UNITS[name]}"
                )

    def _add(self, path: str) -> None:
        with _opened(path) as file:
            for name, variable in file.data_vars.items():
                self._seen.setdefault(name, path)
                own = next((own for own, names in _NAMES.items() if name in names), None)
                if own is None:
                    continue
                self._check_grid(path, name, variable)
                time, level = (_dimension(variable, names) for names in (_TIME, _LEVEL))
                kinds = self._flat if level is None else self._air
                known = kinds.setdefault(own, _Variable(name, {}, {}))
                if known.name != name:
                    raise MotleyError(
                        f"--fields: {name} of {path} is the same variable as {known.name} of "
                        "another file; rename one of them, or leave it out"
                    )
                hours = [0] if time is None else _hours(path, file[time])
                known.places.update({hour: (path, n) for n, hour in enumerate(hours)})
                if level is not None:
                    known.levels[path] = _hectopascals(file[level])

    def _check_grid(self, path: str, name: str, variable: Any) -> None:
        """Raise MotleyError if a variable is on another grid than the first variable."""
        own = [_dimension(variable, names) for names in (_LAT, _LON)]
        if None in own:
            raise MotleyError(
                f"--fields: {name} of {path} has the dimensions {', '.join(variable.dims)}, and "
                "Aurora needs a grid of latitude and longitude. Regrid it, as with cdo remapbil"
            )
        lat, lon = (np.asarray(variable[each], dtype=np.float64) for each in own)
        if not self._first:
            self._lat, self._lon, self._first = lat, lon, f"{name} of {path}"
        same = lat.shape == self._lat.shape and lon.shape == self._lon.shape
        if not (same and np.allclose(lat, self._lat) and np.allclose(lon, self._lon)):
            raise MotleyError(
                f"--fields: {name} of {path} has the grid {_grid(lat, lon)}, and {self._first} "
                f"has {_grid(self._lat, self._lon)}; regrid one of them, as with cdo remapbil"
            )

    def _points(self) -> tuple[Array, Array]:
        """Return the latitudes from north to south, and the longitudes from 0 in ascending order.

        The order in the files may be different.

        Raises:
            MotleyError: a longitude occurs twice.
        """
        lon = self._lon % 360.0
        self._order = np.argsort(-self._lat, kind="stable"), np.argsort(lon, kind="stable")
        rows, columns = self._order
        lon = lon[columns]
        if len(np.unique(lon)) < len(lon):
            raise MotleyError(
                f"--fields: the first and the last longitude of {self._first} are the same "
                f"({_grid(self._lat, self._lon)}); remove the last one, as with ncks -d "
                "longitude,0,-2"
            )
        return self._lat[rows].astype(np.float32), lon.astype(np.float32)

    def _levels(self, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the pressure levels to read in hPa, in ascending order.

        Args:
            wanted: the levels that the user chose. None: return all levels that every variable has
                in every file.

        Raises:
            MotleyError: a variable lacks a wanted level in a file.
        """
        every = [(name, path, has) for name in AIR for path, has in self._air[name].levels.items()]
        if wanted is None:
            return tuple(sorted(set.intersection(*(set(has) for *_, has in every))))
        for name, path, has in every:
            if missing := [level for level in wanted if level not in has]:
                raise MotleyError(
                    f"--fields: {self._air[name].name} of {path} has no level of {missing[0]} "
                    f"hPa, only {', '.join(map(str, has))}; change --levels, or add a file that "
                    "has the level"
                )
        return tuple(sorted(wanted))

    def _need(self, name: str, found: Collection[str], where: str) -> None:
        if name not in found:
            others = ", ".join(_NAMES[name][1:])
            has = ", ".join(self._seen) or "nothing"
            raise MotleyError(
                f"--fields: no file has {name} {where} (also known as "
                f"{others}){did_you_mean(name, self._seen)}; the files have {has}. Add the file "
                f"that has it, or rename the variable, as with ncrename -v OLD,{name}"
            )

    def _values(
        self, file: Any, path: str, variable: _Variable, position: int, levels: Any
    ) -> Array:
        """Return one variable at one time, fp32 [lat, lon] or [levels, lat, lon].

        Args:
            file: the open file.
            path: path of the file.
            variable: the variable.
            position: index of the time in the file.
            levels: pressure levels in hPa; ignored for a variable without levels.

        Raises:
            MotleyError: the variable has a dimension besides time, level, latitude and longitude.
        """
        array = file[variable.name]
        time, level, *place = (
            _dimension(array, names) for names in (_TIME, _LEVEL, _LAT, _LON)
        )  # fmt: skip
        if time is not None:
            array = array.isel({time: position})
        if level is not None:
            has = variable.levels[path]
            array = array.isel({level: [has.index(each) for each in levels]})
            place = [level, *place]
        for name in [name for name in array.dims if name not in place]:
            if array.sizes[name] > 1:
                raise MotleyError(
                    f"--fields: {variable.name} of {path} has a dimension {name} of size "
                    f"{array.sizes[name]}, which Aurora does not take; keep one index, as with "
                    f"ncks -d {name},0"
                )
            array = array.isel({name: 0})
        values = np.asarray(array.transpose(*place).values, dtype=np.float32)
        rows, columns = self._order
        for axis, order in ((-2, rows), (-1, columns)):
            if (np.diff(order) != 1).any():
                values = values.take(order, axis)
        return values


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open a NetCDF file for a ``with`` block, and close the file at the end of the block.

    Raises:
        MotleyError: the file is missing, or cannot be read.
    """
    xarray = import_extra("xarray", "--fields", _PACKAGES)
    if not Path(path).is_file():
        raise MotleyError(
            f"--fields {path}: the file does not exist on this host, and every host reads it"
        )
    try:
        file = xarray.open_dataset(path, cache=False)
    except (OSError, ValueError, RuntimeError) as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MotleyError(
            f"--fields {path} cannot be read as NetCDF: {text}. Check that the file is complete. "
            f"NetCDF 4 needs: .venv/bin/pip install {_PACKAGES}"
        ) from None
    with file:
        yield file


def _dimension(variable: Any, names: Sequence[str]) -> str | None:
    """Return the variable's dimension that has one of these names, or None."""
    return next((str(name) for name in variable.dims if name in names), None)


def _hours(path: str, times: Any) -> list[int]:
    """Return the times of a file in hours since 1970.

    Raises:
        MotleyError: xarray does not decode ``times`` as times.
    """
    if times.dtype.kind != "M":
        raise MotleyError(
            f"--fields {path}: {times.name} is not a time that xarray can read ({times.dtype}); "
            'give it units, as in "hours since 1900-01-01"'
        )
    result: list[int] = times.values.astype("datetime64[h]").astype(int).tolist()
    return result


def _hectopascals(level: Any) -> tuple[int, ...]:
    """Return the pressure levels of a file in hPa. In the file, the unit may be Pa."""
    values = np.asarray(level.values, dtype=float)
    return tuple(round(value) for value in values / (100 if values.max() > 2000 else 1))


def format_time(hour: int) -> str:
    """Return a time as text, such as ``2024-05-01T06``.

    Args:
        hour: hours since 1970, UTC.
    """
    return str(np.datetime64(hour, "h"))


def _span(hours: Collection[int]) -> str:
    return f"{len(hours)} from {format_time(min(hours))} to {format_time(max(hours))}"


def _grid(lat: NDArray[Any], lon: NDArray[Any]) -> str:
    return f"{len(lat)}x{len(lon)} points from {lat[0]:g}, {lon[0]:g} to {lat[-1]:g}, {lon[-1]:g}"
