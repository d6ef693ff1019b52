"""Microsoft's Aurora: construction, normalisation, batches and forecast errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from motley.data.source import Tensors
from motley.errors import MotleyError
from motley.registry import import_extra
from motley.tasks.states import AIR, INPUTS, STATIC, SURFACE, Grid, Usual
from motley.tasks.task import Net

_HEAD = 64  # width of a head in the backbone's attention; 32 in the encoder's and decoder's
# Weight of each variable in the loss, after https://arxiv.org/abs/2405.13063.
_COUNTS = {"2t": 3.0, "10u": 0.77, "10v": 0.66, "msl": 1.5}
_COUNTS_AIR = {"z": 2.8, "u": 0.87, "v": 0.6, "t": 1.7, "q": 0.78}
_SURFACE_PART = 0.25


@dataclass(frozen=True)
class Shape:
    """The sizes of an Aurora model. The defaults are those of the published model.

    Attributes:
        width: embedding width of a patch.
        depths: number of blocks of each encoder stage. The stages of the decoder have these numbers
            in reverse order.
        levels: number of latent levels.
        patch: side of a patch in grid points.
    """

    width: int
    depths: tuple[int, ...]
    levels: int = 4
    patch: int = 4

    def __post_init__(self) -> None:
        if self.width % _HEAD:
            raise MotleyError(
                f"--embed-dim {self.width} is not a multiple of {_HEAD}, the width of one "
                f"attention head; take {max(1, round(self.width / _HEAD)) * _HEAD}"
            )
        if len(self.depths) < 2:
            raise MotleyError(
                f"--depths {','.join(map(str, self.depths))}: give the number of blocks of each "
                "stage, for two stages or more, as in 2,6,2"
            )
        if self.levels % 2:
            raise MotleyError(
                f"--latent-levels {self.levels} is odd, and the attention windows of the backbone "
                "are two levels high; give an even number"
            )


def aurora() -> Any:
    """Import Microsoft's package ``aurora``, and return it.

    Raises:
        MotleyError: the package is not installed.
    """
    import_extra("aurora.normalisation", "--task weather", "microsoft-aurora")
    return import_extra("aurora", "--task weather", "microsoft-aurora")


def build(shape: Shape, step: int) -> nn.Module:
    """Return an Aurora with new weights.

    The model has no LoRA matrices, because these serve only the roll-outs of a trained model.
    Aurora's own autocast is off, because the task decides which parts compute in 16 bits.

    Args:
        shape: sizes of the model.
        step: hours from the last input state to the forecast.
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
    """Return the pressure levels in hPa for which Aurora has statistics, in ascending order."""
    names = aurora().normalisation.locations
    numbers = (name.partition("_")[2] for name in names if name.startswith("t_"))
    levels = (int(number) for number in numbers if number.isdecimal())
    return tuple(sorted(lv for lv in levels if all(f"{name}_{lv}" in names for name in AIR)))


def usual(levels: Sequence[int]) -> Usual:
    """Return Aurora's means and standard deviations of all variables on these pressure levels.

    Raises:
        MotleyError: Aurora has no values for a level.
    """
    known = known_levels()
    if unknown := [level for level in levels if level not in known]:
        raise MotleyError(
            f"Aurora has no pressure level of {unknown[0]} hPa; give --levels out of "
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
    """Return a batch as an object of the class ``aurora.Batch``.

    Args:
        surface: surface variables, [n, times, 4, lat, lon].
        air: atmospheric variables, [n, times, 5, levels, lat, lon].
        hours: hours since 1970 of the last input state of each sample, [n].
        places: latitudes and longitudes of the grid, in degrees.
        static: static variables by name, each [lat, lon].
        levels: pressure levels in hPa.
    """
    package = aurora()
    # Times need a zone: Aurora reads naive times in the host's zone, and hosts may differ.
    times = tuple(datetime.fromtimestamp(3600 * hour, UTC) for hour in hours)
    return package.Batch(
        surf_vars={name: surface[:, :, number] for number, name in enumerate(SURFACE)},
        static_vars=dict(static),
        atmos_vars={name: air[:, :, number] for number, name in enumerate(AIR)},
        metadata=package.Metadata(*places, times, levels),
    )


@dataclass(frozen=True)
class ForecastErrors:
    """A calculator of forecast errors, with the constants that all samples on a device share.

    The constants are not buffers of the model, because DDP would broadcast buffers and checkpoints
    would contain them.

    Attributes:
        levels: pressure levels in hPa.
        area: area of each row of the grid, 1 on average, [rows, 1].
        places: latitudes and longitudes, in degrees.
        static: static variables by name, each [lat, lon].
        surface: mean, standard deviation and loss weight of each surface variable, [3, 4, 1, 1].
        air: mean, standard deviation and loss weight of each atmospheric variable,
            [3, 5, levels, 1, 1].
    """

    levels: tuple[int, ...]
    area: Tensor
    places: tuple[Tensor, Tensor]
    static: dict[str, Tensor]
    surface: Tensor
    air: Tensor

    @classmethod
    def on(
        cls, device: torch.device, grid: Grid, static: Mapping[str, Any], usual: Usual, patch: int
    ) -> Self:
        """Return the calculator for a grid, with its tensors on a device.

        Args:
            device: device of the tensors.
            grid: latitudes, longitudes and pressure levels.
            static: static variables by name, each [lat, lon].
            usual: mean and standard deviation of each variable.
            patch: side of a patch in grid points. Latitudes that fill no patch are not forecast.
        """

        def there(values: Any) -> Tensor:
            return torch.as_tensor(np.asarray(values, dtype=np.float32), device=device)

        rows = len(grid.lat) // patch * patch
        area = np.cos(np.deg2rad(grid.lat[:rows])).clip(0)
        counts = [_COUNTS[name] for name in SURFACE]
        counts_air = np.repeat([[_COUNTS_AIR[name]] for name in AIR], len(grid.levels), axis=1)
        return cls(
            grid.levels,
            there(area / area.mean())[:, None],
            (there(grid.lat), there(grid.lon)),
            {name: there(static[name]) for name in STATIC},
            there([*usual.surface, counts])[..., None, None],
            there([*usual.air, counts_air])[..., None, None],
        )

    def losses(self, net: Net, batch: Tensors) -> Tensor:
        """Return the mean absolute error of each sample, weighted by area, [n].

        The error of each variable is divided by its standard deviation, and multiplied by the
        weight of the variable.
        """
        return self._loss(*self._between(net, batch))

    def scores(self, net: Net, batch: Tensors) -> dict[str, Tensor]:
        """Return the loss, and the squared error of each variable, by name, [n] each.

        Errors of atmospheric variables are averaged over all levels.
        """
        surface, air = self._between(net, batch)
        squares = [(each.square() * self.area).flatten(2).mean(dim=2) for each in (surface, air)]
        named = zip((*SURFACE, *(f"air_{name}" for name in AIR)),
                    torch.cat(squares, dim=1).unbind(dim=1), strict=True)  # fmt: skip
        return {"loss": self._loss(surface, air), **dict(named)}

    def noise(self, example: Tensors, count: int) -> Tensors:
        """Return a batch of random values for timing.

        Each variable has its usual mean and standard deviation.

        Args:
            example: a batch with the shapes of a sample.
            count: number of samples.
        """
        device = example["surface"].device
        dice, made = torch.Generator(device).manual_seed(0), dict[str, Tensor]()
        for name, (mean, deviation, _) in (("surface", self.surface), ("air", self.air)):
            shape = (count, *example[name].shape[1:])
            values = torch.randn(shape, device=device, generator=dice, dtype=example[name].dtype)
            made[name] = values.mul_(deviation).add_(mean)
        return {**made, "hour": example["hour"].new_zeros(count)}

    def _between(self, net: Net, batch: Tensors) -> tuple[Tensor, Tensor]:
        """Return the forecast minus the true state, in the units of the variables.

        The shapes are [n, 4, lat, lon] for surface variables, and [n, 5, levels, lat, lon] for
        atmospheric variables.
        """
        surface, air = batch["surface"], batch["air"]
        known = as_batch(
            surface[:, :INPUTS], air[:, :INPUTS], batch["hour"].tolist(), self.places,
            self.static, self.levels,
        )  # fmt: skip
        prediction = net(known)
        rows = len(self.area)
        return (
            _stacked(prediction.surf_vars, SURFACE) - surface[:, INPUTS, ..., :rows, :],
            _stacked(prediction.atmos_vars, AIR) - air[:, INPUTS, ..., :rows, :],
        )

    def _loss(self, surface: Tensor, air: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for errors, (_, deviation, counts) in ((surface, self.surface), (air, self.air)):
            each = (errors.abs() * self.area).mean(dim=(-2, -1), keepdim=True)
            parts.append((each * counts / deviation).flatten(2).mean(dim=2).sum(dim=1))
        surface_part, air_part = parts
        return (_SURFACE_PART * surface_part + air_part) / (len(SURFACE) + len(AIR))


def _stacked(told: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.stack([told[name][:, 0] for name in names], dim=1)
