"""A run now as lines of text, for a terminal of any width."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from motley.live.headline import Mood
from motley.live.snapshot import Row, Snapshot
from motley.text import rate_in_words

PARTS = ("input", "compute", "waiting", "wire", "optimizer", "host")
_LOOK = ("white", "blue", "yellow", "red", "green", "magenta")  # of each part
MOODS = {
    Mood.STARTING: "cyan", Mood.WELL: "green", Mood.WAITS: "yellow", Mood.SILENT: "bold red",
    Mood.FAILED: "bold red", Mood.DONE: "bold green",
}  # fmt: skip


@dataclass(frozen=True)
class Signs:
    """What bars and curves are drawn with.

    Attributes:
        parts: of a step, as PARTS. heights: of a curve, ascending. full, empty: of progress.
        cut: ends what does not fit.
    """

    parts: str
    heights: str
    full: str
    empty: str
    cut: str


BLOCKS = Signs("i█·≈oh", "▁▂▃▄▅▆▇█", "█", "░", "…")
ASCII = Signs("i#.~oh", "_.-=+*%@", "#", ".", "~")


class Sort(Enum):
    """By what the rows are in order."""

    FIT = "rank, or waited for"  # where not all fit
    RANK = "rank"
    WAITED = "waited for"
    HOST = "host"
    RATE = "rate"
    LOAD = "load"
    MEMORY = "memory"

    def of(self, rows: Sequence[Row], all_fit: bool = True) -> list[Row]:
        """The rows in this order."""
        keys: dict[Sort, Callable[[Row], tuple[object, ...]]] = {
            Sort.FIT: lambda row: (row.rank,) if all_fit else waited(row),
            Sort.RANK: lambda row: (row.rank,),
            Sort.WAITED: waited,
            Sort.HOST: lambda row: (row.host, row.rank),
            Sort.RATE: lambda row: (row.rate is None, row.rate or 0.0, row.rank),
            Sort.LOAD: lambda row: (row.load is None, row.load or 0.0, row.rank),
            Sort.MEMORY: lambda row: (-(row.memory_mib or 0.0), row.rank),
        }
        return sorted(rows, key=keys[self])  # type: ignore[arg-type]


def waited(row: Row) -> tuple[float, ...]:
    """The silent, then those that are waited for, then the slow ones first."""
    return *(-each for each in row.urgency), row.rank


def clock(seconds: float | None) -> str:
    """As in 1:02:03, or 2:03; empty where unknown."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def curve(values: Sequence[float | None], width: int, signs: Signs, zero: bool = False) -> str:
    """A curve of one line, by means where there are more values than columns.

    Args:
        zero: the lowest sign is 0, else the least value.
    """
    known = [value for value in values if value is not None]
    if not known or width < 1:
        return ""
    cells = min(width, len(known))
    means = []
    for cell in range(cells):
        some = known[cell * len(known) // cells : (cell + 1) * len(known) // cells]
        means.append(sum(some) / len(some))
    low, high = 0.0 if zero else min(means), max(means)
    top = len(signs.heights) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(signs.heights[round((value - low) * scale)] for value in means)


def bar(parts: Sequence[float | None], longest: float, width: int, signs: Signs) -> Text:
    """A step's parts, as long as it is beside the longest."""
    text, reached, drawn = Text(), 0.0, 0
    for part, sign, look in zip(parts, signs.parts, _LOOK, strict=False):
        reached += part or 0.0
        end = round(width * reached / longest) if longest else 0
        text.append(sign * (end - drawn), look)
        drawn = max(drawn, end)
    return text


def wrapped(said: str, width: int, most: int, look: str = "") -> list[Text]:
    """A sentence on some lines; what does not fit is cut."""
    lines, line = list[str](), ""
    for word in said.split():
        while cell_len(word) > width:
            lines += [line] if line else []
            line, word = "", word
            lines.append(word[:width])
            word = word[width:]
        if line and cell_len(line) + 1 + cell_len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    lines += [line] if line else []
    return [Text(line, look) for line in lines[:most]]


def fit(said: str, width: int, cut: str) -> str:
    """Exactly so many columns; what is longer is cut."""
    if cell_len(said) <= width:
        return set_cell_size(said, width)
    return set_cell_size(said, max(0, width - 1)) + cut if width > 0 else ""


def facts(now: Snapshot) -> list[str]:
    """Short ones, the most important first."""
    share = f"{now.fraction:.2f} of the limit" if now.fraction is not None else ""
    rate = "" if now.rate is None else f"{rate_in_words(now.rate)} {now.unit}/s"
    return [*filter(None, (
        rate, share, now.evaluation,
        "" if now.lr is None else f"lr {now.lr:.3g}",
        "" if now.loss_scale in (None, 1.0) else f"loss scale {now.loss_scale:g}",
    ))]  # fmt: skip


def progress(now: Snapshot, width: int, signs: Signs) -> str:
    """How far it is, and how long it takes."""
    done = min(1.0, now.step / now.last_step) if now.last_step else None
    left = "" if now.left_s is None else f"{clock(now.left_s)} left"
    took = "" if now.elapsed_s is None or now.status == "running" else f"in {clock(now.elapsed_s)}"
    step = f"step {now.step:,}" + (f"/{now.last_step:,}" if now.last_step else "")
    words = "  ".join(filter(None, ("" if done is None else f"{done:.0%}", left, step, took)))
    if now.epoch is not None and width > 60:
        words += f"  epoch {now.epoch}"
    room = min(40, width - len(words) - 1)
    if room < 6 or done is None:
        return words
    full = int(room * done)
    return f"{signs.full * full}{signs.empty * (room - full)} {words}"


def when(seconds: float | None) -> str:
    """The local time of an event; empty where no clock has it."""
    try:
        return "" if seconds is None else f"{datetime.fromtimestamp(seconds):%H:%M:%S} "
    except (OverflowError, ValueError, OSError):
        return ""
