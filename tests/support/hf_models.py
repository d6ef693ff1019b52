"""Tiny models of transformers: what config.json says of them, and whole folders."""

import json
from pathlib import Path
from typing import Any

TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64},
    "gpt_neo": {
        "num_layers": 2, "hidden_size": 32, "num_heads": 4, "max_position_embeddings": 64,
        "window_size": 16, "attention_types": [[["global", "local"], 1]],
    },
    "llama": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    },
    "bert": {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    },
    "t5": {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4},
}  # fmt: skip


def config_of(folder: Path, kind: str, **changed: Any) -> Path:
    """A config.json of one of :data:`TINY`, in a folder of its own."""
    path = folder / f"{kind}-config" / "config.json"
    path.parent.mkdir(exist_ok=True)
    usual = {"model_type": kind, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    path.write_text(json.dumps({**usual, **TINY.get(kind, {}), **changed}))
    return path


def pretrained_folder(folder: Path, text: str, tokens: int = 300) -> Path:
    """A GPT-2 with random weights and a byte-level BPE learnt from a text, as saved by the library.

    Args:
        tokens: that the tokenizer and the model know.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    config = config_of(folder, "gpt2", vocab_size=tokens)
    torch.manual_seed(5)
    path = folder / "pretrained"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.parent))
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return path
