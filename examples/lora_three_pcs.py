"""Fine-tune a small decoder with LoRA and the Trainer of transformers on unequal PCs.

python examples/lora_three_pcs.py                                         # in one process
mpirun -np 3 --hostfile hosts.txt ./entry_cn.sh examples/lora_three_pcs.py

Needs: pip install "transformers[torch]" peft. Each PC computes its share of every batch. Only
the lines with ``motley`` and ``lab`` are new. For your own model and data, replace the
configuration by ``AutoModelForCausalLM.from_pretrained(...)``, and the rows by your own tokens.
"""

import tempfile

import peft
import torch
import transformers
from torch import nn

import motley
from motley.library.integrations.transformers import Trainer


def make_rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return rows that count upwards from random numbers, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 24, (count,), generator=generator).tolist()
    starts = torch.randint(40, (count,), generator=generator).tolist()
    pairs = zip(starts, lengths, strict=True)
    return [{"input_ids": torch.arange(start, start + length)} for start, length in pairs]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    labels = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {
        "input_ids": labels.clamp(min=0),
        "labels": labels,
        "attention_mask": (labels >= 0).long(),
    }


lab = motley.join()
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config)
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
args = transformers.TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=8, num_train_epochs=2, learning_rate=1e-2,
    eval_strategy="epoch", save_strategy="no", report_to=[], logging_steps=10, disable_tqdm=True,
    use_cpu=lab.device.type == "cpu",
)  # fmt: skip
trainer = Trainer(
    model=model, args=args, train_dataset=make_rows(160, 1), eval_dataset=make_rows(30, 2),
    data_collator=collate,
)  # fmt: skip
trainer.train()
lab.print(f"loss of held-out rows: {trainer.evaluate()['eval_loss']:.3f}")
