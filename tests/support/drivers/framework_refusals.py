"""The refusals of bridges to other frameworks, one line each.

MOTLEY_SHARES=1 python tests/support/drivers/framework_refusals.py
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import torch
import transformers
from framework_loop import Network, Texts, collate
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

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


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from Texts(9).rows


def train_batch_norm() -> None:
    accelerator = lab.accelerate(accelerate.Accelerator(cpu=True))
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    data = DataLoader(TensorDataset(torch.ones(9, 3)), 6)
    model, loader = accelerator.prepare(model, data)
    for (rows,) in loader:
        accelerator.backward(model(rows).mean())


def prepare_endless() -> None:
    accelerator = lab.accelerate(accelerate.Accelerator(cpu=True))
    accelerator.prepare(DataLoader(Endless(), 6))


def accelerate_by(kind: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state._shared_state["distributed_type"] = accelerate.DistributedType(kind)
    try:
        lab.accelerate(accelerator)
    finally:
        accelerator.state._shared_state["distributed_type"] = accelerate.DistributedType.NO


def refuse_lightning() -> None:
    import lightning

    bridge = importlib.import_module("motley.library.integrations.lightning")
    refuse(bridge.MotleyStrategy)
    lab._loop.schedule._micro_batch = None

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, gathers: bool) -> None:
            super().__init__()
            self.layer, self.gathers = nn.Linear(3, 3), gathers

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.layer(batch[0]).mean()
            return self.all_gather(loss, sync_grads=True) if self.gathers else None

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(gathers: bool) -> None:
        trainer = lightning.Trainer(
            strategy=bridge.MotleyStrategy(), accelerator="cpu", devices=1, max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(gathers), DataLoader(TensorDataset(torch.ones(9, 3)), 6))

    refuse(lambda: fit(False))
    refuse(lambda: fit(True))


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
small = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2,
         "output_router_logits": True}  # fmt: skip
experts = transformers.MixtralForCausalLM(transformers.MixtralConfig(**small))
refuse(lambda: make_trainer(trainers.Trainer, experts))
refuse(lambda: make_trainer(OwnLoss))
refuse(lambda: make_trainer(Stated))
refuse(lambda: make_trainer(trainers.Trainer).train("/no/such/checkpoint"))
refuse(gather_in_pieces)
prepared = accelerate.Accelerator(cpu=True)
prepared.prepare(Network())
refuse(lambda: lab.accelerate(prepared))
refuse(lambda: accelerate_by("FSDP"))
refuse(prepare_endless)
refuse(train_batch_norm)
if importlib.util.find_spec("lightning"):
    refuse_lightning()
