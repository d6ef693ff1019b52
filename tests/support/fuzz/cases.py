"""What a case is: a way to train, and the history of a run that trains so."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fuzz.model import BY_BATCH, PARTS, PIXELS, name_of
from timm.optim import list_optimizers

from motley.errors import MotleyError
from motley.plan.precision import PRECISIONS
from motley.text import did_you_mean

ENGINES = ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")
FAULTS = ("kill", "oom", "sender", "overflow", "flip", "replan", "stranger")
AFTER = ("tear_events", "flip_checkpoint", "empty_manifest", "list_manifest", "list_progress",
         "pickle_tensors")  # fmt: skip
BAD_IMAGES = ("empty", "text", "cut", "bomb")


@dataclass(frozen=True)
class Fault:
    """What happens to a rank, in a step.

    Attributes:
        kind: kill: this rank, or with rank -1 all at once, when the ``call``-th function that the
            loop has called in this step returns. oom: an allocation fails, in the forward pass or,
            with ``call`` 1, the backward pass. sender: one fails in a thread that sends. overflow:
            a gradient is infinite. flip: a bit of the first parameter changes after the step, or
            with ``call`` 1 one of its first moment. replan: the loop is told to split by
            ``counts``. stranger: somebody who has no token sends what ``call`` says to rank 0.
    """

    kind: str
    step: int
    rank: int = 0
    call: int = 0
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Segment:
    """One job; the next one resumes it.

    Attributes:
        shares: of the ranks; none: as the plan finds by measuring.
        stop: ``--max-steps`` of this job; None: it goes to the end.
        changed: options that are other than the recipe's from here on.
        brief: a resume whose command line has no numbers but those that are changed.
        after: what happens to the files once it has ended.
    """

    engine: str = "ddp"
    ranks: int = 1
    shares: tuple[int, ...] = (1,)
    micro: tuple[int, ...] | None = None
    precision: tuple[str, ...] = ("fp32",)
    wire: str = "auto"
    loss_scale: str = "auto"
    recompute: str | None = None
    stop: int | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    brief: bool = False
    faults: tuple[Fault, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """What is trained, whoever computes it. Names are those of the options.

    Attributes:
        batch_size: the largest one. ramp: the first one, by how many samples it grows, and over how
            many; empty: all are alike.
        samples: of an epoch. sides: pixels of the images of a folder, width and height; empty:
            digits. bad_images: files among them that are no images; "digits" has none.
        parts: of the model; see fuzz.model. bn_group: samples of a batch norm's group.
        model_ema_decay: of the average of the parameters; None: there is none.
        eval_every: steps between evaluations; None: one an epoch.
        class_weights: of the loss. balanced_sampling: an epoch has equally many of each class.
        aug_splits: images of a training sample, which ``aa`` changes; jsd_loss: compares them.
        test_crops: of a held-out image. metrics: a further metric of an evaluation.
    """

    opt: str = "adamw"
    batch_size: int = 8
    ramp: tuple[int, ...] = ()
    ramp_lr: str = "none"
    samples: int = 24
    epochs: int = 2
    lr: float = 1e-3
    clip_grad: float | None = None
    weight_decay: float = 0.05
    smoothing: float = 0.1
    warmup_epochs: float = 0.5
    min_lr: float = 1e-5
    drop: float = 0.0
    drop_path: float = 0.0
    save_every: int | None = None
    eval_images: int = 7
    seed: int = 0
    bad_images: tuple[str, ...] = ()
    sides: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    bn_group: int = 1
    model_ema_decay: float | None = None
    clip_mode: str = "norm"
    eval_every: int | None = None
    keep_best: str | None = None
    weight_decay_end: float | None = None
    lr_cycle_limit: int = 1
    warmup_steps: int | None = None
    warmup_lr: float | None = None
    lr_noise: tuple[float, ...] | None = None
    class_weights: str | None = None
    balanced_sampling: bool = False
    aug_splits: int = 1
    aa: str | None = None
    jsd_loss: bool = False
    test_crops: int = 1
    metrics: str | None = None

    @property
    def by_batch(self) -> bool:
        """The model takes statistics of groups of samples."""
        return not BY_BATCH.isdisjoint(self.parts)

    @property
    def of_folder(self) -> bool:
        """The images are files."""
        return bool(self.bad_images or self.sides)

    def sizes(self) -> list[list[int]]:
        """Samples of each epoch's steps."""
        return [list(self._sizes(epoch * self.samples)) for epoch in range(self.epochs)]

    def _sizes(self, used: int) -> Iterator[int]:
        left = self.samples
        while left:
            size = min(left, size_after(used, self.batch_size, self.ramp))
            yield size
            used, left = used + size, left - size


def size_after(used: int, most: int, ramp: tuple[int, ...]) -> int:
    """Samples of a whole step that begins after ``used`` of the run; see :class:`Recipe`."""
    if not ramp or used >= ramp[2]:
        return most
    first, by, over = ramp
    return first + by * (used * ((most - first) // by) // over)


@dataclass(frozen=True)
class Case:
    """One case; ``str`` is the JSON that makes it again."""

    recipe: Recipe = field(default_factory=Recipe)
    segments: tuple[Segment, ...] = (Segment(),)

    def __str__(self) -> str:
        return json.dumps(_short(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> "Case":
        """Read it; MotleyError if it is no JSON or names what does not exist."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise MotleyError(
                f"--case is not valid JSON: {error}; quote it as the fuzzer has printed it, as in "
                '--case \'{"recipe":{"opt":"lamb"}}\''
            ) from None
        case = _build(Case, content, "the case")
        _check(case)
        return case

    def options(self, segment: Segment) -> dict[str, Any]:
        """The recipe's options as this segment has them."""
        return {**dataclasses.asdict(self.recipe), **segment.changed}

    def arguments(self, number: int, logs: str, folder: str, brief: bool = False) -> list[str]:
        """The command line of a segment.

        Args:
            folder: of images, for a recipe with files. brief: see :class:`Segment`.
        """
        segment = self.segments[number]
        words = ["--logs", logs, "--run", "run", "--keep", "99", "--gpu-log-interval", "100",
                 "--workers", "0"]  # fmt: skip
        words += ["--model", name_of(self.recipe.parts), "--img-size", str(PIXELS)]
        if self.recipe.of_folder:
            words += ["--dataset", "folder", "--data-dir", folder, "--bad-images", "skip",
                      "--no-augment"]  # fmt: skip
        given = {"samples": self.recipe.samples, "bn_group": self.recipe.bn_group}
        whole = self.options(segment)
        if segment.brief and "warmup_epochs" in segment.changed:
            whole["warmup_steps"] = (
                None  # what is typed for a resume counts before the checkpoint's
            )
        words += self._words(given | segment.changed if brief else whole)
        if segment.shares:
            words += ["--shares", ",".join(map(str, segment.shares))]
        words += ["--precision", ",".join(segment.precision)]
        words += _flags({
            "micro_batch": segment.micro and ",".join(map(str, segment.micro)),
            "wire": segment.wire, "loss_scale": segment.loss_scale, "max_steps": segment.stop,
            "grad_checkpointing": segment.recompute,
        })  # fmt: skip
        if segment.engine == "fsdp":
            words += ["--strategy", "fsdp"]
        if segment.engine.startswith("zero"):
            words += ["--stage", segment.engine.removeprefix("zero")]
        return words + (["--resume", "auto"] if number else [])

    def _words(self, options: dict[str, Any]) -> list[str]:
        """Return the words for options of a recipe."""
        given, words = dict(options), list[str]()
        for name in ("parts", "sides", "bad_images"):
            given.pop(name, None)
        samples = given.pop("samples", None)
        if samples is not None and not self.recipe.of_folder:
            words += ["--data-fraction", repr(samples / DIGITS)]
        if ramp := given.pop("ramp", ()):
            given["batch_size"] = "{0}:{3}:{1}/{2}".format(*ramp, given["batch_size"])
        if not self.recipe.by_batch:
            given.pop("bn_group", None)
        for name in ("balanced_sampling", "jsd_loss"):
            if given.pop(name, False):
                words += [f"--{name.replace('_', '-')}"]
        if given.get("model_ema_decay") is not None:
            words += ["--model-ema"]
        return words + _flags(given)


DIGITS = 1437  # training images


def _flags(given: dict[str, Any]) -> list[str]:
    return [word for name, value in given.items() if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip


def _short(value: Any) -> Any:
    """As JSON has it, without what is as usual."""
    if isinstance(value, tuple | list):
        return [_short(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    found = {}
    for entry in dataclasses.fields(value):
        own = getattr(value, entry.name)
        usual = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            usual = entry.default_factory()
        if own != usual:
            found[entry.name] = _short(own)
    return found


_PARTS = {"recipe": Recipe, "segments": Segment, "faults": Fault}


def _build(kind: type, content: Any, where: str) -> Any:
    if not isinstance(content, dict):
        raise MotleyError(f"--case: {where} is {content!r}, and has to be a JSON object")
    known = {entry.name for entry in dataclasses.fields(kind)}
    given = {}
    for name, value in content.items():
        if name not in known:
            raise MotleyError(f"--case: {where} has no key {name!r}{did_you_mean(name, known)}")
        part = _PARTS.get(name)
        if part is Recipe:
            value = _build(part, value, name)
        elif part is not None:
            value = tuple(_build(part, item, name) for item in _listed(value, name))
        elif isinstance(value, list):
            value = tuple(value)
        given[name] = value
    try:
        return kind(**given)
    except TypeError as error:
        raise MotleyError(f"--case: {where}: {error}") from None


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise MotleyError(f"--case: {name} is {value!r}, and has to be a list")
    return value


def _check(case: Case) -> None:
    """MotleyError for a word that no part of the fuzzer knows."""

    def one_of(what: str, word: Any, known: tuple[str, ...]) -> None:
        if word not in known:
            near, some = did_you_mean(str(word), known), ", ".join(known[:9])
            raise MotleyError(f"--case: there is no {what} {word!r}{near}; such as {some}")

    if not case.segments:
        raise MotleyError('--case: segments is empty; give one, as in [{"ranks":2}]')
    name = case.recipe.opt.removeprefix("lookahead_")
    one_of("optimizer", name, tuple(list_optimizers()))
    for kind in case.recipe.bad_images:
        one_of("bad image", kind, BAD_IMAGES)
    for part in case.recipe.parts:
        one_of("part of a model", part, tuple(PARTS))
    names = tuple(entry.name for entry in dataclasses.fields(Recipe))
    for segment in case.segments:
        one_of("engine", segment.engine, ENGINES)
        for precision in segment.precision:
            one_of("precision", precision, PRECISIONS)
        if not isinstance(segment.ranks, int) or segment.ranks < 1:
            raise MotleyError(f"--case: ranks is {segment.ranks!r}; give 1 or more")
        for fault in segment.faults:
            one_of("fault", fault.kind, FAULTS)
        for word in segment.after:
            one_of("damage", word, AFTER)
        for name in segment.changed:
            one_of("option", name, names)
