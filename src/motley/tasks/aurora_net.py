"""Microsoft's Aurora: its shape, what is asked of the package, and tensors put as it takes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from torch import Tensor, nn

from motley.errors import MotleyError
from motley.extras import import_extra
from motley.tasks.states import AIR, SURFACE, Usual

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
