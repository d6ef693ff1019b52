"""A task of the user's own: found in a file, its fields are options, its mistakes are explained."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

from motley.errors import MotleyError
from motley.tasks.builtin import get_task, task_class
from motley.tasks.check import check_task
from motley.tasks.model import TaskModel
from motley.tasks.net import build_net
from motley.train.command_line import config_from, read_config, training_parser

TASK = """
from dataclasses import dataclass
import random
import torch
from torch import nn
from motley.tasks.task import Task

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.two = nn.Linear(4, 1)
        INIT

    def forward(self, x):
        FORWARD
        if self.training and hasattr(self, "means"):
            self.means.data.lerp_(x.mean(0), 0.1)
        if hasattr(self, "rows"):
            x = x + self.rows(x[:, 0].long())
        if hasattr(self, "norm"):
            x = self.norm(x[:, None])[:, 0]
        return self.two(self.one(x).tanh())

@dataclass
class Mine(Task):
    width: int = 3
    rate: float = 0.5
    careful: bool = True
    note: str | None = None

    def model(self):
        return Net()

    def data(self, held_out):
        return range(9)

    def sample(self, item, training):
        x = torch.full((3,), item + 1.0)
        SAMPLE
        return {"x": x, "y": torch.tensor(1.0)}

    def losses(self, net, batch):
        each = (net(batch["x"]).squeeze(1) - batch["y"]) ** 2
        return LOSSES
"""
USUAL = {"INIT": "pass", "FORWARD": "pass", "SAMPLE": "pass", "LOSSES": "each"}


def written(folder: Path, text: str = TASK, **changed: str) -> Path:
    for word, put in {**USUAL, **changed}.items():
        text = text.replace(word, put)
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(text))
    return path


def model_of(path: Path) -> TaskModel:
    config = read_config(training_parser(""), ["--task", str(path)])
    task = get_task(config)
    return TaskModel(task, build_net(task, config), "fp32", torch.device("cpu"))


def test_fields_are_options_and_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    words = ["--width", "7", "--no-careful", "--note", "a b", f"--task={written(tmp_path)}"]
    config = read_config(training_parser(""), words)
    task = get_task(config)
    assert (task.width, task.rate, task.careful, task.note) == (7, 0.5, False, "a b")  # type: ignore[attr-defined]
    saved = config.as_json()
    assert saved["width"] == 7 and "model" not in saved
    assert vars(get_task(config_from(saved))) == vars(task)


CACHE = "self.register_buffer('cache', torch.zeros(0), persistent=False)"


@pytest.mark.parametrize("changed", [{}, {"INIT": CACHE, "FORWARD": "self.cache = x.detach()"}])
def test_what_is_right_is_not_complained_about(tmp_path: Path, changed: dict[str, str]) -> None:
    model = model_of(written(tmp_path, **changed))
    check_task(model)
    assert model.training and all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize(
    ("word", "put", "says"),
    [
        ("LOSSES", "each.mean()", r"shape \(\) for 2 samples.* reduction"),
        ("LOSSES", "each.mean().repeat(len(each))", "depends on the other samples of its batch"),
        ("LOSSES", "net(batch['x']) - 1", r"shape \(2, 1\) for 2 samples"),
        ("LOSSES", "each > 0", r"returns a tensor of torch.bool; return a tensor of floats"),
        ("SAMPLE", "x = x + random.random()", "two different 'x' for the same sample"),
        ("SAMPLE", "return x, 1", "returns a tuple; return a dictionary of the model's inputs"),
        ("SAMPLE", "x = x[: item + 1]", "cannot be stacked: stack expects.* write collate"),
        ("INIT", "self.spare = nn.Linear(2, 2)", "2 of the 6 parameters of Mine get no gradient"),
        ("INIT", "self.layers = [nn.Linear(3, 3)]", "modules or parameters in layers, a list"),
        ("FORWARD", "x = x.cumsum(0)", "nn.LSTM does without batch_first"),
        ("FORWARD", "x = x * torch.rand(1)", "other losses in a second pass over the same batch"),
        ("INIT", "self.register_buffer('means', torch.zeros(3))",
         r"a forward pass of Mine changes means\. .* a codebook by a term of the loss"),
        ("INIT", "self.words = nn.Embedding(9, 4, max_norm=9.0)",
         r"changes words\.weight\. .* leave out max_norm"),
        ("INIT", "nn.utils.spectral_norm(self.one)", r"changes one\.weight_u.*matrix_norm"),
        ("INIT", "nn.utils.parametrizations.spectral_norm(self.one)",
         r"changes one\.parametrizations\.weight\.0\._u.*matrix_norm"),
        ("INIT", "self.norm = nn.InstanceNorm1d(1, track_running_stats=True)",
         r"changes norm\.running_mean, .* set track_running_stats=False"),
        ("INIT", "self.rows = nn.Embedding(9, 3, sparse=True)",
         r"the gradient of rows\.weight in .* is sparse, .* leave out sparse=True"),
        ("INIT", "self.requires_grad_(False)", "Mine has no parameter that can be trained"),
    ],
)  # fmt: skip
def test_a_usual_mistake_is_explained(tmp_path: Path, word: str, put: str, says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        check_task(model_of(written(tmp_path, **{word: put})))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def broken(:\n    pass\n", r"line 1: .*: def broken\(:"),
        ("x = 1\nimport no_such_thing.deep\n", "imports no_such_thing, which is not installed"),
        ("\n\n1 / 0\n", "line 3: ZeroDivisionError"),
        ("x = 1\n", "defines no task"),
        (f"{TASK}\nclass Other(Task):\n    pass\n", "defines 2 tasks, Mine and Other"),
        ("from motley.tasks.task import Task\nclass A(Task): pass\n", r"A has no model\(\) and"),
        (TASK.replace("width: int = 3", "width: int"), "width has no default"),
        (TASK.replace("width: int = 3", "width: bytes = b''"), "which an option cannot have"),
        (TASK.replace("width: int", "lr: float"), "Mine.lr would become the option --lr"),
        (TASK.replace("width: int", "model: int"), "Mine.model is a field and a method"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SystemExit) as stop:
        read_config(training_parser(""), ["--task", str(path)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.search(says, error.replace("\n", " ")), error


def test_an_unknown_task_is_answered_with_the_nearest() -> None:
    with pytest.raises(MotleyError, match=r"--task imag is unknown \(nearest: image"):
        task_class("imag")
    with pytest.raises(MotleyError, match=r"no_such.py: the file does not exist"):
        task_class("no_such.py")
