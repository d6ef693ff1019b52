"""Labels of one run and its ranks for pictures, and the choice of the run's typical steps."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from motley.errors import MotleyError
from motley.live.track import PARTS
from motley.plotting import command, style
from motley.records.costs import Training, column, lead, mean, median, read_training
from motley.records.gpu_csv import device_name
from motley.records.json_files import JsonDict
from motley.records.run_folder import RunFolder
from motley.text import plural

UNFINISHED = ("failed", "running", "stopped")


def read_or_say(folder: RunFolder) -> Training | None:
    """Return the records of a run. If the run has no steps, print a warning and return None."""
    try:
        return read_training(folder)
    except MotleyError as error:
        command.warn(error)
        return None


def title(training: Training) -> str:
    """Return a title with the run's name, model, ranks and result.

    The title also has the status, unless the run is finished.
    """
    run = training.run
    result, status = run.get("result") or {}, run.get("status")
    name = training.path.resolve().name + (f" ({status})" if status in UNFINISHED else "")
    what = str((run.get("task") or {}).get("title", ""))
    ranks = len(run.get("ranks") or training.steps)
    facts = [what, plural(ranks, "rank")]
    if result.get(training.headline) is not None:
        facts.append(f"final {style.metric(training.headline, result[training.headline])}")
    return f"{name}: {', '.join(filter(None, facts))}"


def usual_steps(training: Training) -> tuple[Training, str]:
    """Return the records of typical steps of the ranks that train now, and a phrase on these steps.

    The steps are the same for all ranks. The mean times of the parts of a step then add up to the
    same time, so all bars have the same length. Medians would not add up. Typical steps are the
    middle half of all steps by duration. With Local SGD, all steps are used, because only some of
    the steps end with an all-reduce.
    """
    now = training.last_launch() or training
    by_step = {rank: {line["step"]: line for line in lines if line.get("t_data") is not None}
            for rank, lines in now.steps.items()}  # fmt: skip
    common = sorted(set.intersection(*(set(lines) for lines in by_step.values())))
    if not common:
        return now, "each rank's own steps"
    words = f"{len(common)} steps"
    if not np.isnan(now.values("loss")).any() and len(common) > 3:
        took = {step: max(_seconds(lines[step]) for lines in by_step.values()) for step in common}
        by_length = sorted(common, key=lambda step: took[step])
        cut = len(common) // 4
        common = by_length[cut : len(common) - cut]
        words = f"the {len(common)} steps of usual length"
    chosen = set(common)
    steps = {rank: [line for step, line in lines.items() if step in chosen]
             for rank, lines in by_step.items()}  # fmt: skip
    return replace(now, steps=steps, lead=lead(steps)), words


def _seconds(line: JsonDict) -> float:
    return sum(line.get(part) or 0.0 for part in PARTS)


def seat_label(training: Training, rank: int) -> str:
    """Return a rank's label of two lines.

    The first line is the rank and its host, such as ``rank 0 - a``. The second line has the device,
    the precision and the number of samples per step.
    """
    worker, samples = training.worker(rank), median(column(training.steps[rank], "n_local"))
    first = f"rank {rank} - {worker['host']}" if worker.get("host") else f"rank {rank}"
    facts = [
        device_name(str(worker.get("device") or "")),
        str(worker.get("precision") or ""),
    ]
    facts.append("" if np.isnan(samples) else f"{samples:.0f} samples")
    return f"{first}\n{', '.join(filter(None, facts))}"


@dataclass(frozen=True)
class Other:
    """One of three positions that summarise the other ranks in the records of rank 0.

    The positions are: ready first, ready in the middle, and ready last.

    See :func:`motley.records.training.others_ready`.

    Attributes:
        label: name of the position, and on a second line the rank that was most often at it.
        ready_s: mean seconds until the gradient of the rank at this position was ready.
        wait_s: mean seconds that the rank at this position waited.
    """

    label: str
    ready_s: float
    wait_s: float


def list_others(training: Training) -> list[Other]:
    """Return the other ranks whose gradient is ready first, in the middle, and last.

    Each entry is a place in this order. Its times are means over the steps, and its label names the
    rank that has this place most often. The list is empty if each rank writes its own step records.
    In larger jobs, only the first rank writes step records (see
    motley.records.training.MOST_WRITERS).
    """
    lines = [line for line in training.lead if line.get("others_ready")]
    ranks = len(training.run.get("ranks") or ()) - 1
    result = []
    for name, word in (("least", "first"), ("middle", "middle"), ("largest", "last")):
        those = [line["others_ready"][name] for line in lines]
        last = [max(line["t_data"] + line["t_compute"], line["others_ready"]["largest"]["ready_s"])
                for line in lines]  # fmt: skip
        if not those:
            continue
        ((rank, times),) = Counter(each["rank"] for each in those).most_common(1)
        host = training.worker(rank).get("host")
        who = f"rank {rank}" + (f" - {host}" if host else "")
        waits = [end - each["ready_s"] for end, each in zip(last, those, strict=True)]
        result.append(Other(
            f"{word} of {ranks} others\nmost often {who} ({times / len(those):.0%})",
            mean(column(those, "ready_s")), mean(np.array(waits)),
        ))  # fmt: skip
    return result
