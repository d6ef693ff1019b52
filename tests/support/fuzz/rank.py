"""One rank of a case: trains as any rank does, writes down what it sees, and suffers its faults."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import fuzz.model  # noqa: F401
import torch
import torch.distributed as dist
from torch import Tensor

import motley.train.loop
import motley.train.setup
import motley.train.start
import motley.train.train_model
from motley.config.options import Config
from motley.data.source import Batch
from motley.engines.protocol import LaunchedStep, StepResult
from motley.engines.strategies import TORCH, ZERO
from motley.launch.ranks import Launched
from motley.launch.world import World, run
from motley.plan.replan import Proposal, ReplanMonitor
from motley.train.start import train

LOOP = {str(each.__file__) for each in (motley.train.loop, motley.train.start)}
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes (fuzz)"
# What somebody says to rank 0 who has no token.
STRANGERS = (b"[" * 200_000 + b"\n", b"{}\n" * 1000, b"\xff\x00" * 9000, b"[1]\nnull\n\n", b"")


class Probe:
    """Sees what an engine is asked to do; makes its rank's faults happen.

    Args:
        trace: where the rank's steps and evaluations go, a line of JSON each.
        faults: of the segment, those of other ranks too.
    """

    def __init__(self, rank: int, faults: list[dict[str, Any]], trace: Path) -> None:
        self.rank, self._faults = rank, faults
        self._trace = trace.open("a", buffering=1)
        self._indices: list[int] = []
        self._sizes: list[int] = []
        self._begun = False
        self._done: set[int] = set()  # faults, by their place
        self.world: World

    def write(self, **content: Any) -> None:
        """Add a line to the trace."""
        self._trace.write(json.dumps(content) + "\n")

    def due(self, kind: str, step: int | None = None) -> dict[str, Any] | None:
        """This rank's fault of a kind in a step, by default the one that is computed; once."""
        step = self.world.supervisor.step if step is None else step
        for place, fault in enumerate(self._faults):
            mine = fault["rank"] in (self.rank, -1)
            if fault["kind"] == kind and fault["step"] == step and mine and place not in self._done:
                self._done.add(place)
                return fault
        return None

    def attach(self, engine: Any, model: torch.nn.Module) -> None:
        """Watch this engine."""
        self._engine, self._model = engine, model
        engine.accumulate = partial(self._accumulate, engine.accumulate)
        engine.launch_step = partial(self._launch_step, engine.launch_step)
        engine.evaluate = partial(self._evaluate, engine.evaluate)
        first = next(part for name, part in model.net.named_modules() if name == "blocks.1")
        first.register_forward_hook(self._passes)

    def _accumulate(self, then: Callable[..., None], batch: Batch, *rest: Any) -> None:
        if not self._begun:
            self._begun = True
            cuda = torch.cuda.is_available()
            state = torch.cuda.get_rng_state() if cuda else torch.get_rng_state()
            random = state.numpy().tobytes()
            self.write(random=hashlib.sha256(random).hexdigest())
        self._indices += batch.indices
        self._sizes.append(len(batch))
        then(batch, *rest)

    def _launch_step(self, then: Callable[[bool], LaunchedStep], late: bool) -> LaunchedStep:
        if stranger := self.due("stranger"):
            self._visit(STRANGERS[stranger["call"] % len(STRANGERS)])
        launched, step = then(late), self.world.supervisor.step
        indices, sizes = self._indices, self._sizes
        self._indices, self._sizes = [], []

        def read() -> StepResult:
            result = launched.read()
            self.write(
                step=step, indices=indices, sizes=sizes, overflow=result.overflow,
                again=bool(result.oom_ranks and result.retry),
            )  # fmt: skip
            if fault := self.due("flip", step):
                self._flip(fault["call"])
            return result

        return replace(launched, read=read)

    def _evaluate(self, then: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        self.write(evaluates=len(batch), step=self.world.supervisor.step)
        return then(batch)

    def _passes(self, _block: object, _given: object, made: Tensor) -> None:
        """A block has computed: memory may end, here or on the way back, where a gradient may
        become infinite too."""
        if not made.requires_grad or self.world.supervisor.step is None:
            return
        if fault := self.due("oom"):
            if fault["call"] == 0:
                raise RuntimeError(NO_MEMORY)
            made.register_hook(_fail)
        if self.due("sender"):
            self._break_sender()
        if self.due("overflow"):
            made.register_hook(self._overflow)

    def _overflow(self, gradient: Tensor) -> Tensor:
        self.write(overflowed=self.world.supervisor.step)
        return gradient * torch.inf

    @torch.no_grad()
    def _flip(self, what: int) -> None:
        parameter = next(p for p in self._model.parameters() if p.requires_grad)
        target = parameter
        if what == 1:
            slots = self._engine.optimizer.state.get(parameter, {})
            target = next((v for v in slots.values() if getattr(v, "shape", ()) == parameter.shape),
                          parameter)  # fmt: skip
        target.data.view(torch.int32).view(-1)[0] ^= 1 << 22  # changes it by a half at most

    def _break_sender(self) -> None:
        """Have the thread that sends the next bucket run out of memory."""

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError(NO_MEMORY)

        dist.all_reduce = dist.isend = fail

    def _visit(self, words: bytes) -> None:
        """Knock at rank 0's port, without a token."""
        there = self.world.supervisor._own.place.listening[0]

        def knock() -> None:
            with socket.create_connection((there.address, there.port)) as line:
                line.sendall(words)
                line.settimeout(5)
                while line.recv(4096):
                    pass

        threading.Thread(target=lambda: _ignore(knock), daemon=True).start()

    def digest(self) -> None:
        """Write down what this rank holds at the end, where each holds the whole."""
        if not self._engine.replicated:
            return
        sha = hashlib.sha256()
        for tensor in self._model.net.state_dict().values():
            sha.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        self.write(digest=sha.hexdigest())

    def kill_at(self, fault: dict[str, Any]) -> None:
        """Have this process killed where the loop has got back from so many of its calls."""
        left = fault["call"]

        def look(frame: FrameType, event: str, _: Any) -> None:
            nonlocal left
            back = frame.f_back
            if event != "return" or back is None or back.f_code.co_filename not in LOOP:
                return
            world = getattr(self, "world", None)  # there is none while ranks meet
            step = world and world.supervisor.step
            if step is None or step < fault["step"]:
                return
            if left == 0 or step > fault["step"]:  # it had fewer
                if fault["rank"] < 0:
                    os.killpg(0, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

        sys.setprofile(look)


def _fail(_: Tensor) -> Tensor:
    raise RuntimeError(NO_MEMORY)


def _ignore(call: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        call()


class Told(ReplanMonitor):
    """Proposes the splits that the case tells it to, and no others."""

    def __init__(self, probe: Probe, speeds: Any) -> None:
        super().__init__((), ())
        probe.write(watched=len(speeds))
        self._probe = probe

    def step(self, ready_s: Any, counts: Any, full: Any = None) -> Proposal | None:
        """See ReplanMonitor."""
        if fault := self._probe.due("replan"):
            self._probe.write(replanned=fault["counts"])
            return Proposal(tuple(fault["counts"]), (1.0,) * len(fault["counts"]), 0.5)
        return None


class Makers:
    """An engine maker whose engines are watched."""

    def __init__(self, makers: Any, probe: Probe) -> None:
        self._makers, self._probe, self.traits = makers, probe, makers.traits

    def __call__(self, model: Any, context: Any) -> Any:
        """See motley.engines.protocol.EngineFactory."""
        engine = self._makers(model, context)
        self._probe.attach(engine, model)
        return engine


def main(launched: Launched, argument: dict[str, Any]) -> None:
    """Train as the argument's command line says, through the training script."""
    torch.set_num_threads(1)
    words = argument["arguments"]
    sys.argv = ["train_vit.py", *words]
    faults = argument["faults"]
    probe = Probe(launched.rank, faults, Path(argument["trace"]) / f"{launched.rank}.jsonl")
    for fault in faults:
        if fault["kind"] == "kill" and fault["rank"] in (launched.rank, -1 - launched.rank):
            probe.kill_at(fault)

    def watched(world: World, config: Config, engines: Any, **more: Any) -> None:
        probe.world = world
        train(world, config, Makers(engines, probe),
              monitor=lambda speeds, _: Told(probe, speeds), **more)  # fmt: skip
        probe.digest()

    script = motley.train.train_model
    motley.train.start.train = watched  # type: ignore[assignment]
    script.run = lambda work, **_: run(work, launched)  # type: ignore[assignment]
    script.train_script(ZERO if argument["deepspeed"] else TORCH, "a case of the fuzzer")
