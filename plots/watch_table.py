"""The table of ranks: the columns that a terminal has room for."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from watch_text import PARTS, Signs, bar, clock, fit

from motley.live.snapshot import Row
from motley.text import rate_in_words


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: its first letters fit into ``width``, columns of the terminal.
        most: what it may grow to. rank: which goes first where there is no room: the highest.
        right: its cells end at the right.
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
    """Those that have something to tell and fit, with their widths."""
    told = {
        _DEVICE: any(row.device for row in rows), _PRECISION: any(row.precision for row in rows),
        _SHARE: any(row.share is not None for row in rows),
        _RATE: any(row.rate is not None for row in rows),
        _LOAD: any(row.load is not None for row in rows),
        _MEMORY: any(row.memory_mib is not None for row in rows),
        _HEAT: any(row.temperature_c is not None for row in rows),
        _POWER: any(row.power_w is not None for row in rows),
        _OTHERS: any(row.others for row in rows),
    }  # fmt: skip
    chosen = [column for column in _ALL if told.get(column, True)]
    while len(chosen) > 3 and sum(each.width + 1 for each in chosen) - 1 > width:
        chosen.remove(max(chosen, key=lambda each: each.rank))
    widths = {column: column.width for column in chosen}
    longest = {_HOST: max((len(row.host) for row in rows), default=0),
               _DEVICE: max((len(row.device) for row in rows), default=0),
               _OTHERS: max((len(row.others) for row in rows), default=0)}  # fmt: skip
    room = width - sum(each + 1 for each in widths.values()) + 1
    for column in (_HOST, _OTHERS, _DEVICE, _BAR):  # names first, then longer bars
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
    """The titles."""
    cells = [_cell(column.title, column, width, signs) for column, width in widths.items()]
    return Text(" ".join(cells), "bold")


def line(row: Row, widths: dict[Column, int], longest: float, signs: Signs, chosen: bool) -> Text:
    """One rank; ``longest``: step of all rows, seconds."""
    text = Text()
    for column, width in widths.items():
        if len(text):
            text.append(" ")
        if column is _BAR:
            text.append_text(_bar(row, longest, width, signs))
        else:
            look = "bold yellow" if row.waited >= 0.05 and column is _HOST else ""
            text.append(_cell(_said(row, column), column, width, signs), look)
    if row.silent_s is not None:
        text.stylize("bold red")
    if chosen:
        text.stylize("reverse")
    return text


def _bar(row: Row, longest: float, width: int, signs: Signs) -> Text:
    if row.note or row.silent_s is not None:
        silent = f"silent for {clock(row.silent_s)}"
        return Text(fit(row.note or silent, width, signs.cut))
    drawn = bar(row.parts, longest, width, signs)
    drawn.append(" " * (width - drawn.cell_len))
    return drawn


def _cell(said: str, column: Column, width: int, signs: Signs) -> str:
    if column.right and len(said) < width:
        return said.rjust(width)
    return fit(said, width, signs.cut if len(said) > width + 1 else said[width - 1 : width])


def _said(row: Row, column: Column) -> str:
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
    said = {_RANK: str(row.rank), _HOST: row.host, _DEVICE: row.device,
            _PRECISION: row.precision, _OTHERS: row.others,
            _RATE: "" if row.rate is None else rate_in_words(row.rate)}  # fmt: skip
    return said[column]


def legend(signs: Signs, longest: float, hidden: int, width: int) -> Text:
    """How many ranks are not shown, and what the bars are made of."""
    said = f"and {hidden:,} more ranks  " if hidden else ""
    said += "  ".join(f"{sign} {name}" for sign, name in zip(signs.parts, PARTS, strict=True))
    said += f"  longest {longest:.3g} s" if longest else ""
    return Text(fit(said, width, signs.cut).rstrip(), "dim")
