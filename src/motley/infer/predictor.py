"""A trained model, and its predictions for samples on one device."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from motley.checkpoint.read import checkpoints_at, load_newest_intact
from motley.data.source import Batch, Source, Tensors, UnreadableSample, read
from motley.engines.named_state import select_part
from motley.engines.out_of_memory import in_halves
from motley.errors import MotleyError
from motley.measure.process_group import confirmed, promised_precision
from motley.tasks.builtin import SAMPLES, check_classes, get_task
from motley.tasks.model import TaskModel, set_matmul_precision
from motley.tasks.task import Net, Task
from motley.train.command_line import config_from


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and the task on which it was trained.

    Attributes:
        folder: folder of the checkpoint.
        weights: parameters and buffers by name, on the CPU.
        task: the task.
        sample_list: fingerprint of the samples in the training; see ``Task.sample_list``. Empty if
            the checkpoint has no fingerprint.
        average: moving average of the parameters by name. Empty if the average is not used. A tied
            parameter has one entry, under its first name.
        problems: error messages of newer checkpoints that are damaged.
        net: the network with its weights; None: :meth:`build` makes the network.
    """

    folder: Path
    weights: dict[str, Tensor]
    task: Task
    sample_list: str = ""
    average: dict[str, Tensor] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    net: nn.Module | None = None

    def build(self) -> nn.Module:
        """Return the network with its weights, on the CPU, in evaluation mode."""
        if self.net is not None:
            return self.net.eval()
        net = self.task.model()
        net.load_state_dict(self.weights)
        # Loaded last, since a tied parameter has more names in the weights than in the average.
        net.load_state_dict(self.average, strict=False)
        return net.eval()


def open_trained(
    path: Path, data_dir: str | None, own: Path | None = None, averaged: bool = False
) -> Trained:
    """Load the newest intact checkpoint of a run.

    Args:
        path: one checkpoint's folder, ``checkpoints/``, or a run folder.
        data_dir: current folder of the data; None: the folder that the training used.
        own: a folder of samples that replace the held-out samples; None: use the held-out samples.
        averaged: True: use the moving average of the parameters.

    Raises:
        MotleyError: there is no intact checkpoint, or the checkpoint has no average.
    """
    result = checkpoints_at(path)
    if not result:
        raise MotleyError(f"{path} has no checkpoint; name the folder of a run")
    folder, tensors, progress, problems = load_newest_intact(result, ("config",), ("model", "ema"))
    saved = progress["config"]
    if data_dir is not None:
        saved = {**saved, "data_dir": data_dir}
    task = get_task(config_from(saved))
    check_classes(task, saved)
    weights, average = select_part(tensors, "model"), dict[str, Tensor]()
    if averaged and not (average := select_part(tensors, "ema")):
        raise MotleyError(
            f"--use-ema: {folder} has no averaged parameters, because it was trained without "
            "--model-ema; leave out --use-ema"
        )
    chosen = task.with_files(own) if own else task
    return Trained(folder, weights, chosen, saved.get(SAMPLES, ""), average, tuple(problems))


def select_precision(asked: str, device: torch.device) -> str:
    """Return the precision that ``--precision`` selects on this device."""
    if asked != "auto":
        return asked
    return confirmed(*promised_precision(device), device)[0]


@dataclass
class Predictor:
    """A trained model on one device, with its predictions.

    Attributes:
        trained: the model.
        source: the samples.
        device: the device.
        precision: the precision of the computation.
        threads: number of threads that read samples.
        predict: function that returns the predictions of a batch, like Task.predict; None: use
            Task.predict.
        on_unreadable: function that is called with a message for each sample that cannot be read.
            The sample is then left out. None: an unreadable sample raises an error.
        places: place of each sample for messages, such as a line of a file. A sample that the
            task's ``sample()`` refuses is then left out, too. Empty: use Task.name_of.
        columns: names of the columns of a row.
        samples: number of samples for which predictions were computed.
        seconds: seconds that reading and computing these samples took.
    """

    trained: Trained
    source: Source
    device: torch.device
    precision: str
    threads: int
    predict: Callable[[Net, Tensors], Mapping[str, Sequence[Any]]] | None = None
    on_unreadable: Callable[[str], None] | None = None
    places: Sequence[str] = ()
    columns: tuple[str, ...] = ()
    samples: int = 0
    seconds: float = 0.0
    _model: TaskModel = field(init=False)

    def __post_init__(self) -> None:
        set_matmul_precision(self.precision)
        task = self.trained.task
        self._model = TaskModel(task, self.trained.build(), self.precision, self.device).eval()
        scores = self._predict(Batch(self._model.blank(), (0,)))
        self.columns = ("index", task.noun, *scores)
        self._pool = ThreadPoolExecutor(self.threads, "read")

    def rows(self, items: Sequence[int]) -> Iterator[tuple[object, ...]]:
        """Yield one row with :attr:`columns` per sample, in the order of ``items``."""
        start, task = time.perf_counter(), self.trained.task
        samples = zip(items, self._pool.map(self._read, items), strict=True)
        known = {index: sample for index, sample in samples if sample is not None}
        if not known:
            return
        items = list(known)
        batch = Batch(task.collate(list(known.values())), tuple(items)).to(self.device)
        parts = in_halves(lambda part: self._predict(batch[part]), slice(0, len(items)))
        rows = [row for part in parts for row in zip(*part.values(), strict=True)]
        self.samples += len(items)
        self.seconds += time.perf_counter() - start
        for index, row in zip(items, rows, strict=True):
            yield index, task.name_of(self.source, index), *row

    @property
    def mem_peak_mib(self) -> float:
        """Peak memory of the GPU in MiB. On a CPU, current memory of this process in MiB."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return float(psutil.Process().memory_info().rss) / 2**20

    def _read(self, index: int) -> Mapping[str, Any] | None:
        task = self.trained.task
        try:
            return task.sample(read(self.source, index), training=False)
        except UnreadableSample as error:
            name = self.places[index] if self.places else task.name_of(self.source, index)
            text = f"{name} cannot be read ({error}); repair or remove it"
        except Exception as error:
            if not self.places:
                raise
            text = (
                f"{self.places[index]}: sample() raised {type(error).__name__}: {error}; correct "
                "the row"
            )
        if self.on_unreadable is None:
            raise MotleyError(text)
        self.on_unreadable(text)
        return None

    @torch.inference_mode()
    def _predict(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        predict = self.predict or self.trained.task.predict
        return predict(self._model.compute, batch.data)
