"""The speeds of a script's ranks in its last run, kept on each machine."""

import hashlib
import sys
from pathlib import Path

import torch

from motley.checkpoint.run import versions
from motley.cluster.account import cache_folder
from motley.comm.collectives import all_gather_object
from motley.measure.speed_cache import compute_digest, read_speed, write_speed
from motley.plan.plan import Rank
from motley.plan.speeds import SpeedTable


class SpeedMemory:
    """The file with this rank's speed.

    Args:
        worker: this rank.
        micro_batch: most rows in a piece; None: all rows of a rank are one piece.
        group: number of consecutive rows that stay together in a piece.
        numbers: number of elements in the parameters and buffers of all models.
    """

    def __init__(self, worker: Rank, micro_batch: int | None, group: int, numbers: int) -> None:
        script = Path(sys.argv[0])
        text = script.read_bytes() if script.is_file() else b""
        self._key = {
            "script": hashlib.sha256(text).hexdigest(), "arguments": sys.argv[1:],
            "device": worker.device, "uuid": worker.uuid, "precision": worker.precision,
            "host": worker.host, "rank": worker.local_rank, "micro_batch": micro_batch,
            "group": group, "numbers": numbers,
            "threads": torch.get_num_threads(), "versions": versions(),
        }  # fmt: skip
        self._path = cache_folder() / f"loop-{compute_digest(self._key)[:20]}.json"

    def recall_all(self, rows: int) -> tuple[SpeedTable, ...]:
        """Return the speeds of all ranks; empty if a rank has none. All ranks call it.

        Args:
            rows: most rows in a piece, which the speeds have to know.
        """
        own = read_speed(self._path, self._key)
        known = all_gather_object(own if own and own.sizes[-1] == rows else None)
        return tuple(known) if all(known) else ()

    def keep(self, speed: SpeedTable) -> None:
        """Write this rank's speed."""
        write_speed(self._path, self._key, speed)
