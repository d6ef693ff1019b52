"""The options of a text task that name a model of the transformers library, and that have LoRA
train it; and what such a model asks of the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from motley.config.option import Decides, above_zero, names, option, positive
from motley.errors import MotleyError
from motley.tasks.corpus import TOKENIZER, Corpus
from motley.tasks.hf_model import HfModel
from motley.tasks.lora import add_lora, beside_lora, matrices, merge_lora
from motley.tasks.task import Task

MODEL, NUMBERS, SPEED, NOTHING = (
    Decides.MODEL, Decides.NUMBERS, Decides.SPEED, Decides.NOTHING,
)  # fmt: skip


@dataclass(frozen=True)
class HfOptions(Task):
    """A text task is one of these, besides what it has of its own."""

    compiles_whole = True  # logits are the largest tensor of all, and are not written so

    hf_config: str | None = option(
        "a model of the transformers library (GPT-2, GPT-Neo, Llama, ...) with random weights: its "
        "config.json, or a folder with one (needs: pip install transformers)",
        NOTHING, metavar="FILE|DIR",
    )  # fmt: skip
    pretrained: str | None = option(
        "such a model with its weights: a folder with config.json, *.safetensors and the files of "
        "its tokenizer; nothing is downloaded",
        NUMBERS, metavar="DIR",
    )  # fmt: skip
    lora: int | None = option(
        "train matrices of this rank beside the model's layers, which stay as they are: a small "
        "part of the gradient to send (needs: pip install peft)",
        MODEL | SPEED, read=positive, metavar="R",
    )  # fmt: skip
    lora_alpha: float | None = option(
        "what they say counts A / R, default 1", MODEL, read=above_zero, metavar="A"
    )
    lora_targets: tuple[str, ...] | None = option(
        "last words of the layers' names, as in q_proj,v_proj; default: peft's own for the kind of "
        "model",
        MODEL | SPEED, read=names, metavar="NAME,...",
    )  # fmt: skip

    @cached_property
    def named(self) -> HfModel | None:
        """The model that ``--hf-config`` or ``--pretrained`` names."""
        if self.pretrained:
            return HfModel(Path(self.pretrained), "--pretrained", with_weights=True)
        if self.hf_config:
            return HfModel(Path(self.hf_config), "--hf-config", with_weights=False)
        return None

    def check_together(self, shape: Sequence[str], tokens: str | None) -> None:
        """MotleyError for options that say nothing, or two things.

        Args:
            shape: options of the built-in model that were given. tokens: ``--tokens``.
        """
        if self.hf_config and self.pretrained:
            raise MotleyError("--hf-config and --pretrained are two models; leave one out")
        named = self.hf_config or self.pretrained
        if named and shape:
            raise MotleyError(
                f"--{shape[0]} is of the GPT that is built in, and the config.json of {named} "
                "says its own; leave one of them out"
            )
        if tokens == TOKENIZER and not (named and Path(named).is_dir()):
            raise MotleyError(
                f"--tokens {TOKENIZER} is that of a model's folder; name it by --pretrained DIR or "
                "--hf-config DIR"
            )
        if self.lora is None and (self.lora_alpha or self.lora_targets):
            raise MotleyError(
                f"--lora-{'alpha' if self.lora_alpha else 'targets'} is of --lora, which is not "
                "given; add --lora 8"
            )

    def check_fits(self, model: HfModel, length: int, corpus: Corpus) -> None:
        """MotleyError for what the model cannot see or does not know."""
        if model.longest is not None and length > model.longest:
            raise MotleyError(
                f"--length {length}: {model.said} sees {model.longest} tokens at most "
                f"(max_position_embeddings, or n_positions); give --length {model.longest} or less"
            )
        if corpus.vocabulary > model.vocabulary:
            raise MotleyError(
                f"--tokens {corpus.kind}: there are {corpus.vocabulary} of them, and {model.said} "
                f"knows {model.vocabulary} (vocab_size); choose other --tokens, or another model"
            )

    @property
    def begins_with_weights(self) -> bool:
        """See Task."""
        return self.named is not None and self.named.with_weights

    def pretrained_weights(self) -> tuple[dict[str, Tensor], str] | None:
        """See Task."""
        if self.named is None or not self.named.with_weights:
            return None
        return self.named.weights(), str(self.named.path)

    def head(self, net: nn.Module) -> tuple[str, ...]:
        """See Task: what begins anew beside weights from elsewhere."""
        return matrices(net)

    def adapt(self, tensors: dict[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
        """See Task."""
        return beside_lora(tensors, net)

    def save(self, net: nn.Module, folder: Path) -> None:
        """See Task: as transformers loads it, its tokenizer too; LoRA's matrices are added to the
        layers that they stand beside."""
        if self.lora is not None:
            merge_lora(net)
        if self.named is None:
            super().save(net, folder)
            return
        self.named.save(net, folder)

    def with_lora(self, net: nn.Module) -> nn.Module:
        """The network, as ``--lora`` wants it."""
        if self.lora is None:
            return net
        return add_lora(net, self.lora, self.lora_alpha, self.lora_targets)
