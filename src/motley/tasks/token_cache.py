"""The tokens of a text, split into training and held-out part, and their cache on the disk.

A text is encoded once per host. All ranks of the host map the cache file into memory. The cache
file is a safetensors file, because reading safetensors runs no code. The file's name is a hash of
the text's content, the tokenizer and the options. A reader of the file verifies the hash of the
tokens.
"""

import fcntl
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.cluster.account import cache_folder
from motley.errors import MotleyError
from motley.tasks.corpus import KINDS, Codec, Encoded, Part, TokenizerCodec, make_alphabet, turns
from motley.tasks.text_sources import Document, Sources
from motley.text import plural

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HELD_OUT = 0.1  # fraction that is held out if the user names neither a fraction nor a text
_VERSION = 1
_SMALL = 2**20  # bytes of a text that is encoded anew by each rank
_AT_ONCE = 512  # documents that are encoded at once
_EVERY_S = 5.0  # time between two lines of progress


@dataclass(frozen=True)
class TextSpec:
    """A specification of a text and of its encoding to tokens.

    Attributes:
        train: the text.
        validation: text that is held out; None: a part of ``train`` is held out.
        fraction: fraction of ``train`` that is held out; None: the default.
        codec: encoder of text to tokens, without an alphabet.
        paragraphs: True: each paragraph is a document.
        documents: True: each file and row is a document, and a token marks its end. False: the
            files form one continuous text.
    """

    train: Sources
    validation: Sources | None
    fraction: float | None
    codec: Codec
    paragraphs: bool = False
    documents: bool = False

    def key(self) -> tuple[str, int]:
        """Return a hash of the text's content and of the options, and the text's size in bytes."""
        texts = [self.train, *([] if self.validation is None else [self.validation])]
        prints = [each.fingerprint() for each in texts]
        codec = self.codec.digest if isinstance(self.codec, TokenizerCodec) else self.codec.kind
        content = [
            _VERSION, [own for own, _ in prints], codec, self.fraction, self.paragraphs,
            self.documents, [(each.column, each.chat) for each in texts],
        ]  # fmt: skip
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return digest, sum(size for _, size in prints)


@dataclass(frozen=True)
class TokenizedText:
    """A text as tokens.

    Attributes:
        codec: encoder of text to these tokens.
        train: tokens of the training part.
        held_out: tokens of the held-out part.
        sizes: number of bytes of each token in UTF-8, [vocabulary].
        digest: hash of the text, to detect that hosts have different texts.
        characters: numbers of characters of the training part and of the held-out part.
    """

    codec: Codec
    train: Part
    held_out: Part
    sizes: "NDArray[np.float64]"
    digest: str
    characters: tuple[int, int]

    def count_bytes(self, tokens: "NDArray[Any]") -> int:
        """Return the number of bytes of tokens in UTF-8.

        For a tokenizer's tokens, the result is an estimate from the average size of each token.
        """
        return round(float(self.sizes[tokens].sum()))


def open_text(spec: TextSpec, folder: Path | None = None) -> TokenizedText:
    """Return a text as tokens.

    The tokens are read from the cache. If the cache does not have them, one process of the host
    encodes the text and writes the cache file. The other processes of the host wait meanwhile.

    Args:
        spec: specification of the text and its tokens.
        folder: folder of the cache; None: the default folder of this machine.

    Raises:
        MotleyError: the text cannot be read, or the cache cannot be written.
    """
    key, size = spec.key()
    if size < _SMALL:
        return _Builder(spec, lambda _: None).build()
    place = cache_folder() if folder is None else folder
    path = place / f"tokens-{key[:32]}.safetensors"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if (result := _read(path, spec)) is not None:
            return result
        with path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (result := _read(path, spec)) is not None:
                return result  # another process has written it
            report = partial(print, file=sys.stderr, flush=True)
            report(f"encoding {size / 2**20:,.0f} MiB of text, once for this host: {path}")
            result = _Builder(spec, report).build()
            _write(path, result)
    except OSError as error:
        raise MotleyError(
            f"the tokens of the text cannot be written to {place} ({error.strerror or error}); "
            "free some space, or name another folder with --token-cache DIR"
        ) from None
    return _read(path, spec) or result


def _write(path: Path, text: TokenizedText) -> None:
    """Write a cache file atomically."""
    import torch
    from safetensors.torch import save_file

    arrays: dict[str, NDArray[Any]] = {"sizes": text.sizes}
    for name, part in (("train", text.train), ("held_out", text.held_out)):
        arrays |= {f"{name}.tokens": part.tokens, f"{name}.ends": part.ends}
        if part.learnt is not None:
            arrays[f"{name}.learnt"] = part.learnt
    about = {
        "digest": text.digest, "alphabet": text.codec.alphabet,
        "characters": json.dumps(text.characters), "sha256": _hash(arrays),
    }  # fmt: skip
    new = path.with_suffix(".making")
    save_file({name: torch.from_numpy(each) for name, each in arrays.items()}, new, about)
    new.replace(path)


def _hash(arrays: "dict[str, NDArray[Any]]") -> str:
    import numpy as np

    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return digest.hexdigest()


def _read(path: Path, spec: TextSpec) -> TokenizedText | None:
    """Return the text in a cache file. None: the file is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError):
        return None  # it is written anew
    if about.get("sha256") != _hash(arrays):
        return None
    train, held_out = (
        Part(arrays[f"{name}.tokens"], arrays[f"{name}.ends"], arrays.get(f"{name}.learnt"))
        for name in ("train", "held_out")
    )
    of_train, of_held_out = json.loads(about["characters"])
    return TokenizedText(
        replace(spec.codec, alphabet=about["alphabet"]), train, held_out, arrays["sizes"],
        about["digest"], (of_train, of_held_out),
    )  # fmt: skip


class _Builder:
    """An encoder of a text for the cache.

    Args:
        spec: specification of the text and its tokens.
        report: function that is called with lines of progress.
    """

    def __init__(self, spec: TextSpec, report: Callable[[str], None]) -> None:
        self._spec, self._report = spec, report
        self._began = self._reported = time.monotonic()
        self._documents = self._tokens = 0

    def build(self) -> TokenizedText:
        return self._build_documents() if self._spec.documents else self._build_whole()

    def _build_whole(self) -> TokenizedText:
        """Encode all files as one continuous text, whose last part is held out."""
        spec = self._spec
        text = "\n".join(spec.train.read())  # type: ignore[arg-type]
        if spec.validation is None:
            held = Fraction(str(HELD_OUT if spec.fraction is None else spec.fraction))
            at = len(text) - int(len(text) * held)
            texts, digest = (text[:at], text[at:]), hashlib.sha256(text.encode())
        else:
            texts = (text, "\n".join(spec.validation.read()))  # type: ignore[arg-type]
            digest = hashlib.sha256("\0".join(texts).encode())
        codec = self._with_alphabet({each for text in texts for each in set(text)})
        encoded = [self._encode(codec, self._cut(text), ends=False) for text in texts]
        train, held_out = (_join(each, with_ends=spec.paragraphs) for each in encoded)
        return TokenizedText(
            codec, train, held_out, codec.sizes(encoded[1]), digest.hexdigest()[:16],
            (len(texts[0]), len(texts[1])),
        )  # fmt: skip

    def _build_documents(self) -> TokenizedText:
        """Encode documents, and divide them into a training part and a held-out part.

        Without a separate held-out text, the documents with the smallest hashes are held out.
        """
        spec, digest, hashes = self._spec, hashlib.sha256(), list[bytes]()
        characters: set[str] = set()
        for document in self._read_all():
            own = hashlib.sha256(_canonical(document).encode()).digest()
            digest.update(own)
            hashes.append(own)
            if spec.codec.kind == KINDS[1]:
                parts = [(document, True)] if isinstance(document, str) else turns(document)
                characters.update(*(text for text, _ in parts))
        limit = None if spec.validation else self._limit(hashes)
        codec = self._with_alphabet(characters)
        encoded: tuple[list[Encoded], list[Encoded]] = ([], [])
        counts, number = [0, 0], 0
        validation = spec.validation.read() if spec.validation else iter(())
        for source, held in ((spec.train.read(), False), (validation, True)):
            while some := list(islice(source, _AT_ONCE)):
                sides = [held or (limit is not None and hashes[number + at] <= limit)
                         for at in range(len(some))]  # fmt: skip
                cut = [(part, side) for document, side in zip(some, sides, strict=True)
                       for part in self._cut(document)]  # fmt: skip
                made = self._encode(codec, [part for part, _ in cut], ends=not spec.paragraphs)
                for each, (part, side) in zip(made, cut, strict=True):
                    kept = each if side else replace(each, widths=None)
                    encoded[side].append(kept)
                    counts[side] += len(_canonical(part))
                number += len(some)
        train, held_out = (_join(each, with_ends=True) for each in encoded)
        return TokenizedText(
            codec, train, held_out, codec.sizes(encoded[1]),
            digest.hexdigest()[:16], (counts[0], counts[1]),
        )  # fmt: skip

    def _limit(self, hashes: Sequence[bytes]) -> bytes:
        """Return the largest hash at which a document is held out.

        Equal documents have equal hashes. They are therefore either all held out or all trained on.

        Raises:
            MotleyError: no document would remain to train on.
        """
        fraction = HELD_OUT if self._spec.fraction is None else self._spec.fraction
        count = max(1, round(fraction * len(hashes)))
        limit = sorted(hashes)[min(count, len(hashes)) - 1]
        if limit == max(hashes):
            unique = len(set(hashes))
            different = "" if unique == len(hashes) else f", {unique:,} different"
            raise MotleyError(
                f"{self._spec.train.option} has {plural(len(hashes), 'document')}{different}, "
                f"and holds out {count}, so none is left to train on; name held-out "
                "documents with --val-text, or give more"
            )
        return limit

    def _read_all(self) -> Iterator[Document]:
        yield from self._spec.train.read()
        if self._spec.validation is not None:
            yield from self._spec.validation.read()

    def _with_alphabet(self, characters: set[str]) -> Codec:
        codec = self._spec.codec
        if codec.kind != KINDS[1]:
            return codec
        ends = self._spec.documents and not self._spec.paragraphs
        return replace(codec, alphabet=make_alphabet(characters, ends))

    def _cut(self, document: Document) -> list[Document]:
        """Return the paragraphs of a document if ``spec.paragraphs`` is True, else the document."""
        if not self._spec.paragraphs or not isinstance(document, str):
            return [document]
        marks = [match.end() for match in re.finditer(r"\n\s*\n", document)]
        # Paragraphs are encoded one by one, so that no token spans two of them.
        return [document[begin:end] for begin, end in pairwise([0, *marks, len(document)])]

    def _encode(self, codec: Codec, documents: Sequence[Document], ends: bool) -> list[Encoded]:
        made = codec.encode_documents(documents, ends)
        self._documents += len(documents)
        self._tokens += sum(len(each.tokens) for each in made)
        now = time.monotonic()
        if now - self._reported > _EVERY_S:
            self._reported = now
            self._report(f"encoded {self._documents:,} documents, {self._tokens:,} tokens, in "
                         f"{now - self._began:.0f} s")  # fmt: skip
        return made


def _canonical(document: Document) -> str:
    """Return the content of a document as one text."""
    return document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)


def _join(documents: Sequence[Encoded], with_ends: bool) -> Part:
    """Return the tokens of documents in one array, with the position at which each one ends."""
    import numpy as np

    learnt = [each.learnt for each in documents if each.learnt is not None]
    tokens = [each.tokens for each in documents] or [np.zeros(0, np.uint8)]
    ends = np.cumsum([len(each.tokens) for each in documents], dtype=np.int64)
    return Part(
        np.concatenate(tokens), ends if with_ends else ends[:0],
        np.concatenate(learnt) if learnt else None,
    )  # fmt: skip
