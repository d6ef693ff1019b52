"""The whole screen: a run, one rank of it, or all runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import watch_table
from rich.text import Text
from watch_text import (
    MOODS,
    PARTS,
    Signs,
    Sort,
    clock,
    curve,
    facts,
    fit,
    progress,
    when,
    wrapped,
)

from motley.live.snapshot import RankHistory, Row, Snapshot
from motley.text import rate_in_words

_FEWEST_EVENTS = 3


@dataclass(frozen=True)
class View:
    """What somebody has chosen to see.

    Attributes:
        sort: of the rows. rank: that is chosen. history: it is opened.
        run: the name of the chosen one of several. opened: it alone is shown.
        listed: all are shown, though one alone runs.
        keys: there are some, which the last line tells.
    """

    sort: Sort = Sort.FIT
    rank: int | None = None
    history: bool = False
    run: str = ""
    opened: bool = False
    listed: bool = False
    keys: bool = True

    def move(self, rows: Sequence[Row], by: int) -> "View":
        """The rank before or after the chosen one."""
        order = [row.rank for row in self.sort.of(rows)]
        if not order:
            return self
        place = order.index(self.rank) + by if self.rank in order else 0
        return replace(self, rank=order[max(0, min(place, len(order) - 1))])


def screen(now: Snapshot, view: View, width: int, height: int | None, signs: Signs) -> list[Text]:
    """A run.

    Args:
        height: lines; None: as many as there are to tell.
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
    """As much as there is room for; the foot is the last line."""
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
        said = f"loss {now.loss:.4g} "
        drawn = curve([loss for _, loss in now.losses], min(60, width - len(said)), signs)
        lines.append(Text.assemble(said, (drawn, "blue")))
    lines += wrapped(now.headline, width, 3, MOODS[now.mood])
    if now.link and now.link not in now.headline and width >= 40:
        lines.append(Text(fit(now.link, width, signs.cut).rstrip(), "dim"))
    for said in now.elsewhere[:2]:
        lines += wrapped(said, width, 2, "dim")
    if len(now.elsewhere) > 2:
        lines.append(Text(f"and {len(now.elsewhere) - 2} more hosts", "dim"))
    return lines + wrapped(now.problem, width, 5, "bold red")


def _table(now: Snapshot, view: View, width: int, room: int | None, signs: Signs) -> list[Text]:
    """The ranks; where not all have room, those around the chosen one."""
    if not now.rows:
        return []
    most = len(now.rows) if room is None else max(1, room - 2)
    rows = view.sort.of(now.rows, all_fit=not now.hidden and len(now.rows) <= most)
    place = next((place for place, row in enumerate(rows) if row.rank == view.rank), 0)
    first = max(0, min(place - most // 2, len(rows) - most))
    longest = max(sum(part or 0.0 for part in row.parts) for row in rows)
    rows = rows[first : first + most]
    widths = watch_table.columns(rows, width)
    lines = [watch_table.head(widths, signs)]
    lines += [watch_table.line(row, widths, longest, signs, row.rank == view.rank) for row in rows]
    hidden = now.hidden + len(now.rows) - len(rows)
    return [*lines, watch_table.legend(signs, longest, hidden, width)]


def _events(now: Snapshot, width: int, signs: Signs) -> list[Text]:
    lines = []
    for event in now.events:
        start = when(event.time) if width >= 40 else ""
        said = f"{event.kind.replace('_', ' ')}: {event.text}" if event.text else event.kind
        lines.append(Text.assemble((start, "dim"), fit(said, width - len(start), signs.cut)))
    return lines


def _history(now: Snapshot, history: RankHistory, width: int, signs: Signs) -> list[Text]:
    """Of one rank: how long each part of its steps took, and its device."""
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
        said = f"{name:11} {form.format(known[-1]):>10} "
        drawn = curve(known, max(0, min(60, width - len(said) - 24)), signs, zero=True)
        span = f" {form.format(min(known))} to {form.format(max(known))}"
        lines.append(Text.assemble(said, (drawn, "blue"), (span, "dim")))
    return lines


def runs_screen(
    runs: Sequence[Snapshot], view: View, width: int, height: int | None, signs: Signs
) -> list[Text]:
    """All runs, two lines each, the newest first."""
    said = f"{len(runs)} runs" if runs else "no run yet; it is waited for"
    lines = [Text(said, "bold")]
    foot = _foot(view, "q quit  ↑↓ choose  enter open")
    for now in runs:
        done = f" {min(1.0, now.step / now.last_step):.0%}" if now.last_step else ""
        left = f" {clock(now.left_s)} left" if now.left_s is not None else ""
        rate = (
            f" {rate_in_words(now.rate)} {now.unit}/s"
            if now.rate and now.status == "running"
            else ""
        )
        said = f"{now.name}  {now.status}{done}{left}{rate}"
        look = "reverse" if now.name == view.run else ""
        lines.append(Text(fit(said, width, signs.cut).rstrip(), look))
        lines.append(Text(fit(f"  {now.headline}", width, signs.cut).rstrip(), MOODS[now.mood]))
    return _cut(lines, foot, width, height)
