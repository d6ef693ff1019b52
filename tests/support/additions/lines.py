"""A tracker of one's own: a line of JSON for each row."""

import json
from collections.abc import Sequence

from motley.publish.series import Note, Row
from motley.publish.trackers import Published, Tracker
from motley.records.json_files import JsonDict


class Lines(Tracker):
    name, says = "lines", "tracked.jsonl in the run's folder"

    @classmethod
    def check(cls) -> None:
        pass  # it needs no package

    def __init__(self, run: Published, memory: JsonDict) -> None:
        path = run.folder.path / "tracked.jsonl"
        self.anew = not memory
        self.look = f"cat {path}"
        self._file = path.open("w" if self.anew else "r+")
        self._bytes = memory.get("bytes", 0)
        self._file.truncate(self._bytes)  # without what a killed publisher wrote and did not save
        self._file.seek(self._bytes)

    def memory(self) -> JsonDict:
        return {"bytes": self._bytes}

    def publish(self, steps: Sequence[Row], samples: Sequence[Row], notes: Sequence[Note]) -> None:
        for row in (*steps, *samples):
            self._file.write(json.dumps({"step": row.step, "time": row.time, **row.values}) + "\n")
        self._file.flush()
        self._bytes = self._file.tell()

    def close(self, status: str) -> None:
        self._file.close()


TRACKERS = (Lines,)
