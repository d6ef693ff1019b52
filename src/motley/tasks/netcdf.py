"""States of the air in NetCDF files, as ERA5's are: any number of files, each with some variables
at some times."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motley.data.source import UnreadableSample
from motley.errors import MotleyError
from motley.extras import import_extra
from motley.tasks.states import AIR, STATIC, SURFACE, UNITS, Array, Grid, Usual
from motley.text import did_you_mean

_PACKAGES = "xarray netCDF4"
_NAMES: Mapping[str, tuple[str, ...]] = {  # of ECMWF, of its NetCDF files, of WeatherBench
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
_FAR = 8.0  # deviations from the usual mean that only another unit explains


@dataclass(frozen=True)
class _Variable:
    """Where a variable is.

    Attributes:
        name: in its files. places: file and position by hour; of a static one by 0.
        levels: as its files have them, by file.
    """

    name: str
    places: dict[int, tuple[str, int]]
    levels: dict[str, tuple[int, ...]]


class Files:
    """States of the air in NetCDF files.

    Files are opened for each sample: an open one must not be shared with a worker process.

    Args:
        levels: those that are wanted, hPa; None: all that the files have.

    Raises:
        MotleyError: a file cannot be read, or what Aurora needs is not in any.
    """

    def __init__(self, paths: Sequence[str], levels: tuple[int, ...] | None) -> None:
        self._paths = paths
        self._air: dict[str, _Variable] = {}
        self._flat: dict[str, _Variable] = {}
        self._lat = self._lon = np.empty(0)  # of the first variable
        self._first = ""
        self._seen: dict[str, str] = {}  # every variable, and a file that it is in
        for path in paths:
            self._add(path)
        for name in AIR:
            self._need(name, self._air, "on pressure levels")
        for name in (*SURFACE, *STATIC):
            self._need(name, self._flat, "without levels")
        moving = [self._air[name] for name in AIR] + [self._flat[name] for name in SURFACE]
        found = sorted(set.intersection(*({*each.places} for each in moving)))
        self.hours: Sequence[int] = found
        if not found:
            times = "; ".join(f"{each.name} {_span(each.places)}" for each in moving)
            raise MotleyError(f"--fields: there is no time that all variables have: {times}")
        self.grid = Grid(*self._points(), self._levels(levels))

    def static(self) -> dict[str, Array]:
        """See States."""
        found = {}
        for name in STATIC:
            variable = self._flat[name]
            path, position = next(iter(variable.places.values()))
            with _opened(path) as file:
                found[name] = self._values(file, path, variable, position, None)
            if not np.isfinite(found[name]).all():
                raise MotleyError(
                    f"--fields: {variable.name} of {path}, which does not change, has values that "
                    "are no numbers (NaN); fill them, as with 0 over the sea"
                )
        return found

    def read(self, hours: Sequence[int]) -> tuple[Array, Array]:
        """See States.

        Raises:
            UnreadableSample: something in it is no number.
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
                            f"{variable.name} of {path} at {time_of(hour)} has values that are no "
                            "numbers (NaN)"
                        )
        return surface, air

    def check_units(self, usual: Usual) -> None:
        """MotleyError if the first state can only be in other units than Aurora's."""
        surface, air = self.read(self.hours[:1])
        for name, variable, values, (mean, deviation) in (
            *((name, self._flat[name], surface[0, n], usual.surface[:, n])
              for n, name in enumerate(SURFACE)),
            *((name, self._air[name], air[0, n, 0], usual.air[:, n, 0])
              for n, name in enumerate(AIR)),
        ):  # fmt: skip
            if abs(float(values.mean()) - mean) > _FAR * deviation:
                raise MotleyError(
                    f"--fields: {variable.name} of {self._seen[variable.name]} is "
                    f"{values.mean():.4g} on average, and usual is {mean:.4g}; Aurora takes "
                    f"{UNITS[name]}"
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
                        f"--fields: {path} has {name}, and {known.name} of another file is the "
                        "same; rename one, or leave it out"
                    )
                hours = [0] if time is None else _hours(path, file[time])
                known.places.update({hour: (path, n) for n, hour in enumerate(hours)})
                if level is not None:
                    known.levels[path] = _hectopascals(file[level])

    def _check_grid(self, path: str, name: str, variable: Any) -> None:
        """All variables are on one grid."""
        own = [_dimension(variable, names) for names in (_LAT, _LON)]
        if None in own:
            raise MotleyError(
                f"--fields: {name} of {path} has the dimensions {', '.join(variable.dims)}; "
                "Aurora takes a grid of latitude and longitude. Regrid it, as with cdo remapbil"
            )
        lat, lon = (np.asarray(variable[each], dtype=np.float64) for each in own)
        if not self._first:
            self._lat, self._lon, self._first = lat, lon, f"{name} of {path}"
        same = lat.shape == self._lat.shape and lon.shape == self._lon.shape
        if not (same and np.allclose(lat, self._lat) and np.allclose(lon, self._lon)):
            raise MotleyError(
                f"--fields: {name} of {path} is on {_grid(lat, lon)}, and {self._first} on "
                f"{_grid(self._lat, self._lon)}; bring them to one, as with cdo remapbil"
            )

    def _points(self) -> tuple[Array, Array]:
        """Latitudes from the north, longitudes from Greenwich, whatever the files have."""
        lon = self._lon % 360.0
        self._order = np.argsort(-self._lat, kind="stable"), np.argsort(lon, kind="stable")
        rows, columns = self._order
        lon = lon[columns]
        if len(np.unique(lon)) < len(lon):
            raise MotleyError(
                f"--fields: {self._first} has a longitude twice, {_grid(self._lat, self._lon)}; "
                "leave out the last, as with ncks -d longitude,0,-2"
            )
        return self._lat[rows].astype(np.float32), lon.astype(np.float32)

    def _levels(self, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
        """Those that are wanted, or all; every variable has them, everywhere."""
        every = [(name, path, has) for name in AIR for path, has in self._air[name].levels.items()]
        if wanted is None:
            return tuple(sorted(set.intersection(*(set(has) for *_, has in every))))
        for name, path, has in every:
            if missing := [level for level in wanted if level not in has]:
                raise MotleyError(
                    f"--fields: {self._air[name].name} of {path} has no level of {missing[0]} hPa, "
                    f"but {', '.join(map(str, has))}; change --levels, or add a file with it"
                )
        return tuple(sorted(wanted))

    def _need(self, name: str, found: Collection[str], where: str) -> None:
        if name not in found:
            others = ", ".join(_NAMES[name][1:])
            has = ", ".join(self._seen) or "nothing"
            raise MotleyError(
                f"--fields: no file has {name} {where} (or by another name: {others})"
                f"{did_you_mean(name, self._seen)}; there is {has}. Add the file that has it, or "
                f"rename it, as with ncrename -v OLD,{name}"
            )

    def _values(
        self, file: Any, path: str, variable: _Variable, position: int, levels: Any
    ) -> Array:
        """[lat, lon], or [levels, lat, lon]."""
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
                    f"--fields: {variable.name} of {path} has a dimension {name} of "
                    f"{array.sizes[name]}; keep one, as with ncks -d {name},0"
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
    """A file; MotleyError where it cannot be."""
    xarray = import_extra("xarray", "--fields", _PACKAGES)
    if not Path(path).is_file():
        raise MotleyError(f"--fields {path}: there is no such file here; every host reads it")
    try:
        file = xarray.open_dataset(path, cache=False)
    except (OSError, ValueError, RuntimeError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MotleyError(
            f"--fields {path} is no NetCDF file that can be read here: {said}. Is it whole? "
            f"NetCDF 4 needs: .venv/bin/pip install {_PACKAGES}"
        ) from None
    with file:
        yield file


def _dimension(variable: Any, names: Sequence[str]) -> str | None:
    """Which of the variable's dimensions is called so."""
    return next((str(name) for name in variable.dims if name in names), None)


def _hours(path: str, times: Any) -> list[int]:
    """Since 1970; MotleyError of what is no time."""
    if times.dtype.kind != "M":
        raise MotleyError(
            f"--fields {path}: {times.name} is no time that xarray can read ({times.dtype}); give "
            'it units, as in "hours since 1900-01-01"'
        )
    found: list[int] = times.values.astype("datetime64[h]").astype(int).tolist()
    return found


def _hectopascals(level: Any) -> tuple[int, ...]:
    """Levels as a file has them; some have them in Pa."""
    values = np.asarray(level.values, dtype=float)
    return tuple(round(value) for value in values / (100 if values.max() > 2000 else 1))


def time_of(hour: int) -> str:
    """As in 2024-05-01T06."""
    return str(np.datetime64(hour, "h"))


def _span(hours: Collection[int]) -> str:
    return f"{len(hours)} from {time_of(min(hours))} to {time_of(max(hours))}"


def _grid(lat: NDArray[Any], lon: NDArray[Any]) -> str:
    return f"{len(lat)}x{len(lon)} points from {lat[0]:g}, {lon[0]:g} to {lat[-1]:g}, {lon[-1]:g}"
