"""The live view as lines of text for a terminal of any width.

The view shows one run with a table of its ranks, one rank of a run, or all runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from motley.live.snapshot import RankHistory, Row, Snapshot
from motley.live.words import Mood
from motley.text import clock, format_rate

PARTS = ("input", "compute", "waiting", "wire", "optimizer", "host")
_LOOK = ("white", "blue", "yellow", "red", "green", "magenta")  # colour of each part of a step
MOODS = {
    Mood.STARTING: "cyan", Mood.WELL: "green", Mood.WAITS: "yellow", Mood.SILENT: "bold red",
    Mood.FAILED: "bold red", Mood.DONE: "bold green",
}  # fmt: skip


@dataclass(frozen=True)
class Signs:
    """The characters with which bars and curves are drawn.

    Attributes:
        parts: one character for each part of a step, in the order of PARTS.
        heights: characters for the values of a curve, ascending.
        full: character for the finished part of a progress bar.
        empty: character for the rest of a progress bar.
        cut: character at the end of a text that was cut.
    """

    parts: str
    heights: str
    full: str
    empty: str
    cut: str


BLOCKS = Signs("i█·≈oh", "▁▂▃▄▅▆▇█", "█", "░", "…")
ASCII = Signs("i#.~oh", "_.-=+*%@", "#", ".", "~")


class Sort(Enum):
    """An order of the rows in the table of ranks."""

    FIT = "rank, or waited for"  # by waiting if not all ranks fit
    RANK = "rank"
    WAITED = "waited for"
    HOST = "host"
    RATE = "rate"
    LOAD = "load"
    MEMORY = "memory"

    def apply(self, rows: Sequence[Row], all_fit: bool = True) -> list[Row]:
        """Return the rows in this order.

        With the order FIT, rows are sorted by rank if all rows fit on the screen (``all_fit``), and
        otherwise by :func:`waited`.
        """
        keys: dict[Sort, Callable[[Row], tuple[object, ...]]] = {
            Sort.FIT: lambda row: (row.rank,) if all_fit else waited(row),
            Sort.RANK: lambda row: (row.rank,),
            Sort.WAITED: waited,
            Sort.HOST: lambda row: (row.host, row.rank),
            Sort.RATE: lambda row: (row.rate is None, row.rate or 0.0, row.rank),
            Sort.LOAD: lambda row: (row.load is None, row.load or 0.0, row.rank),
            Sort.MEMORY: lambda row: (-(row.memory_mib or 0.0), row.rank),
        }
        return sorted(rows, key=keys[self])


def waited(row: Row) -> tuple[float, ...]:
    """Return a sort key that places silent ranks first, then stragglers, then slow ranks."""
    return *(-each for each in row.urgency), row.rank


_CURVE = 16  # columns of a curve in the list of runs


def curve(values: Sequence[float | None], width: int, signs: Signs, zero: bool = False) -> str:
    """Draw a curve as one line of text. Several values in one column are averaged.

    Args:
        values: values of the curve; None: unknown.
        width: number of columns.
        signs: characters of the terminal.
        zero: True: the lowest character stands for 0. False: for the smallest value.
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
    """Draw the parts of a rank's step as a bar, scaled to the longest step.

    Args:
        parts: seconds of each part; None: unknown.
        longest: seconds of the longest step.
        width: number of columns of the longest bar.
        signs: characters of the terminal.
    """
    text, reached, drawn = Text(), 0.0, 0
    for part, sign, look in zip(parts, signs.parts, _LOOK, strict=False):
        reached += part or 0.0
        end = round(width * reached / longest) if longest else 0
        text.append(sign * (end - drawn), look)
        drawn = max(drawn, end)
    return text


def wrapped(said: str, width: int, most: int, look: str = "") -> list[Text]:
    """Return a sentence wrapped to at most ``most`` lines. Text that does not fit is cut."""
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
    """Return a text padded or cut to exactly ``width`` columns."""
    if cell_len(said) <= width:
        return set_cell_size(said, width)
    return set_cell_size(said, max(0, width - 1)) + cut if width > 0 else ""


def facts(now: Snapshot) -> list[str]:
    """Return short texts on the state of a run, the most important first."""
    share = f"{now.fraction:.2f} of the limit" if now.fraction is not None else ""
    rate = "" if now.rate is None else f"{format_rate(now.rate)} {now.unit}/s"
    return [*filter(None, (
        rate, share, now.evaluation,
        "" if now.lr is None else f"lr {now.lr:.3g}",
        "" if now.loss_scale in (None, 1.0) else f"loss scale {now.loss_scale:g}",
    ))]  # fmt: skip


def progress(now: Snapshot, width: int, signs: Signs) -> str:
    """Return a progress bar with the remaining time, or with the duration of a finished run."""
    done = min(1.0, now.step / now.last_step) if now.last_step else None
    remaining = "" if now.left_s is None else f"{clock(now.left_s)} left"
    took = "" if now.elapsed_s is None or now.status == "running" else f"in {clock(now.elapsed_s)}"
    step = f"step {now.step:,}" + (f"/{now.last_step:,}" if now.last_step else "")
    words = "  ".join(filter(None, ("" if done is None else f"{done:.0%}", remaining, step, took)))
    if now.epoch is not None and width > 60:
        words += f"  epoch {now.epoch}"
    room = min(40, width - len(words) - 1)
    if room < 6 or done is None:
        return words
    full = int(room * done)
    return f"{signs.full * full}{signs.empty * (room - full)} {words}"


def when(seconds: float | None) -> str:
    """Return the local time of an event as text; empty if it is unknown."""
    try:
        return "" if seconds is None else f"{datetime.fromtimestamp(seconds):%H:%M:%S} "
    except (OverflowError, ValueError, OSError):
        return ""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        title: title of the column, cut to ``width`` if the screen is narrow.
        width: least width, in characters.
        rank: number that decides which columns are dropped on a narrow screen. The column with the
            highest number is dropped first.
        most: largest width, in characters.
        right: True if the cells of the column are aligned to the right.
    """

    title: str
    width: int
    rank: int
    most: int = 0
    right: bool = False


_RANK, _HOST, _STEP = Column("rank", 4, 0, right=True), Column("host", 8, 1, 20), "step"
_BAR = Column(_STEP, 12, 1, 40)
_DEVICE, _PRECISION = Column("device", 9, 4, 24), Column("prec", 4, 8)
_SHARE, _RATE = Column("share", 5, 5, right=True), Column("rate", 7, 3, right=True)
_LOAD, _MEMORY = Column("load", 4, 2, right=True), Column("memory", 8, 6, right=True)
_HEAT, _POWER = Column("°C", 3, 9, right=True), Column("W", 4, 10, right=True)
_OTHERS = Column("also there", 10, 7, 24)
_ALL = (
    _RANK, _HOST, _DEVICE, _PRECISION, _SHARE, _RATE, _BAR, _LOAD, _MEMORY, _HEAT, _POWER, _OTHERS,
)  # fmt: skip


def columns(rows: Sequence[Row], width: int) -> dict[Column, int]:
    """Return the columns that have a value and fit on the screen, with their widths."""
    has_values = {
        _DEVICE: any(row.device for row in rows), _PRECISION: any(row.precision for row in rows),
        _SHARE: any(row.share is not None for row in rows),
        _RATE: any(row.rate is not None for row in rows),
        _LOAD: any(row.load is not None for row in rows),
        _MEMORY: any(row.memory_mib is not None for row in rows),
        _HEAT: any(row.temperature_c is not None for row in rows),
        _POWER: any(row.power_w is not None for row in rows),
        _OTHERS: any(row.others for row in rows),
    }  # fmt: skip
    chosen = [column for column in _ALL if has_values.get(column, True)]
    while len(chosen) > 3 and sum(each.width + 1 for each in chosen) - 1 > width:
        chosen.remove(max(chosen, key=lambda each: each.rank))
    widths = {column: column.width for column in chosen}
    longest = {_HOST: max((len(row.host) for row in rows), default=0),
               _DEVICE: max((len(row.device) for row in rows), default=0),
               _OTHERS: max((len(row.others) for row in rows), default=0)}  # fmt: skip
    room = width - sum(each + 1 for each in widths.values()) + 1
    for column in (_HOST, _OTHERS, _DEVICE, _BAR):  # first names get more room, then bars
        if column in widths:
            most = min(column.most, longest.get(column, column.most))
            more = max(0, min(room, most - column.width))
            widths[column] += more
            room -= more
    while room < 0 and max(widths.values()) > 1:  # narrower than the columns that always stay
        widths[max(widths, key=lambda each: widths[each])] -= 1
        room += 1
    return widths


def head(widths: dict[Column, int], signs: Signs) -> Text:
    """Return the line with the titles of the table's columns."""
    cells = [_cell(column.title, column, width, signs) for column, width in widths.items()]
    return Text(" ".join(cells), "bold")


def line(row: Row, widths: dict[Column, int], longest: float, signs: Signs, chosen: bool) -> Text:
    """Return the line of one rank.

    Args:
        row: the rank.
        widths: the columns with their widths.
        longest: longest step of all rows, seconds.
        signs: characters of the terminal.
        chosen: True if the user has chosen this rank.
    """
    text = Text()
    for column, width in widths.items():
        if len(text):
            text.append(" ")
        if column is _BAR:
            text.append_text(_bar(row, longest, width, signs))
        else:
            look = "bold yellow" if row.waited >= 0.05 and column is _HOST else ""
            text.append(_cell(_format_cell(row, column), column, width, signs), look)
    if row.silent_s is not None:
        text.stylize("bold red")
    if chosen:
        text.stylize("reverse")
    return text


def _bar(row: Row, longest: float, width: int, signs: Signs) -> Text:
    note = row.note
    if not note and row.silent_s is not None:
        note = f"silent for {clock(row.silent_s)}"
    if note:
        return Text(fit(note, width, signs.cut))
    drawn = bar(row.parts, longest, width, signs)
    drawn.append(" " * (width - drawn.cell_len))
    return drawn


def _cell(said: str, column: Column, width: int, signs: Signs) -> str:
    if column.right and len(said) < width:
        return said.rjust(width)
    return fit(said, width, signs.cut if len(said) > width + 1 else said[width - 1 : width])


def _format_cell(row: Row, column: Column) -> str:
    gib = None if row.memory_mib is None else row.memory_mib / 1024
    whole = None if row.memory_total_mib is None else row.memory_total_mib / 1024
    of = "" if whole is None else f"/{whole:.0f}G" if whole >= 10 else f"/{whole:.1f}G"
    small = row.share is not None and row.share < 0.0095
    values: dict[Column, tuple[float | None, str]] = {
        _SHARE: (row.share, "{:.2%}" if small else "{:.0%}"),
        _MEMORY: (gib, ("{:.0f}" if gib and gib >= 100 else "{:.1f}") + of),
        _LOAD: (row.load, "{:.0%}"), _HEAT: (row.temperature_c, "{:.0f}"),
        _POWER: (row.power_w, "{:.0f}"),
    }  # fmt: skip
    if column in values:
        value, form = values[column]
        return "" if value is None else form.format(value)
    cells = {_RANK: str(row.rank), _HOST: row.host, _DEVICE: row.device,
            _PRECISION: row.precision, _OTHERS: row.others,
            _RATE: "" if row.rate is None else format_rate(row.rate)}  # fmt: skip
    return cells[column]


def legend(signs: Signs, longest: float, hidden: int, width: int) -> Text:
    """Return a line with the legend of the bars and the number of ranks that are not shown."""
    text = f"and {hidden:,} more ranks  " if hidden else ""
    text += "  ".join(f"{sign} {name}" for sign, name in zip(signs.parts, PARTS, strict=True))
    text += f"  longest {longest:.3g} s" if longest else ""
    return Text(fit(text, width, signs.cut).rstrip(), "dim")


_FEWEST_EVENTS = 3


@dataclass(frozen=True)
class View:
    """The content of the screen, as the user has chosen it with keys.

    Attributes:
        sort: order of the rows.
        rank: the chosen rank.
        history: True if the chosen rank's history is shown.
        run: name of the chosen run, if there are several runs.
        opened: True if only the chosen run is shown.
        listed: True if all runs are shown although only one run is running.
        keys: True if the user has a keyboard. The last line then lists the keys.
    """

    sort: Sort = Sort.FIT
    rank: int | None = None
    history: bool = False
    run: str = ""
    opened: bool = False
    listed: bool = False
    keys: bool = True

    def move(self, rows: Sequence[Row], by: int) -> "View":
        """Return the view with another chosen rank.

        Args:
            rows: the ranks.
            by: number of rows to move down. A negative number moves up.
        """
        order = [row.rank for row in self.sort.apply(rows)]
        if not order:
            return self
        place = order.index(self.rank) + by if self.rank in order else 0
        return replace(self, rank=order[max(0, min(place, len(order) - 1))])


def screen(now: Snapshot, view: View, width: int, height: int | None, signs: Signs) -> list[Text]:
    """Return the lines of the screen that shows one run.

    Args:
        now: the snapshot.
        view: the user's choice of rank, order and history.
        width: number of columns.
        height: number of lines; None: no limit.
        signs: characters of the terminal.
    """
    top = _top(now, width, signs)
    foot = _foot(
        view, f"q quit  ↑↓ choose  enter history  s sort ({view.sort.value})  esc all runs"
    )
    if view.history and now.history is not None:
        return _cut([*top, Text(), *_history(now, now.history, width, signs)], foot, width, height)
    events = _events(now, width, signs)
    room = None if height is None else height - len(top) - len(foot)
    few = min(len(events), _FEWEST_EVENTS)
    table = _table(now, view, width, None if room is None else room - few, signs)
    if room is not None:
        events = events[-(room - len(table)) :] if room > len(table) else []
    return _cut([*top, *table, *events], foot, width, height)


def _foot(view: View, said: str) -> list[Text]:
    return [Text(said, "dim")] if view.keys else []


def _cut(lines: list[Text], foot: list[Text], width: int, height: int | None) -> list[Text]:
    """Return the lines, cut to the size of the screen. The lines of ``foot`` come last."""
    if height is not None:
        room = max(1, height - len(foot))
        lines = [*lines[:room], *(Text() for _ in range(room - len(lines)))]
    lines = [*lines, *foot]
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines


def _top(now: Snapshot, width: int, signs: Signs) -> list[Text]:
    title = f"{now.name}  {now.status}" + (f"  {now.title}" if now.title else "")
    lines = [
        Text(fit(title, width, signs.cut).rstrip(), "bold"),
        Text(progress(now, width, signs)[:width]),
        *wrapped(", ".join(facts(now)), width, 1 if width >= 60 else 2),
    ]
    if now.loss is not None:
        text = f"loss {now.loss:.4g} "
        drawn = curve([loss for _, loss in now.losses], min(60, width - len(text)), signs)
        lines.append(Text.assemble(text, (drawn, "blue")))
    lines += wrapped(now.headline, width, 3, MOODS[now.mood])
    if now.link and now.link not in now.headline and width >= 40:
        lines.append(Text(fit(now.link, width, signs.cut).rstrip(), "dim"))
    for text in now.elsewhere[:2]:
        lines += wrapped(text, width, 2, "dim")
    if len(now.elsewhere) > 2:
        lines.append(Text(f"and {len(now.elsewhere) - 2} more hosts", "dim"))
    return lines + wrapped(now.problem, width, 5, "bold red")


def _table(now: Snapshot, view: View, width: int, room: int | None, signs: Signs) -> list[Text]:
    """Return the lines of the table of ranks. If not all fit, return those near the chosen rank."""
    if not now.rows:
        return []
    most = len(now.rows) if room is None else max(1, room - 2)
    rows = view.sort.apply(now.rows, all_fit=not now.hidden and len(now.rows) <= most)
    place = next((place for place, row in enumerate(rows) if row.rank == view.rank), 0)
    first = max(0, min(place - most // 2, len(rows) - most))
    longest = max(sum(part or 0.0 for part in row.parts) for row in rows)
    rows = rows[first : first + most]
    widths = columns(rows, width)
    lines = [head(widths, signs)]
    lines += [line(row, widths, longest, signs, row.rank == view.rank) for row in rows]
    hidden = now.hidden + len(now.rows) - len(rows)
    return [*lines, legend(signs, longest, hidden, width)]


def _events(now: Snapshot, width: int, signs: Signs) -> list[Text]:
    lines = []
    for event in now.events:
        start = when(event.time) if width >= 40 else ""
        text = f"{event.kind.replace('_', ' ')}: {event.text}" if event.text else event.kind
        lines.append(Text.assemble((start, "dim"), fit(text, width - len(start), signs.cut)))
    return lines


def _history(now: Snapshot, history: RankHistory, width: int, signs: Signs) -> list[Text]:
    """Return one rank's history: the time of each part of its steps, and its device."""
    row = next((row for row in now.rows if row.rank == history.rank), None)
    named = f"rank {history.rank}" + (f" on {row.host}, {row.device}" if row else "")
    lines = [Text(fit(named, width, signs.cut).rstrip(), "bold")]
    if history.steps:
        lines.append(Text(f"steps {history.steps[0] + 1:,} to {now.step:,}"[:width], "dim"))
    curves = {
        name: ([parts[index] for parts in history.parts], "{:.3g} s")
        for index, name in enumerate(PARTS)
    }
    curves |= {
        "load": ([*history.load], "{:.0%}"), "memory": ([*history.memory_mib], "{:,.0f} MiB"),
        "temperature": ([*history.temperature_c], "{:.0f} °C"),
        "power": ([*history.power_w], "{:.0f} W"),
    }  # fmt: skip
    for name, (values, form) in curves.items():
        known = [value for value in values if value is not None]
        if not known:
            continue
        text = f"{name:11} {form.format(known[-1]):>10} "
        drawn = curve(known, max(0, min(60, width - len(text) - 24)), signs, zero=True)
        span = f" {form.format(min(known))} to {form.format(max(known))}"
        lines.append(Text.assemble(text, (drawn, "blue"), (span, "dim")))
    return lines


def _curves(now: Snapshot, signs: Signs) -> str:
    """Return the loss and the metrics of a run, each with its curve and its last value."""
    known = {"loss": now.losses, **{f"held-out {name}": now.metrics[name] for name in now.metrics}}
    words = []
    for name, points in known.items():
        values = [value for _, value in points]
        drawn = f" {curve(values, _CURVE, signs)}" if len(values) > 1 else ""
        words += [f"{name}{drawn} {values[-1]:.4g}"] if values else []
    return "  ".join(words)


def runs_screen(
    runs: Sequence[Snapshot], view: View, width: int, height: int | None, signs: Signs
) -> list[Text]:
    """Return the lines of the screen that shows all runs, the newest first.

    The lines of a run have its state, headline, loss and evaluations.
    """
    text = f"{len(runs)} runs" if runs else "there is no run yet; this view waits for one"
    lines = [Text(text, "bold")]
    foot = _foot(view, "q quit  ↑↓ choose  enter open")
    for now in runs:
        done = f" {min(1.0, now.step / now.last_step):.0%}" if now.last_step else ""
        remaining = f" {clock(now.left_s)} left" if now.left_s is not None else ""
        rate = (
            f" {format_rate(now.rate)} {now.unit}/s" if now.rate and now.status == "running" else ""
        )
        text = f"{now.name}  {now.status}{done}{remaining}{rate}"
        look = "reverse" if now.name == view.run else ""
        lines.append(Text(fit(text, width, signs.cut).rstrip(), look))
        lines.append(Text(fit(f"  {now.headline}", width, signs.cut).rstrip(), MOODS[now.mood]))
        if curves := _curves(now, signs):
            lines.append(Text(fit(f"  {curves}", width, signs.cut).rstrip()))
    return _cut(lines, foot, width, height)
