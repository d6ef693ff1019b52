"""The refusals of bridges to other frameworks, one line each.

MOTLEY_SHARES=1 python tests/support/drivers/framework_refusals.py
"""

import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

import accelerate
import transformers
from framework_loop import Network, Texts, collate
from torch.utils.data import DataLoader

import motley
from motley.errors import MotleyError


def refuse(action: Callable[[], Any]) -> None:
    try:
        action()
    except MotleyError as error:
        print(f"refused: {error}", flush=True)
    else:
        print("accepted", flush=True)


def make_trainer(kind: Any, model: Any = None, **options: Any) -> Any:
    args = transformers.TrainingArguments(
        tempfile.mkdtemp(), report_to=[], use_cpu=True, disable_tqdm=True, **options
    )
    small = transformers.GPT2Config(vocab_size=23, n_embd=16, n_layer=1, n_head=2)
    model = model or transformers.GPT2LMHeadModel(small)
    return kind(model=model, args=args, train_dataset=Texts(20), data_collator=collate)


def gather_in_pieces() -> None:
    accelerator = lab.accelerate(accelerate.Accelerator(cpu=True))
    loader = accelerator.prepare(Network(), DataLoader(Texts(9), 6, collate_fn=collate))[1]
    for rows in loader:
        accelerator.gather(rows["labels"])


trainers: Any = importlib.import_module("motley.library.integrations.transformers")


class OwnLoss(trainers.Trainer):
    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)


class Stated(OwnLoss):
    loss_is_scaled_for_ga = True


refuse(lambda: make_trainer(trainers.Trainer))
lab = motley.join(micro_batch=2)
refuse(lambda: make_trainer(trainers.Trainer, auto_find_batch_size=True))
refuse(lambda: make_trainer(trainers.Trainer, train_sampling_strategy="batch_rebalance"))
refuse(lambda: make_trainer(OwnLoss))
refuse(lambda: make_trainer(Stated))
refuse(lambda: make_trainer(trainers.Trainer).train("/no/such/checkpoint"))
refuse(gather_in_pieces)
prepared = accelerate.Accelerator(cpu=True)
prepared.prepare(Network())
refuse(lambda: lab.accelerate(prepared))
if importlib.util.find_spec("lightning"):
    bridge = importlib.import_module("motley.library.integrations.lightning")
    refuse(bridge.MotleyStrategy)
