"""Results of a long list of items, made in shards by processes that may die, merged in order.

<folder>/
  about.json          what the shards are of; all that work here must agree on it
  shard.00012.csv     whole, or not there
  shard.00013.lease   somebody works on it
  rank.3.json         what one rank did, in its last job
  predictions.csv     all shards in order, once they are there
"""

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from motley.errors import MotleyError

MERGED = "predictions.csv"


class Shards:
    """A folder of shards.

    Args:
        items: how many there are in all. size: of a shard; the last may be smaller.
        columns: names of the fields of a row.
    """

    def __init__(self, folder: Path, items: int, size: int, columns: Sequence[str]) -> None:
        self.folder, self._items, self._size, self._columns = folder, items, size, columns
        self.count = -(-items // size)

    def open(self, about: Mapping[str, Any]) -> None:
        """Make the folder, or take it as it is; MotleyError if it is of something else."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {**about, "items": self._items, "shard": self._size}
        path = self.folder / "about.json"
        new = path.with_name(f".about.{os.uname().nodename}.{os.getpid()}")
        new.write_text(json.dumps(own, indent=1, sort_keys=True) + "\n")
        try:
            os.link(new, path)  # whole, and by one process alone
        except FileExistsError:
            pass
        finally:
            new.unlink()
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise MotleyError(
                f"{path} cannot be read ({error}); give another folder with --out"
            ) from None
        if differing := [key for key in own | found if own.get(key) != found.get(key)]:
            said = ", ".join(f"{key} {found.get(key)} (now: {own.get(key)})" for key in differing)
            raise MotleyError(
                f"{self.folder} holds predictions of something else: {said}; give another folder "
                "with --out, or the same options"
            )

    def name(self, number: int) -> str:
        """Of a shard, and of its lease."""
        return f"shard.{number:05d}"

    def items_of(self, number: int) -> range:
        """The items of a shard."""
        return range(self._size * number, min(self._size * (number + 1), self._items))

    def path(self, number: int) -> Path:
        """Of a shard."""
        return self.folder / f"{self.name(number)}.csv"

    def missing(self) -> list[int]:
        """Shards that are not there yet."""
        found = set(self.folder.glob("shard.*.csv"))
        return [n for n in range(self.count) if self.path(n) not in found]

    def write(self, number: int, rows: Iterable[Sequence[object]]) -> None:
        """Write a shard, whole or not at all."""
        self._write(self.path(number), rows)

    def merge(self) -> Path:
        """Put all shards into one file, in order; they must all be there."""
        rows: list[list[str]] = []
        for number in range(self.count):
            path = self.path(number)
            csv.field_size_limit(2**30)  # a prediction may well take more than the usual 128 KiB
            with path.open(newline="") as file:
                header, *shard = list(csv.reader(file)) or [[]]
            if header != [*self._columns]:
                raise MotleyError(
                    f"{path} has the columns {', '.join(header)}, and now they are "
                    f"{', '.join(self._columns)}; remove it, and run the same line again"
                )
            if len(shard) != len(self.items_of(number)):
                raise MotleyError(
                    f"{path} has {len(shard)} rows, not {len(self.items_of(number))}; remove it, "
                    "and run the same line again"
                )
            rows += shard
        merged = self.folder / MERGED
        self._write(merged, rows)
        return merged

    def _write(self, path: Path, rows: Iterable[Sequence[object]]) -> None:
        new = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        with new.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self._columns)
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
