"""The weather task: Microsoft's Aurora forecasts ERA5's fields or synthetic fields."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from motley.config.option import Decides, option, positive, positives
from motley.errors import MotleyError
from motley.tasks.task import Net, Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from motley.data.source import Source, Tensors
    from motley.tasks.aurora_model import ForecastErrors, Shape
    from motley.tasks.states import Forecasts, Grid, States, Usual

MODEL, NUMBERS, SPEED = Decides.MODEL, Decides.NUMBERS, Decides.SPEED
_SIZES = {"small": (256, (2, 6, 2)), "full": (512, (6, 10, 8))}  # width, depths
_MADE_LEVELS = (100, 250, 500, 850)


@dataclass(frozen=True)
class WeatherTask(Task):
    """The task of predicting the state of the atmosphere from the two states before it.

    A batch has ``surface``, fp32 [n, 3, 4, lat, lon], and ``air``, fp32 [n, 3, 5, levels, lat,
    lon]. The second dimension holds two input states and the next state, in the units of ERA5. The
    third tensor, ``hour``, int64 [n], is the time of the second state in hours since 1970.

    If the number of latitudes is one more than a multiple of the patch, Aurora predicts one
    latitude less. The 721 latitudes of a grid of 0.25 degrees are an example.
    """

    noun = "forecast"
    unit = "forecasts"
    fp32 = ("encoder", "decoder")  # 16 bits are too few for a pressure in Pa; Aurora does the same
    block_classes = ("Basic3DEncoderLayer", "Basic3DDecoderLayer")

    aurora: str = option(
        "small (default, 113 M parameters) or full (1.3 G)",
        MODEL | SPEED,
        "small",
        choices=tuple(_SIZES),
    )
    fields: tuple[str, ...] = option(
        "NetCDF files with 2t 10u 10v msl, z u v t q on pressure levels, and z slt lsm, by these "
        "or ERA5's other names; the last tenth is held out. Default: synthetic waves",
        NUMBERS, (), metavar="FILE", several=True,
    )  # fmt: skip
    levels: tuple[int, ...] | None = option(
        "pressure levels in hPa; default: all levels of the files, or for synthetic fields "
        f"{','.join(map(str, _MADE_LEVELS))}",
        MODEL | SPEED, read=positives, metavar="L[,L...]",
    )  # fmt: skip
    hours: int = option(
        "hours from one state to the next, default 6", MODEL, 6, read=positive, metavar="H"
    )
    grid: str = option(
        "size of synthetic fields, latitudes x longitudes, default 17x32; 721x1440 is ERA5's size",
        MODEL | SPEED, "17x32", metavar="LATxLON",
    )  # fmt: skip
    states: int = option(
        "number of synthetic states, default 120", NUMBERS, 120, read=positive, metavar="N"
    )
    embed_dim: int | None = option(
        "embedding width of a patch, a multiple of 64; default: that of --aurora",
        MODEL | SPEED, read=positive, metavar="N",
    )  # fmt: skip
    depths: tuple[int, ...] | None = option(
        "number of blocks of each encoder stage; the decoder has the numbers in reverse order; "
        "default: those of --aurora",
        MODEL | SPEED, read=positives, metavar="N,N[,N...]",
    )  # fmt: skip
    latent_levels: int = option(
        "number of levels into which the backbone compresses the air, default 4",
        MODEL | SPEED,
        4,
        read=positive,
        metavar="N",
    )
    patch_size: int = option(
        "side of a patch, in points of the grid, default 4",
        MODEL | SPEED,
        4,
        read=positive,
        metavar="N",
    )

    @cached_property
    def shape(self) -> "Shape":
        """The sizes of the Aurora model."""
        from motley.tasks.aurora_model import Shape

        width, depths = _SIZES[self.aurora]
        return Shape(
            self.embed_dim or width, self.depths or depths, self.latent_levels, self.patch_size
        )

    @cached_property
    def source(self) -> "States":
        """The source of states: the files that ``--fields`` names, or synthetic states."""
        from motley.tasks.aurora_model import usual
        from motley.tasks.states import Files, Made, even_grid

        if not self.fields:
            levels = tuple(sorted(self.levels or _MADE_LEVELS))
            made = even_grid(self.grid, levels)
            _check_patches("--grid", made, self.patch_size)
            return Made(made, usual(levels), self.states, self.hours)
        files = Files(self.fields, self.levels)
        _check_patches("the grid of --fields,", files.grid, self.patch_size)
        files.check_units(usual(files.grid.levels))
        return files

    @cached_property
    def _usual(self) -> "Usual":
        from motley.tasks.aurora_model import usual

        return usual(self.source.grid.levels)

    @cached_property
    def _static(self) -> dict[str, Any]:
        return self.source.static()

    @cached_property
    def _samples(self) -> "tuple[Forecasts, Forecasts]":
        from motley.tasks.states import split

        return split(self.source, self.hours)

    def model(self) -> "nn.Module":
        """Return the network, on the CPU."""
        from motley.tasks.aurora_model import build

        _ = self.source  # report errors in the data first
        return build(self.shape, self.hours)

    def data(self, held_out: bool) -> "Source":
        """Return the training data or the held-out data."""
        return self._samples[held_out]

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """Return the tensors of one item of :meth:`data`, by name."""
        import torch

        return {
            "surface": torch.from_numpy(item["surface"]), "air": torch.from_numpy(item["air"]),
            "hour": torch.tensor(item["hour"]),
        }  # fmt: skip

    def name_of(self, source: "Source", index: int) -> str:
        """Return the name of a sample for an error message, with the times of its states."""
        from motley.tasks.states import Forecasts, format_time

        if not isinstance(source, Forecasts):
            return super().name_of(source, index)
        first, *_, last = map(format_time, source.hours_at(index))
        return f"{self.noun} of {first} to {last}"

    def _errors(self, batch: "Tensors") -> "ForecastErrors":
        """Return the object that computes errors on the batch's device."""
        from motley.tasks.aurora_model import ForecastErrors

        device = batch["surface"].device
        made: dict[torch.device, ForecastErrors] = self.__dict__.setdefault("_on_device", {})
        if device not in made:
            made[device] = ForecastErrors.on(
                device, self.source.grid, self._static, self._usual, self.patch_size
            )
        return made[device]

    def losses(self, net: Net, batch: "Tensors") -> "Tensor":
        """Return the mean absolute error of each sample, weighted by area, [n].

        The error of each variable is divided by its standard deviation, and multiplied by the
        weight of the variable. All samples cover the same area, so each sample has weight 1.
        """
        return self._errors(batch).losses(net, batch)

    def scores(self, net: Net, batch: "Tensors") -> "Mapping[str, Tensor]":
        """Return the loss and the squared error of each variable, by name, [n] each.

        The squared error of an atmospheric variable is averaged over all levels.
        """
        return self._errors(batch).scores(net, batch)

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the loss, and the root mean squared error of each variable in its own unit."""
        return {
            "loss": means["loss"],
            **{f"rmse_{name}": mean**0.5 for name, mean in means.items() if name != "loss"},
        }

    def words(self, metrics: Mapping[str, float]) -> str:
        """Return the metrics of :meth:`summary` as a text for the progress line."""
        return (
            f"loss {metrics['loss']:.4f}, off by {metrics['rmse_2t']:.3g} K at 2 m, "
            f"{metrics['rmse_msl'] / 100:.3g} hPa, {metrics['rmse_10u']:.3g} m/s of wind to the "
            "east"
        )

    def predict(self, net: Net, batch: "Tensors") -> Mapping[str, Sequence[Any]]:
        """Return the time and the errors of each forecast as the columns of a table."""
        from motley.tasks.states import format_time

        result = self.scores(net, batch)
        columns = {
            f"rmse_{name}": value.sqrt().tolist()
            for name, value in result.items()
            if name != "loss"
        }
        when = [format_time(hour + self.hours) for hour in batch["hour"].tolist()]
        return {"time": when, "loss": result["loss"].tolist(), **columns}

    def noise(self, example: "Tensors", count: int) -> "Tensors":
        """Return random values with the usual means and standard deviations, for timing."""
        return self._errors(example).noise(example, count)

    def identity(self) -> dict[str, Any]:
        """Return a hash of the grid, the times and the static fields, to compare data sets.

        The fields of each time are left out, because reading them all would take too long.
        """
        from motley.tasks.states import STATIC

        grid = self.source.grid
        digest = hashlib.sha256(json.dumps([*self.source.hours]).encode())
        for each in (grid.lat, grid.lon, *(self._static[name] for name in STATIC)):
            digest.update(each.tobytes())
        return {
            "field_grid": [len(grid.lat), len(grid.lon)], "field_levels": [*grid.levels],
            "fields_sha256": digest.hexdigest(),
        }  # fmt: skip

    def title(self) -> str:
        """Return one line that describes the task."""
        own = f"{self.shape.width} wide, {','.join(map(str, self.shape.depths))} blocks"
        kind = f"{self.aurora} Aurora" if not (self.embed_dim or self.depths) else f"Aurora, {own},"
        where = f"{len(self.fields)} files" if self.fields else "synthetic waves"
        return f"{kind} on {self.source.grid.text}, of {where}"


def _check_patches(what: str, grid: "Grid", patch: int) -> None:
    """Raise MotleyError if Aurora cannot cut a grid into patches.

    Aurora can leave out one latitude, but no longitude.
    """
    high, wide = len(grid.lat), len(grid.lon)
    if wide % patch or high % patch > 1 or high < patch:
        rows, columns = (max(1, round(points / patch)) * patch for points in (high, wide))
        raise MotleyError(
            f"{what} {high}x{wide} cannot be cut into patches of {patch}x{patch} points, as "
            f"Aurora needs; it takes {rows} or {rows + 1} latitudes and {columns} longitudes. "
            "Change the grid, or --patch-size"
        )


TASKS = (("weather", WeatherTask),)
