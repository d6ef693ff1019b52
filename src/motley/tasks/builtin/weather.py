"""Weather some hours ahead: Microsoft's Aurora, on fields of ERA5 or on made ones."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motley.config.option import Decides, option, positive, positives
from motley.data.source import Source, Tensors
from motley.errors import MotleyError
from motley.registry import import_extra
from motley.tasks.states import (
    AIR,
    INPUTS,
    STATIC,
    SURFACE,
    Files,
    Forecasts,
    Grid,
    Made,
    States,
    Usual,
    even_grid,
    split,
    time_of,
)
from motley.tasks.task import Net, Task

_HEAD = 64  # numbers of a head of the backbone's attention; 32 of the encoder's and decoder's
_PLACES = {"small": (256, (2, 6, 2)), "full": (512, (6, 10, 8))}  # width, depths
SIZES = tuple(_PLACES)


@dataclass(frozen=True)
class Shape:
    """Of an Aurora; the usual ones are those of its makers.

    Attributes:
        width: of a patch. depths: blocks of the encoder's stages; the decoder's are the reverse.
        levels: latent ones. patch: degrees of the grid a side.
    """

    width: int
    depths: tuple[int, ...]
    levels: int = 4
    patch: int = 4

    def __post_init__(self) -> None:
        if self.width % _HEAD:
            raise MotleyError(
                f"--embed-dim {self.width} is no multiple of {_HEAD}, the width of a head; take "
                f"{max(1, round(self.width / _HEAD)) * _HEAD}"
            )
        if len(self.depths) < 2:
            raise MotleyError(
                f"--depths {','.join(map(str, self.depths))}: give the blocks of two stages or "
                "more, as in 2,6,2"
            )
        if self.levels % 2:
            raise MotleyError(
                f"--latent-levels {self.levels} is odd; the backbone's windows are two levels high"
            )


def shape_of(size: str, width: int | None, depths: tuple[int, ...] | None, **more: int) -> Shape:
    """The makers' shape of this size, but for what is given."""
    usual_width, usual_depths = _PLACES[size]
    return Shape(width or usual_width, depths or usual_depths, **more)


def aurora() -> Any:
    """The package.

    Raises:
        MotleyError: it is not installed.
    """
    import_extra("aurora.normalisation", "--task weather", "microsoft-aurora")
    return import_extra("aurora", "--task weather", "microsoft-aurora")


def build(shape: Shape, step: int) -> nn.Module:
    """An Aurora with new weights.

    No LoRA, which is for roll-outs of a trained one; nor Aurora's own autocast: which parts compute
    in 16 bits is the task's to say.

    Args:
        step: hours that it looks ahead.
    """
    heads = tuple(shape.width // _HEAD * 2**stage for stage in range(len(shape.depths)))
    net: nn.Module = aurora().Aurora(
        surf_vars=SURFACE, atmos_vars=AIR, use_lora=False, timestep=timedelta(hours=step),
        embed_dim=shape.width, num_heads=2 * heads[0], latent_levels=shape.levels,
        patch_size=shape.patch, encoder_depths=shape.depths, encoder_num_heads=heads,
        decoder_depths=shape.depths[::-1], decoder_num_heads=heads[::-1],
    )  # fmt: skip
    return net


def known_levels() -> tuple[int, ...]:
    """Those that Aurora has means and deviations of, hPa."""
    names = aurora().normalisation.locations
    numbers = (name.partition("_")[2] for name in names if name.startswith("t_"))
    levels = (int(number) for number in numbers if number.isdecimal())
    return tuple(sorted(lv for lv in levels if all(f"{name}_{lv}" in names for name in AIR)))


def usual(levels: Sequence[int]) -> Usual:
    """Means and deviations of what is on these levels and on the ground, as Aurora has them.

    Raises:
        MotleyError: a level is not among those.
    """
    known = known_levels()
    if unknown := [level for level in levels if level not in known]:
        raise MotleyError(
            f"Aurora knows no level of {unknown[0]} hPa; give --levels of "
            f"{','.join(map(str, known))}"
        )
    tables = aurora().normalisation.locations, aurora().normalisation.scales
    surface = [[table[name] for name in SURFACE] for table in tables]
    air = [[[table[f"{name}_{level}"] for level in levels] for name in AIR] for table in tables]
    return Usual(np.array(surface, dtype=np.float32), np.array(air, dtype=np.float32))


def as_batch(
    surface: Tensor,
    air: Tensor,
    hours: Sequence[int],
    places: tuple[Tensor, Tensor],
    static: Mapping[str, Tensor],
    levels: tuple[int, ...],
) -> Any:
    """Aurora's own kind of a batch.

    Args:
        surface: [n, times, 4, lat, lon]. air: [n, times, 5, levels, lat, lon].
        hours: since 1970 of the last of the times. places: latitudes and longitudes.
    """
    package = aurora()
    # With their zone: Aurora would take naive times as the host's own, and hosts may differ.
    times = tuple(datetime.fromtimestamp(3600 * hour, UTC) for hour in hours)
    return package.Batch(
        surf_vars={name: surface[:, :, number] for number, name in enumerate(SURFACE)},
        static_vars=dict(static),
        atmos_vars={name: air[:, :, number] for number, name in enumerate(AIR)},
        metadata=package.Metadata(*places, times, levels),
    )


MODEL, NUMBERS, SPEED = Decides.MODEL, Decides.NUMBERS, Decides.SPEED
# What each variable counts in the loss, after https://arxiv.org/abs/2405.13063.
_COUNTS = {"2t": 3.0, "10u": 0.77, "10v": 0.66, "msl": 1.5}
_COUNTS_AIR = {"z": 2.8, "u": 0.87, "v": 0.6, "t": 1.7, "q": 0.78}
_SURFACE_PART = 0.25
_MADE_LEVELS = (100, 250, 500, 850)


@dataclass(frozen=True)
class _Kept:
    """What is the same for all samples, on a device.

    Attributes:
        area: of a row of the grid, 1 on average, [lat, 1]. places: latitudes and longitudes.
        surface: mean, deviation, what it counts, [3, 4, 1, 1]; air: [3, 5, levels, 1, 1].
    """

    area: Tensor
    places: tuple[Tensor, Tensor]
    static: dict[str, Tensor]
    surface: Tensor
    air: Tensor


@dataclass(frozen=True)
class WeatherTask(Task):
    """The state of the air told from the two before it.

    A batch is ``surface``, fp32 [n, 3, 4, lat, lon], and ``air``, fp32 [n, 3, 5, levels, lat, lon]:
    two states and the one to be told, in the units of ERA5; and ``hour``, int64 [n]: of the second
    of them, since 1970.

    Aurora tells one latitude less where their number is one more than a multiple of its patch, as
    with the 721 of 0.25 degrees.
    """

    noun = "forecast"
    unit = "forecasts"
    fp32 = ("encoder", "decoder")  # as its makers do; 16 bits hold no pressure in Pa
    block_classes = ("Basic3DEncoderLayer", "Basic3DDecoderLayer")

    aurora: str = option(
        "small (default, 113 M parameters) or full (1.3 G)", MODEL | SPEED, "small", choices=SIZES
    )
    fields: tuple[str, ...] = option(
        "NetCDF files with 2t 10u 10v msl, z u v t q on pressure levels, and z slt lsm, by these "
        "or ERA5's other names; the last tenth is held out. Default: made waves",
        NUMBERS, (), metavar="FILE", several=True,
    )  # fmt: skip
    levels: tuple[int, ...] | None = option(
        f"hPa; default: all of the files, of made fields {','.join(map(str, _MADE_LEVELS))}",
        MODEL | SPEED, read=positives, metavar="L[,L...]",
    )  # fmt: skip
    hours: int = option(
        "from one state to the next, default 6", MODEL, 6, read=positive, metavar="H"
    )
    grid: str = option(
        "of made fields, latitudes x longitudes, default 17x32; 721x1440 is ERA5's",
        MODEL | SPEED, "17x32", metavar="LATxLON",
    )  # fmt: skip
    states: int = option("made ones, default 120", NUMBERS, 120, read=positive, metavar="N")
    embed_dim: int | None = option(
        "width of a patch, a multiple of 64; default: as --aurora",
        MODEL | SPEED, read=positive, metavar="N",
    )  # fmt: skip
    depths: tuple[int, ...] | None = option(
        "blocks of the encoder's stages; the decoder's are the reverse; default: as --aurora",
        MODEL | SPEED, read=positives, metavar="N,N[,N...]",
    )  # fmt: skip
    latent_levels: int = option(
        "that the air's are made to, default 4", MODEL | SPEED, 4, read=positive, metavar="N"
    )
    patch_size: int = option(
        "points of the grid, default 4", MODEL | SPEED, 4, read=positive, metavar="N"
    )

    @cached_property
    def shape(self) -> Shape:
        """Aurora's."""
        return shape_of(
            self.aurora, self.embed_dim, self.depths, levels=self.latent_levels,
            patch=self.patch_size,
        )  # fmt: skip

    @cached_property
    def source(self) -> States:
        """Where states come from."""
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
    def _usual(self) -> Usual:
        return usual(self.source.grid.levels)

    @cached_property
    def _static(self) -> dict[str, Any]:
        return self.source.static()

    @cached_property
    def _samples(self) -> tuple[Forecasts, Forecasts]:
        return split(self.source, self.hours)

    def model(self) -> nn.Module:
        """See Task."""
        _ = self.source  # what is wrong with the data is said first
        return build(self.shape, self.hours)

    def data(self, held_out: bool) -> Source:
        """See Task."""
        return self._samples[held_out]

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """See Task."""
        return {
            "surface": torch.from_numpy(item["surface"]), "air": torch.from_numpy(item["air"]),
            "hour": torch.tensor(item["hour"]),
        }  # fmt: skip

    def name_of(self, source: Source, index: int) -> str:
        """See Task: by its times."""
        if not isinstance(source, Forecasts):
            return super().name_of(source, index)
        first, *_, last = map(time_of, source.of(index))
        return f"{self.noun} of {first} to {last}"

    def _kept(self, device: torch.device) -> _Kept:
        """No buffers of the model, which DDP would send around and checkpoints would keep."""
        kept: dict[torch.device, _Kept] = self.__dict__.setdefault("_on_device", {})
        if device not in kept:
            kept[device] = self._make_kept(device)
        return kept[device]

    def _make_kept(self, device: torch.device) -> _Kept:
        def there(values: Any) -> Tensor:
            return torch.as_tensor(np.asarray(values, dtype=np.float32), device=device)

        grid = self.source.grid
        rows = len(grid.lat) // self.patch_size * self.patch_size  # see the class
        area = np.cos(np.deg2rad(grid.lat[:rows])).clip(0)
        counts = [_COUNTS[name] for name in SURFACE]
        counts_air = np.repeat([[_COUNTS_AIR[name]] for name in AIR], len(grid.levels), axis=1)
        return _Kept(
            there(area / area.mean())[:, None],
            (there(grid.lat), there(grid.lon)),
            {name: there(self._static[name]) for name in STATIC},
            there([*self._usual.surface, counts])[..., None, None],
            there([*self._usual.air, counts_air])[..., None, None],
        )

    def _errors(self, net: Net, batch: Tensors) -> tuple[Tensor, Tensor, _Kept]:
        """What was told less what came: [n, 4, lat, lon], [n, 5, levels, lat, lon], in their
        units."""
        surface, air = batch["surface"], batch["air"]
        kept = self._kept(surface.device)
        known = as_batch(
            surface[:, :INPUTS], air[:, :INPUTS], batch["hour"].tolist(), kept.places,
            kept.static, self.source.grid.levels,
        )  # fmt: skip
        told = net(known)
        rows = len(kept.area)
        return (
            _stacked(told.surf_vars, SURFACE) - surface[:, INPUTS, ..., :rows, :],
            _stacked(told.atmos_vars, AIR) - air[:, INPUTS, ..., :rows, :],
            kept,
        )

    def losses(self, net: Net, batch: Tensors) -> Tensor:
        """See Task: mean absolute error by area, each variable in its usual deviations and by
        what it counts. All samples cover the same area, so each weighs 1."""
        return self._loss(*self._errors(net, batch))

    def _loss(self, surface: Tensor, air: Tensor, kept: _Kept) -> Tensor:
        parts: list[Tensor] = []
        for errors, (_, deviation, counts) in ((surface, kept.surface), (air, kept.air)):
            each = (errors.abs() * kept.area).mean(dim=(-2, -1), keepdim=True)
            parts.append((each * counts / deviation).flatten(2).mean(dim=2).sum(dim=1))
        surface_part, air_part = parts
        return (_SURFACE_PART * surface_part + air_part) / (len(SURFACE) + len(AIR))

    def scores(self, net: Net, batch: Tensors) -> Mapping[str, Tensor]:
        """See Task; besides the loss squared errors by variable, of the air over all levels."""
        surface, air, kept = self._errors(net, batch)
        squares = [(each.square() * kept.area).flatten(2).mean(dim=2) for each in (surface, air)]
        named = zip((*SURFACE, *(f"air_{name}" for name in AIR)),
                    torch.cat(squares, dim=1).unbind(dim=1), strict=True)  # fmt: skip
        return {"loss": self._loss(surface, air, kept), **dict(named)}

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """See Task; root mean squared errors by variable, in its unit."""
        return {
            "loss": means["loss"],
            **{f"rmse_{name}": mean**0.5 for name, mean in means.items() if name != "loss"},
        }

    def words(self, metrics: Mapping[str, float]) -> str:
        """See Task."""
        return (
            f"loss {metrics['loss']:.4f}, off by {metrics['rmse_2t']:.3g} K at 2 m, "
            f"{metrics['rmse_msl'] / 100:.3g} hPa, {metrics['rmse_10u']:.3g} m/s of wind to the "
            "east"
        )

    def predict(self, net: Net, batch: Tensors) -> Mapping[str, Sequence[Any]]:
        """See Task: how far each forecast is off, and of when it is."""
        found = self.scores(net, batch)
        columns = {
            f"rmse_{name}": value.sqrt().tolist() for name, value in found.items() if name != "loss"
        }
        when = [time_of(hour + self.hours) for hour in batch["hour"].tolist()]
        return {"time": when, "loss": found["loss"].tolist(), **columns}

    def noise(self, example: Tensors, count: int) -> Tensors:
        """See Task: usual values, nothing alike."""
        device = example["surface"].device
        kept, dice = self._kept(device), torch.Generator(device).manual_seed(0)
        made = {}
        for name, (mean, deviation, _) in (("surface", kept.surface), ("air", kept.air)):
            shape = (count, *example[name].shape[1:])
            values = torch.randn(shape, device=device, generator=dice, dtype=example[name].dtype)
            made[name] = values.mul_(deviation).add_(mean)
        return {**made, "hour": example["hour"].new_zeros(count)}

    def identity(self) -> dict[str, Any]:
        """See Task: where the fields are, when, and over what land; they are too many to read."""
        grid = self.source.grid
        digest = hashlib.sha256(json.dumps([*self.source.hours]).encode())
        for each in (grid.lat, grid.lon, *(self._static[name] for name in STATIC)):
            digest.update(np.ascontiguousarray(each).tobytes())
        return {
            "field_grid": [len(grid.lat), len(grid.lon)], "field_levels": [*grid.levels],
            "fields_sha256": digest.hexdigest(),
        }  # fmt: skip

    def title(self) -> str:
        """See Task."""
        own = f"{self.shape.width} wide, {','.join(map(str, self.shape.depths))} blocks"
        kind = f"{self.aurora} Aurora" if not (self.embed_dim or self.depths) else f"Aurora, {own},"
        where = f"{len(self.fields)} files" if self.fields else "made waves"
        return f"{kind} on {self.source.grid.text}, of {where}"


def _stacked(told: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.stack([told[name][:, 0] for name in names], dim=1)


def _check_patches(what: str, grid: Grid, patch: int) -> None:
    """Aurora leaves out one latitude where it must, and no more."""
    high, wide = len(grid.lat), len(grid.lon)
    if wide % patch or high % patch > 1 or high < patch:
        rows, columns = (max(1, round(points / patch)) * patch for points in (high, wide))
        raise MotleyError(
            f"{what} {high}x{wide}: Aurora cuts it into patches of {patch}x{patch} points; it "
            f"takes {rows} or {rows + 1} latitudes and {columns} longitudes. Change the grid, or "
            "--patch-size"
        )


TASKS = (("weather", WeatherTask),)
