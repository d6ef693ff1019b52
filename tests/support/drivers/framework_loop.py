"""Training by another framework's own loop, bare or on all ranks of a lab.

python tests/support/drivers/framework_loop.py accelerate '[{"epochs": 2}]' OUT.json
"""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plain_loop import kill_rank
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Sampler

import motley
from motley.library.loop_state import LoopPosition, LoopState
from motley.library.sample_order import SampleOrder

WORDS = 23


@dataclass
class Case:
    """One training. ``bare``: the framework by itself, on one machine.

    ``batch`` is the global batch, of all ranks together.
    """

    framework: str
    bare: bool = False
    batch: int = 12
    rows: int = 60
    epochs: int = 3
    accumulate: int = 1
    clip: float = 0.05
    micro: int | None = None
    manual: bool = False
    tokens: bool = False
    rank_batch: int = 0
    folder: str = ""
    save: bool = False
    resume: bool = False
    steps: int = -1
    masked: bool = False  # a model whose loss is a mean over labels, whatever their number is
    smooth: float = 0.0  # a loss of the Trainer's own, which is such a mean too
    slow: int | None = None  # rank that takes 10 ms for each row
    kill: list[int] = field(default_factory=list)  # rank, step, place; see kill_rank


class Texts(Dataset[Any]):
    """Rows of tokens of different lengths; every row is the same in each run."""

    def __init__(self, rows: int, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 12, (rows,), generator=generator).tolist()
        self.rows = [torch.randint(1, WORDS, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index]}


class Shuffled(Sampler[int]):
    """Another order in each epoch. Lightning leaves a random sampler before its last draw."""

    def __init__(self, rows: int) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.rows, generator=generator).tolist()


SLOW = [False]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if SLOW[0]:
        time.sleep(0.01 * len(rows))
    pad = nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    masks = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": pad(ids, batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
        "attention_mask": pad(masks, batch_first=True),
    }


class Network(nn.Module):
    """A small model of token rows; the loss is a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, WORDS))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.head(self.embedding(batch["input_ids"]))
        return logits

    def row_losses(self, batch: dict[str, Tensor]) -> Tensor:
        each = functional.cross_entropy(
            self(batch).transpose(1, 2), (batch["input_ids"] * 7 + 3) % WORDS, reduction="none"
        )
        mask = batch["attention_mask"].float()
        return (each * mask).sum(1) / mask.sum(1)

    def token_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean over tokens, and their number."""
        counts = batch["attention_mask"].sum(1)
        return (self.row_losses(batch) * counts).sum() / counts.sum(), counts.sum()


def train_transformers(case: Case, lab: Any) -> dict[str, Any]:
    import peft
    import transformers

    if lab is None:
        trainer_class = transformers.Trainer
    else:
        trainer_class = importlib.import_module("motley.library.integrations.transformers").Trainer
    transformers.utils.logging.disable_progress_bar()
    losses, norms, scores, counts = [], [], [], []

    class Notes(transformers.TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            for name, values in (("loss", losses), ("grad_norm", norms), ("eval_loss", scores),
                                 ("eval_right", scores)):  # fmt: skip
                if name in logs:
                    values.append(float(logs[name]))

    def compute_metrics(predicted: Any) -> dict[str, float]:
        counts.append(list(predicted.predictions.shape))
        known = predicted.label_ids != -100
        right = (predicted.predictions.argmax(-1) == predicted.label_ids)[known]
        return {"right": float(right.mean())}

    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    if case.masked:
        model = transformers.BertForMaskedLM(transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ))  # fmt: skip
    else:
        lora = peft.LoraConfig(
            r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0
        )
        model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    ranks = 1 if lab is None else lab.size
    args = transformers.TrainingArguments(
        case.folder, per_device_train_batch_size=case.batch // case.accumulate // ranks,
        per_device_eval_batch_size=6 // ranks, gradient_accumulation_steps=case.accumulate,
        num_train_epochs=case.epochs, max_steps=case.steps, logging_steps=1, report_to=[],
        use_cpu=True, learning_rate=0.01, max_grad_norm=case.clip, eval_strategy="epoch",
        save_strategy="steps", save_steps=3, disable_tqdm=True, eval_do_concat_batches=True,
        label_smoothing_factor=case.smooth,
    )  # fmt: skip
    trainer = trainer_class(
        model=model, args=args, train_dataset=Texts(case.rows), eval_dataset=Texts(17, 6),
        data_collator=collate, callbacks=[Notes()], compute_metrics=compute_metrics,
    )  # fmt: skip
    trainer.train(
        resume_from_checkpoint=f"{first_folder(case)}/checkpoint-3" if case.resume else None
    )
    states = {
        name: p.double().flatten().tolist()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    result = trainer.predict(Texts(17, 6))
    predicted = result.predictions[result.label_ids != -100].astype(float).ravel().tolist()
    return {"losses": losses, "norms": norms, "scores": scores, "states": states,
            "counts": counts, "predicted": predicted}  # fmt: skip


def first_folder(case: Case) -> str:
    """Return the folder of the first case, whose training is resumed."""
    return f"{case.folder.rpartition('-')[0]}-0"


def decay(step: int) -> float:
    return float(0.9**step)


def train_accelerate(case: Case, lab: Any) -> dict[str, Any]:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=case.accumulate)
    if lab is not None:
        accelerator = lab.accelerate(accelerator)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    train = DataLoader(Texts(case.rows), case.batch // case.accumulate, True, collate_fn=collate)
    held_out = DataLoader(Texts(17, 6), 6, collate_fn=collate)
    model, optimizer, train, held_out, schedule = accelerator.prepare(
        model, optimizer, train, held_out, schedule
    )
    first = 0
    if case.resume:
        accelerator.load_state(first_folder(case))
        first = 3
    losses: list[float] = []
    norms, scores, counts, total, done = [], [], [], 0.0, first
    for _ in range(case.epochs):
        model.train()
        loader = accelerator.skip_first_batches(train, first) if first else train
        first = 0
        for batch in loader:
            with accelerator.accumulate(model):
                loss, tokens = model.row_losses(batch).mean(), None
                if case.tokens:
                    loss, tokens = model.token_loss(batch)
                accelerator.backward(loss, **({"weight": tokens} if tokens and lab else {}))
                if not (case.micro and lab):
                    size = case.batch // case.accumulate
                    total += accelerator.gather(loss.detach().repeat(size)).mean().item()
                    counts.append(float(accelerator.reduce(loss.detach(), "mean")))
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), case.clip)
                    if float(norm):
                        norms.append(float(norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and (lab is None or lab.stepped):
                by_lab = lab is not None and bool(case.micro or case.tokens or case.kill)
                losses.append(lab.loss * case.accumulate if by_lab else total)
                total, done = 0.0, done + 1
                if case.save and done == 3 and not case.resume:
                    accelerator.save_state(case.folder)
        model.eval()
        seen = []
        for batch in held_out:
            with torch.no_grad():
                rows = accelerator.gather_for_metrics(model.row_losses(batch))
                seen += rows.tolist()
        scores.append(seen)
    states = {n: p.double().flatten().tolist() for n, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "scores": scores, "states": states,
            "counts": [] if case.micro or case.tokens or case.kill else counts,
            "rate": schedule.get_last_lr()}  # fmt: skip


def train_lightning(case: Case, lab: Any) -> dict[str, Any]:
    import lightning
    import torchmetrics

    losses: list[float] = []
    norms: list[float] = []
    scores: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()
            self.right = torchmetrics.MeanMetric()
            self.automatic_optimization = not case.manual

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.network.row_losses(batch).mean()
            if case.tokens:
                loss, tokens = self.network.token_loss(batch)
                self.log("loss", loss, on_step=True, on_epoch=True, batch_size=int(tokens))
                return {"loss": loss, "weight": tokens}
            self.log("loss", loss, on_step=True, on_epoch=True)
            if case.manual:
                optimizer, schedule = self.optimizers(), self.lr_schedulers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, case.clip, "norm")
                optimizer.step()
                schedule.step()
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))

        def on_train_batch_end(self, *_: Any) -> None:
            losses.append(float(self.trainer.callback_metrics["loss_step"]))

        def on_train_epoch_end(self) -> None:
            scores.extend(float(self.trainer.callback_metrics[k]) for k in ("held_out", "right"))

        def validation_step(self, batch: Any, number: int) -> None:
            rows = self.network.row_losses(batch)
            self.right.update(rows)
            self.log("held_out", rows.mean())
            self.log("right", self.right)

        def predict_step(self, batch: Any, number: int) -> Any:
            return self.network.row_losses(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
            scheduler = {"scheduler": schedule, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def make_strategy() -> Any:
        if lab is None:
            return "auto"
        module = importlib.import_module("motley.library.integrations.lightning")
        return module.MotleyStrategy()

    trainer = lightning.Trainer(
        strategy=make_strategy(), accelerator="cpu", devices=1, logger=False,
        max_epochs=case.epochs, accumulate_grad_batches=case.accumulate,
        default_root_dir=case.folder, enable_checkpointing=case.save,
        gradient_clip_val=None if case.manual else case.clip,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = Texts(case.rows)
    order = Shuffled(case.rows)
    size = case.batch // case.accumulate
    train = DataLoader(data, size, sampler=order, collate_fn=collate)
    held_out = DataLoader(Texts(17, 6), 6, collate_fn=collate)
    module = Module()
    path = f"{case.folder}.ckpt"
    if case.save:
        half = lightning.Trainer(
            strategy=make_strategy(), accelerator="cpu", devices=1, max_epochs=2, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        half.fit(module, train, held_out)
        half.save_checkpoint(path)
        module = Module()
    trainer.fit(module, train, held_out, ckpt_path=path if case.save else None)
    predicted = torch.cat(trainer.predict(module, held_out)).tolist()
    states = {n: p.double().flatten().tolist() for n, p in module.named_parameters()}
    return {"losses": losses, "norms": norms, "scores": scores, "states": states,
            "predicted": predicted}  # fmt: skip


def main(framework: str, cases: list[dict[str, Any]], out: Path) -> None:
    bare = any(case.get("bare") for case in cases)
    lab: Any = None
    if not bare:
        lab = motley.join(
            micro_batch=cases[0].get("micro"), logs=str(out.parent / "logs"), run=out.stem
        )
    train = globals()[f"train_{framework}"]
    results = []
    for content in cases:
        torch.manual_seed(0)
        if lab is not None:  # each case is a script of its own
            lab._saver.position = lab._position = LoopPosition()
            lab._loop.order = SampleOrder()
            vars(lab._state).update(vars(LoopState()))
        case = Case(framework, **content)
        SLOW[0] = lab is not None and lab.rank == case.slow
        if lab is not None and case.kill:
            kill_rank(*case.kill)
        results.append(train(case, lab))
    if lab is None or lab.is_main:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
