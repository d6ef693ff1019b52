"""What records say, in words that no terminal and no page stumbles over. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from motley.records.json_files import JsonDict
from motley.records.training import EMA, EpochRecord

_LONGEST = 2000  # characters


def plain(text: object) -> str:
    """A text on one line, without what moves a cursor or turns the direction of writing; None is
    empty."""
    said = "" if text is None else " ".join(str(text)[:_LONGEST].split())
    return "".join(each if each.isprintable() else "?" for each in said)


def part(share: float) -> str:
    """As in 34 %."""
    return f"{100 * share:.0f} %"


def mapping(about: Mapping[str, Any], name: str) -> JsonDict:
    """An object of run.json; empty if it is not there."""
    found = about.get(name)
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Event:
    """One of events.jsonl. time: seconds since the epoch, None: unknown."""

    time: float | None
    kind: str
    text: str


def evaluation(line: JsonDict | None) -> str:
    """As in ``top1 0.9722, loss 0.1021 (epoch 9)``."""
    if not line:
        return ""
    metrics = EpochRecord.metrics_of(line)
    said = [f"{name} {value:.4g}" for name, value in metrics.items()
            if isinstance(value, int | float) and not name.startswith(EMA)]  # fmt: skip
    return plain(f"{', '.join(said)} (epoch {line.get('epoch')})") if said else ""


_SAID = {
    "overflow": "step {step} is skipped: its gradient is not finite at the loss scale {loss_scale}",
    "loss_scale": "the loss scale is {value} from step {step} on",
    "left_out": "rank {rank} on {host} is left out: {reason}",
    "fault": "rank {rank} on {host}, step {step}: {error}",
    "lost": "rank {rank} on {host} is lost in step {step}; the others go on",
    "silent": "rank {rank} on {host} is silent",
    "heard_again": "rank {rank} on {host} is heard again",
    "waited_for": "all wait for rank {rank} on {host}, which is {doing}",
    "unreadable": "{sample} cannot be read",
    "finished": "after {steps} steps",
}


def event(line: JsonDict) -> Event:
    """One of events.jsonl, in words."""
    kind, when = str(line["event"]), line.get("time")
    text = line.get("text")
    if not isinstance(text, str):
        told = {name: "?" if value is None else value for name, value in line.items()}
        if isinstance(step := line.get("step"), int):
            told["step"] = step + 1  # as people count
        text = _SAID.get(kind, "").format_map(_Told(told))
    return Event(when if isinstance(when, int | float) else None, plain(kind), plain(text))


class _Told(dict[str, Any]):
    """Fields of an event; one that it lacks is a question mark."""

    def __missing__(self, key: str) -> str:
        return "?"
