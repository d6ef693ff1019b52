"""States of the air on a grid: what Aurora learns from. Made ones are here, those of files in
netcdf.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from motley.errors import MotleyError

Array = NDArray[np.float32]
SURFACE = ("2t", "10u", "10v", "msl")
STATIC = ("lsm", "z", "slt")
AIR = ("z", "u", "v", "t", "q")  # on pressure levels
UNITS = {"2t": "K", "10u": "m/s", "10v": "m/s", "msl": "Pa", "z": "m2/s2", "u": "m/s", "v": "m/s",
         "t": "K", "q": "kg/kg"}  # fmt: skip
INPUTS = 2  # states that the next one is told from
_WAVES = 3  # of each made field
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Grid:
    """Where the numbers of a field are.

    Attributes:
        lat: degrees, from north to south. lon: degrees from 0 to 360, rising. levels: hPa.
    """

    lat: Array
    lon: Array
    levels: tuple[int, ...]

    @property
    def text(self) -> str:
        """As in ``721x1440, 13 levels``."""
        return f"{len(self.lat)}x{len(self.lon)}, {len(self.levels)} levels"


@dataclass(frozen=True)
class Usual:
    """What is usual of each variable, to normalise with.

    Attributes:
        surface: mean and deviation, [2, 4]. air: of each level, [2, 5, levels].
    """

    surface: Array
    air: Array


class States(Protocol):
    """States by their time."""

    grid: Grid
    hours: Sequence[int]  # since 1970, UTC, rising

    def static(self) -> dict[str, Array]:
        """What does not change, [lat, lon] by name."""

    def read(self, hours: Sequence[int]) -> tuple[Array, Array]:
        """[times, 4, lat, lon] of :data:`SURFACE`, [times, 5, levels, lat, lon] of :data:`AIR`."""


class Made:
    """Smooth waves that travel east and west, the same on every machine; a state follows from the
    two before it.

    Args:
        usual: mean and deviation that the waves get. count: of states, six hours apart or ``step``.
    """

    def __init__(self, grid: Grid, usual: Usual, count: int, step: int) -> None:
        self.grid, self._usual = grid, usual
        self.hours: Sequence[int] = range(0, count * step, step)

    def static(self) -> dict[str, Array]:
        """See States."""
        height = self._waves(1000, 1, [0])[0, 0]
        return {
            "z": np.maximum(height, 0) * 2e4, "lsm": (height > 0).astype(np.float32),
            "slt": np.where(height > 0, 1 + np.floor(3 * height).clip(0, 6), 0).astype(np.float32),
        }  # fmt: skip

    def read(self, hours: Sequence[int]) -> tuple[Array, Array]:
        """See States."""
        high, wide = len(self.grid.lat), len(self.grid.lon)
        surface = self._waves(0, len(SURFACE), hours)
        _scale(surface, self._usual.surface)
        levels = len(self.grid.levels)
        air = self._waves(100, len(AIR) * levels, hours)
        air = air.reshape(len(hours), len(AIR), levels, high, wide)
        _scale(air, self._usual.air)
        return surface, air

    def _waves(self, first: int, count: int, hours: Sequence[int]) -> Array:
        """[hours, count, lat, lon], about -2 to 2; products of a profile in latitude and a wave in
        longitude, without random numbers, which numpy may draw otherwise tomorrow."""
        field, wave = np.ogrid[first : first + count, 0:_WAVES]
        dice = ((field * _WAVES + wave + 1) * _GOLDEN) % 1.0  # [count, waves]
        lat, lon = np.deg2rad(self.grid.lat, dtype=float), np.deg2rad(self.grid.lon, dtype=float)
        profile = np.cos(lat) * np.cos((wave + 1)[..., None] * lat + 7 * dice[..., None])
        speed = (dice - 0.5) / 12  # radians an hour
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
    """The whole globe, poles included, as ``LATxLON`` points.

    Raises:
        MotleyError: the text says something else.
    """
    words = text.lower().split("x")
    if len(words) != 2 or not all(word.isdecimal() and int(word) > 1 for word in words):
        raise MotleyError(f"--grid {text}: give latitudes x longitudes, as in 17x32")
    high, wide = map(int, words)
    lat = np.linspace(90, -90, high, dtype=np.float32)
    lon = np.arange(wide, dtype=np.float32) * np.float32(360 / wide)
    return Grid(lat, lon, levels)


class Forecasts:
    """Samples: two states and the one that follows, a step apart; lists of these by index.

    Args:
        starts: hours of their first states.
    """

    def __init__(self, states: States, starts: Sequence[int], step: int) -> None:
        self._states, self.starts, self._step = states, starts, step

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        hours = self.of(index)
        surface, air = self._states.read(hours)
        return {"surface": surface, "air": air, "hour": hours[INPUTS - 1]}

    def of(self, index: int) -> list[int]:
        """Hours of its states."""
        return [self.starts[index] + number * self._step for number in range(INPUTS + 1)]


def split(states: States, step: int) -> tuple[Forecasts, Forecasts]:
    """Samples to train with, and the last tenth, none of whose states is among the others'.

    Args:
        step: hours from one state to the next.

    Raises:
        MotleyError: there are too few.
    """
    known, length = set(states.hours), INPUTS * step
    starts = [hour for hour in states.hours if {hour + step, hour + length} <= known]
    held_out = starts[-max(1, len(starts) // 10) :]
    training = [hour for hour in starts if hour + length < held_out[0]] if held_out else []
    if not training:
        apart = np.diff(states.hours)
        said = f", {apart.min()} hours apart at least" if len(apart) else ""
        raise MotleyError(
            f"{len(states.hours)} states{said}, are {len(starts)} samples of {INPUTS + 1} states "
            f"{step} hours apart; {2 * INPUTS + 2} such states in a row are the fewest with which "
            "something is held out. Give more, or another --hours"
        )
    return Forecasts(states, training, step), Forecasts(states, held_out, step)
