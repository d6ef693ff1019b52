"""What won in a matrix, and why, in sentences."""

from collections.abc import Sequence

from plot_baselines import LOST, lost

from motley.sweep.matrix import REFERENCE
from motley.sweep.results import DONE
from motley.sweep.table import Row

_WRONG = 0.01  # of the loss: what 30 steps in 16 bits differ by is a tenth of it
_TIE = 0.02  # of the rate


def verdict(rows: Sequence[Row]) -> list[str]:
    """Sentences, the most important first; the fp32 references take no part."""
    measured = [row for row in rows if row.samples_per_s and not row.name.startswith(REFERENCE)]
    sane = [row for row in measured if not is_wrong(row)]
    said = []
    if sane:
        ranked = sorted(sane, key=lambda row: -(row.samples_per_s or 0))
        said.append(_winner(ranked))
        if why := _where_it_went(ranked[0]):
            said.append(why)
        said += _frugal(ranked)
    for row in measured:
        if is_wrong(row):
            said.append(
                f"{row.name} ends with a loss {row.loss_difference:+.1%} from the fp32 run of the "
                "same samples: its speed is worth nothing until that is understood."
            )
    if sane and not any(map(is_wrong, measured)):
        known = [abs(row.loss_difference) for row in sane if row.loss_difference is not None]
        if known:
            said.append(f"All losses are those of the fp32 run to {max(known):.0e} of it.")
    if leaky := [row for row in measured if row.leak_mib]:
        words = ", ".join(f"{row.name} ({row.leak_mib:.3g} MiB a step)" for row in leaky)
        said.append(f"Memory grows to the end of the run: {words}.")
    failed = [row for row in rows if row.outcome != DONE]
    if failed:
        words = ", ".join(f"{row.name} ({row.outcome})" for row in failed)
        said.append(f"{len(failed)} of {len(rows)} did not end well: {words}.")
    return said or ["Nothing is done yet."]


def is_wrong(row: Row) -> bool:
    """Its loss is not that of the same samples in fp32."""
    return row.loss_difference is not None and abs(row.loss_difference) > _WRONG


def _winner(ranked: Sequence[Row]) -> str:
    best = ranked[0]
    words = f"{best.name} is the fastest: {best.rate}"
    if best.fraction_of_limit:
        words += f", {best.fraction_of_limit:.2f} of what these machines can do together"
        if best.is_compiled:
            words += " without --compile"
    if len(ranked) > 1:
        ratio = (best.samples_per_s or 0) / (ranked[1].samples_per_s or 1)
        words += f"; {ranked[1].name} comes next, " + (
            "as fast within the noise" if ratio < 1 + max(_TIE, best.spread or 0)
            else f"{ratio:.2f} times slower"
        )  # fmt: skip
    return f"{words}."


def _where_it_went(row: Row) -> str:
    """What the fastest still loses, where it is worth a word."""
    parts = {
        name: part for name, part in lost(row).items() if part > 0.01 * (row.samples_per_s or 0)
    }
    if not parts or not row.samples_per_s:
        return ""
    whole = row.samples_per_s + sum(lost(row).values())
    shares = sorted(parts, key=lambda name: -parts[name])
    words = ", ".join(f"{LOST[name].label} {parts[name] / whole:.0%}" for name in shares)
    return f"What it misses of the limit: {words}."


def _frugal(ranked: Sequence[Row]) -> list[str]:
    """Who needs the least memory, and the least energy, where that is somebody else."""
    said = []
    by_memory = [(memory, row) for row in ranked if (memory := most_memory(row)) is not None]
    if len(by_memory) > 1:
        memory, row = min(by_memory, key=lambda pair: pair[0])
        best = most_memory(ranked[0])
        if row is not ranked[0] and best is not None and memory < 0.95 * best:
            said.append(
                f"{row.name} needs the least memory: {memory:,.0f} MiB on the fullest host, where "
                f"{ranked[0].name} needs {best:,.0f}; it makes {row.rate}."
            )
    with_joules = [row for row in ranked if row.joules]
    if len(with_joules) > 1:
        row = min(with_joules, key=lambda each: each.joules or 0)
        if row is not ranked[0]:
            said.append(f"{row.name} needs the least energy: {row.joules:.3g} J a sample.")
    return said


def most_memory(row: Row) -> float | None:
    """MiB, of the host that holds most."""
    values = [float(part.rsplit(" ", 1)[1]) for part in row.memory_mib.split(", ") if part]
    return max(values, default=None)
