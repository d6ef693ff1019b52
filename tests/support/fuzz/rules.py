"""The rules that hold for every case."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fuzz import exports
from fuzz.cases import Case
from fuzz.play import ALONE, Job, Played, play, reference, unbroken, whole_checkpoints
from fuzz.reference import Reference
from safetensors.torch import load_file
from warm.ranks import WarmRanks

from motley.records.run_folder import RunFolder

EXACT = 2e-6  # of losses and norms in fp32, relative; more where rounding alone goes further
JUMPED = 2e-4  # of optimizers that look at a sign, of which rounding makes another step
JUMPS = 0.02  # of their numbers may have made one
ROUNDED = 0.2  # where somebody computes or sends in 16 bits
TOGETHER = ("fsdp", "zero2", "zero3")  # every pass of a rank waits for all
NOISE = 1e-7  # of a sum in fp32
SIXTEEN = ("bf16", "fp16")


def broken_rules(played: Played, ranks: WarmRanks) -> list[str]:
    """What is wrong with a case that was played; each begins with the name of its rule."""
    found = [problem for job in played.jobs for problem in _ending(job, played.case)]
    if found:
        return found
    if any(played.jobs[-1].ended.codes) and not played.jobs[-1].killed:
        return []  # refused, and well
    found = _records(played)
    if not found and not _is_inexact(played.case):
        with ALONE:
            found = _arithmetic(played)
    owed = len(played.jobs) > 1 and not (played.is_rescued and _has_own_state(played.case))
    if not found and owed and (whole := unbroken(played.case)):
        found = _twin(played, whole, ranks)
    return found


def _ending(job: Job, case: Case) -> list[str]:
    """How a job has ended."""
    output = job.ended.output
    tail = "\n".join(output.splitlines()[-30:])
    if job.ended.timed_out:
        return [f"hang: still running\n{tail}"]
    if "Traceback (most recent call last)" in output:
        return [f"traceback:\n{tail}"]
    due = min((f.step for f in job.segment.faults if f.kind == "kill"), default=None)
    steps = [line["step"] for lines in job.trace for line in lines if "step" in line]
    if due is not None and not job.killed and max(steps, default=-1) > due:
        return [f"kill: nobody was killed in step {due}"]  # the fuzzer has lost its hold
    if not any(job.ended.codes) or job.killed:
        return []
    said = job.said
    if not said:
        return [f"crash: exit codes {job.ended.codes}\n{tail}"]
    parts = [f"parts.{part}" for part in case.recipe.parts]
    if "--" not in said[0] and not any(part in said[0] for part in parts):
        return [f"refusal: it names no option: {said[0]}\n{tail}"]
    allowed = {"oom", "flip", "sender"} & {fault.kind for fault in job.segment.faults}
    if _can_halve(case):
        allowed -= {"oom"}
    if re.search(r", step \d+: ", said[0]) and not allowed:
        return [f"late: what was taken at the start ends the run: {said[0]}"]
    return []


def _can_halve(case: Case) -> bool:
    """Memory ends once, on a rank that has two samples or more in that batch."""
    segment, recipe = case.segments[0], case.recipe
    ooms = [fault for fault in segment.faults if fault.kind == "oom"]
    if len(case.segments) > 1 or len(ooms) != 1 or not segment.shares or recipe.bad_images:
        return False
    (fault,) = ooms
    if not 0 <= fault.rank < segment.ranks or segment.micro or segment.engine in TOGETHER:
        return False  # those cannot do a step again whose gradients have been sent
    sizes = [size for epoch in recipe.sizes() for size in epoch]
    size = sizes[min(fault.step, len(sizes) - 1)]
    return size * segment.shares[fault.rank] // sum(segment.shares) >= 2


# -- what the records say


def _records(played: Played) -> list[str]:
    folder, found = RunFolder(played.run), list[str]()
    run = json.loads((played.run / "run.json").read_text())
    if run["status"] != "finished" and not played.jobs[-1].killed:
        found.append(f"status: {run['status']}")
    found += _events(played)
    found += _evaluations(played, folder)
    found += _samples(played)
    found += _alike(played)
    found += _told(played)
    found += _random(played)
    found += _scale(played)
    return found


def _events(played: Played) -> list[str]:
    """Every event but a torn one is read; drift is noted once, if it was made."""
    path, found, drifts = played.run / "events.jsonl", list[str](), 0
    lines = path.read_bytes().splitlines() if path.exists() else []
    torn = sum(segment.after.count("tear_events") for segment in played.case.segments)
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            torn -= 1
    if torn < 0:
        found.append("events: more lines are torn than crashes have torn")
    read = RunFolder(played.run).read_events()
    if len(read) < len(events):
        found.append(f"events: {len(read)} of {len(events)} whole lines are read")
    torn_at = [n for n, job in enumerate(played.jobs) if "tear_events" in job.segment.after]
    if torn_at and any(job.start for job in played.jobs[torn_at[0] + 1 :]):  # else it began anew
        starts = sum(event["event"] == "resume" for event in read)
        if starts == 0:
            found.append("events: what a resumed run writes after a torn line is lost")
    drifts = sum(event["event"] == "drift" for event in events)
    flips = sum(f.kind == "flip" for job in played.jobs for f in job.segment.faults)
    if drifts > flips:
        found.append(f"drift: {drifts} notes of drift, and {flips} flipped bits")
    return found


def _evaluations(played: Played, folder: RunFolder) -> list[str]:
    steps = Counter(record["step"] for record in folder.read_epochs())
    twice = [step for step, count in steps.items() if count > 1]
    found = [f"evaluations: after step {step} there are {steps[step]}" for step in twice]
    return found or _best(played, folder)


def _best(played: Played, folder: RunFolder) -> list[str]:
    """The link names the checkpoint, of those that are there, with the least loss."""
    if played.case.recipe.keep_best is None or played.jobs[-1].killed:
        return []
    link = folder.checkpoints / "best"
    names = {record["step"]: f"step_{record['step']:08d}" for record in folder.read_epochs()}
    losses = {names[record["step"]]: record["loss"] for record in folder.read_epochs()
              if record["loss"] is not None}  # fmt: skip
    there = {name: loss for name, loss in losses.items() if (folder.checkpoints / name).is_dir()}
    linked = str(link.readlink()) if link.is_symlink() else None
    if linked is None and not there:
        return []
    if linked not in there or there[linked] != min(there.values()):
        return [f"best: the link names {linked}, and the losses are {there}"]
    return []


def _samples(played: Played) -> list[str]:
    """Ranks together use each sample once an epoch; each in micro-batches that it has room for."""
    for number, job in enumerate(played.jobs):
        size: dict[int, int] = {}
        if job.segment.micro is not None:
            micro = job.segment.micro
            size = dict(enumerate(micro * job.segment.ranks if len(micro) == 1 else micro))
        for rank, lines in enumerate(job.trace):
            evaluated = max((line["evaluates"] for line in lines if "evaluates" in line), default=0)
            trained = max((max(line["sizes"], default=0) for line in lines if "sizes" in line),
                          default=0)  # fmt: skip
            for what, most in (("trains", trained), ("evaluates", evaluated)):
                if size and most > size[rank]:
                    return [f"micro-batch: in job {number} rank {rank} {what} {most} at once, "
                            f"--micro-batch {size[rank]}"]  # fmt: skip
        found = _evaluation_shares(played, number, job) + _smaller(number, job)
        if found:
            return found
    return []


def _evaluation_shares(played: Played, number: int, job: Job) -> list[str]:
    """After a new split the ranks share an evaluation as they share a step."""
    counts, total = None, [0] * len(job.trace)
    for rank, lines in enumerate(job.trace):
        split = [place for place, line in enumerate(lines) if "replanned" in line]
        if any(job.ended.codes) or not split:
            return []
        counts = lines[split[-1]]["replanned"]
        after = [line for line in lines[split[-1] :] if "evaluates" in line]
        last = max((line["step"] for line in after), default=None)
        evaluated = sum(line["evaluates"] for line in after if line["step"] == last)
        total[rank] = evaluated // (2 if played.case.recipe.model_ema_decay else 1)
    wanted = [sum(total) * count / sum(counts or [1]) for count in counts or []]
    if any(abs(a - b) >= 1 for a, b in zip(total, wanted, strict=True)):
        return [f"plan of now: after the split {counts}, job {number} evaluates {total}"]
    return []


def _smaller(number: int, job: Job) -> list[str]:
    """Where memory has ended, nobody takes as much at once again, evaluation included."""
    for fault in job.segment.faults:
        if fault.kind != "oom" or fault.rank >= job.segment.ranks:
            continue
        lines = job.trace[fault.rank]
        again = next((place for place, line in enumerate(lines) if line.get("again")), None)
        if again is None:
            continue
        before = max(lines[again]["sizes"], default=0)
        for line in lines[again + 1 :]:
            most = max([*line.get("sizes", ()), line.get("evaluates", 0)])
            if before > 1 and most >= before and most > math.ceil(before / 2):
                return [f"plan of now: in job {number} rank {fault.rank} had no memory for "
                        f"{before} samples, and then takes {most}"]  # fmt: skip
    return []


def _alike(played: Played) -> list[str]:
    for number, job in enumerate(played.jobs):
        digests = {line["digest"] for lines in job.trace for line in lines if "digest" in line}
        if len(digests) > 1:
            return [f"drift: at the end of job {number} the ranks' parameters differ"]
        skips = [[(line["step"], line["overflow"]) for line in lines if "overflow" in line]
                 for lines in job.trace]  # fmt: skip
        for line in (line for lines in job.trace for line in lines if line.get("watched")):
            if job.segment.engine in TOGETHER:
                name = job.segment.engine
                return [f"watch: {line['watched']} ranks' times tell nothing at {name}"]
        local = job.segment.wire.startswith("local")
        if not local and not job.killed and any(skip != skips[0] for skip in skips):
            return [f"skips: in job {number} the ranks do not skip the same steps"]
    return []


def _random(played: Played) -> list[str]:
    """A job that goes on does not draw again what an earlier one has drawn."""
    if played.case.recipe.drop + played.case.recipe.drop_path == 0:
        return []
    seen: dict[str, tuple[int, int]] = {}  # the state of a rank: rank, and steps taken before
    for number, job in enumerate(played.jobs):
        for rank, lines in enumerate(job.trace):
            if not any(line.get("indices") for line in lines):
                continue  # it has drawn nothing
            for state in (line["random"] for line in lines if "random" in line):
                before = seen.setdefault(state, (rank, job.start))
                if before[1] != job.start:
                    return [f"random: rank {rank} of job {number} begins at step {job.start} with "
                            f"the random numbers of step {before[1]}"]  # fmt: skip
    return []


def _told(played: Played) -> list[str]:
    """A resume with other options says so."""
    events = RunFolder(played.run).read_events()
    notes = " ".join(str(event) for event in events if event["event"] == "resume")
    if any("tear_events" in job.segment.after for job in played.jobs):
        return []
    for number in range(1, len(played.jobs)):
        before, now = (played.case.options(played.case.segments[n]) for n in (number - 1, number))
        for name in now:
            flag = "--batch-size" if name == "ramp" else f"--{name.replace('_', '-')}"
            if name == "save_every" or played.jobs[number].killed or not played.jobs[number].start:
                continue
            if before[name] != now[name] and flag not in notes:
                return [f"resume: {flag} {before[name]} became {now[name]} without a word"]
    return []


def _scale(played: Played) -> list[str]:
    """A loss scale that is looked for at the start fits the batches that come first."""
    skipped = 0
    for job in played.jobs:
        if job.segment.loss_scale != "auto" or any(
            f.kind == "overflow" for f in job.segment.faults
        ):
            return []
        lines = job.trace[0] if job.trace else []
        skipped += sum(bool(line.get("overflow")) for line in lines)
    return [f"loss scale: {skipped} steps are skipped"] if skipped > 2 else []


# -- what the reference says


def _is_inexact(case: Case) -> bool:
    """No reference knows what it should come to."""
    return case.recipe.drop + case.recipe.drop_path > 0 or any(
        segment.wire.startswith(("powersgd", "local:"))
        and segment.wire not in ("local:1", "powersgd:64")
        for segment in case.segments
    )


def _has_own_state(case: Case) -> bool:
    """Each rank keeps something between two steps that others do not have."""
    return any(segment.wire.startswith(("powersgd", "local:")) for segment in case.segments)


def _arithmetic(played: Played) -> list[str]:
    rounded = any(
        set(segment.precision) & {*SIXTEEN} or segment.wire in SIXTEEN
        for segment in played.case.segments
    )
    wanted = reference(played, torch.float32)
    if rounded:
        due = Due(wanted, [], ROUNDED)
        return _steps(played, due) or _wanted_evaluations(played, due)
    others = [reference(played, torch.float64)]
    found: list[str] = []
    for draws in (range(1), range(1, 8)):  # one may spare the one number that rounding moves
        others += [reference(played, torch.float32, NOISE, draw) for draw in draws]
        for other in others:
            first, its = (each.trained.steps[0].loss for each in (wanted, other))
            if not math.isclose(first, its, rel_tol=1e-4):
                assert played.case.recipe.by_batch, "the reference is not itself"
                return []  # a group of nearly equal samples makes any rounding large
        due = Due(wanted, others, JUMPED if _jumps(played.case, wanted) else EXACT)
        found = (
            _steps(played, due) or _wanted_evaluations(played, due) or _checkpoint(played, due)
            or ([] if played.is_estimated else exports.broken(played, due))
        )  # fmt: skip
        if not found:
            break
    return found


def _jumps(case: Case, wanted: Reference) -> bool:
    """Return True if rounding makes the optimizer take another step: it looks at a sign, as Lion
    and those that are cautious do, or keeps numbers of 16 bits."""
    return case.recipe.opt.startswith("c") or "lion" in case.recipe.opt or wanted.keeps_16_bits


@dataclass(frozen=True)
class Due:
    """What a case should come to.

    Attributes:
        wanted: in fp32. others: the same but for rounding.
        bound: on what is measured, relative, besides 20 times what rounding does.
    """

    wanted: Reference
    others: list[Reference]
    bound: float

    def allows(self, read: Callable[[Reference], float], times: float = 1.0) -> float:
        """How far from the reference's a number may be.

        Args:
            read: takes it from a reference. times: the bound.
        """
        own = read(self.wanted)
        rounding = max((abs(own - read(other)) for other in self.others), default=0.0)
        return times * self.bound * abs(own) + 20 * rounding


def _steps(played: Played, due: Due) -> list[str]:
    records = RunFolder(played.run).read_steps().get(0, [])
    steps, killed = due.wanted.trained.steps, played.jobs[-1].killed
    numbers = [record["step"] for record in records]
    if numbers != list(range(len(numbers))):
        return [f"steps: the records of rank 0 are of steps {numbers}"]
    if len(records) != len(steps) and not killed:
        return [f"steps: {len(records)} were taken, {len(steps)} were due"]
    taken = _indices(played)
    for record, step in zip(records, steps, strict=False):
        number = record["step"]
        if record["epoch"] != step.epoch or record["n_global"] != len(step.samples):
            return [f"steps: step {number} is {record['n_global']} samples of epoch "
                    f"{record['epoch']}, due are {len(step.samples)} of {step.epoch}"]  # fmt: skip
        if number in taken and taken[number] != Counter(step.samples):
            return [f"samples: those of step {number} are not the reference's"]
        if abs(record["lr"] - step.lr) > 1e-9 * step.lr + 1e-15:
            return [f"schedule: step {number} has the learning rate {record['lr']:.9g}, due is "
                    f"{step.lr:.9g}"]  # fmt: skip
        if found := _numbers(record, number, due):
            return found
    return []


def _numbers(record: dict[str, Any], number: int, due: Due) -> list[str]:
    """Loss and gradient norm of a step."""
    for name, read, times in (
        ("loss", lambda made: made.trained.steps[number].loss, 1.0),
        ("grad_norm", lambda made: made.trained.steps[number].norm, 5.0),
    ):
        own, wanted, allowed = record[name], read(due.wanted), due.allows(read, times)
        if record["overflow"] and name == "grad_norm":
            continue
        if own is None or not abs(own - wanted) <= allowed:
            return [f"{name}: {own} in step {number}, due is {wanted} (+- {allowed:.2g})"]
    return []


def _indices(played: Played) -> dict[int, Counter[int]]:
    """The samples of each step, over all ranks of the job that took it last."""
    found: dict[int, Counter[int]] = {}
    for job in played.jobs:
        if job.killed:
            for step in [step for step in found if step >= job.start]:
                del found[step]
            continue
        here: dict[int, Counter[int]] = {}
        for lines in job.trace:
            own = {line["step"]: line["indices"] for line in lines
                   if "indices" in line and not line["again"]}  # fmt: skip
            for step, indices in own.items():
                here.setdefault(step, Counter()).update(indices)
        found |= here
    return found


def _wanted_evaluations(played: Played, due: Due) -> list[str]:
    found = {record["step"]: record for record in RunFolder(played.run).read_epochs()}
    steps, evaluations = due.wanted.trained.steps, due.wanted.trained.evaluations
    ends = [number + 1 for number, step in enumerate(steps) if step.end]
    if every := played.case.recipe.eval_every:
        ends = list(range(every, len(steps) + 1, every))
    if played.jobs[-1].killed:
        return []
    for taken in [*ends, len(steps)]:
        if taken not in found:
            return [f"evaluations: the one after step {taken} is missing"]
        if played.is_estimated:
            continue
        top1, loss, f1 = evaluations[taken]
        allowed = due.allows(lambda made, at=taken: made.trained.evaluations[at][1], 10.0)
        if not abs(found[taken]["loss"] - loss) <= allowed:
            return [f"evaluations: loss {found[taken]['loss']} after step {taken}, due is {loss}"]
        one = 1.5 / played.case.recipe.eval_images
        if due.others and abs(found[taken]["top1"] - top1) > one:
            return [f"evaluations: top-1 {found[taken]['top1']} after step {taken}, due is {top1}"]
        own = found[taken].get("f1_macro")
        if own is None and played.case.recipe.metrics:
            return [f"evaluations: the one after step {taken} has no F1"]
        # If rounding changes a prediction, both scores change.
        if own is not None and found[taken]["top1"] == top1 and abs(own - f1) > 1e-6:
            return [f"evaluations: F1 {own} after step {taken}, due is {f1}"]
    return []


def _checkpoint(played: Played, due: Due) -> list[str]:
    """The parameters of the last checkpoint are the reference's."""
    checkpoints, steps = whole_checkpoints(played), len(due.wanted.trained.steps)
    if played.jobs[-1].killed or not checkpoints:
        return []
    newest = checkpoints[-1]
    if int(newest.name.removeprefix("step_")) != steps:
        return [f"checkpoint: the last is {newest.name}, {steps} steps were due"]
    saved = load_file(newest / "model.safetensors")
    others = [other.parameters() for other in due.others]
    jumps, numbers = 0, 0
    for name, wanted in due.wanted.parameters().items():
        if played.is_estimated and _is_statistic(name):
            continue
        rounding = max(
            float((wanted - other[name].to(wanted.dtype)).abs().max()) for other in others
        )
        apart = (saved[name] - wanted).abs()
        off = ~(apart <= EXACT * max(0.1, float(wanted.abs().max())) + 20 * rounding)
        jumps, numbers = jumps + int(off.sum()), numbers + off.numel()
        if off.any() and not _jumps(played.case, due.wanted):
            return [f"checkpoint: {name} is {float(apart.max()):.2g} off, rounding explains "
                    f"{rounding:.2g}"]  # fmt: skip
    if jumps > JUMPS * numbers:
        return [f"checkpoint: {jumps} of {numbers} numbers are off"]
    return []


def _is_statistic(name: str) -> bool:
    return name.endswith((".running_mean", ".running_var"))


# -- the same without a break


def _twin(played: Played, whole: Case, ranks: WarmRanks) -> list[str]:
    """A run that was stopped and resumed on the same ranks is, to the bit, one that was not."""
    other = play(whole, ranks, played.folder.with_name("unbroken"))
    if any(other.jobs[-1].ended.codes) or played.jobs[-1].killed:
        return []
    if _plan(played) != _plan(other):
        return []  # each was measured, and not alike
    own, due = (RunFolder(each.run).read_steps()[0] for each in (played, other))
    if len(own) != len(due):
        return [f"resume: {len(own)} steps, {len(due)} without a break"]
    for mine, theirs in zip(own, due, strict=True):
        for name in ("loss", "lr", "overflow", "loss_scale", "grad_norm"):
            if mine[name] != theirs[name] and None not in (mine[name], theirs[name]):
                return [f"resume: {name} of step {mine['step']} is {mine[name]!r}, without a break "
                        f"{theirs[name]!r}"]  # fmt: skip
    last, end = (whole_checkpoints(each)[-1:] for each in (played, other))
    if last and end and last[0].name == end[0].name:
        for part in ("model", "optimizer"):
            a, b = (load_file(each[0] / f"{part}.safetensors") for each in (last, end))
            for name in b:
                if played.is_estimated and _is_statistic(name):
                    continue
                if name not in a or not torch.equal(a[name], b[name]):
                    return [f"resume: {part} {name} at the end is not what it is without a break"]
    return []


def _plan(played: Played) -> list[Any]:
    """Who does how much, as run.json has it."""
    plan = RunFolder(played.run).read_run()["plan"]
    return [plan[key] for key in ("counts", "micro_batches", "buckets", "wire")]
