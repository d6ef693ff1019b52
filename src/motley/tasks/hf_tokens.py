"""Text in the tokens of a model's own tokenizer, which is read from its folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motley.errors import MotleyError
from motley.extras import import_offline
from motley.tasks.corpus import TOKENIZER, Corpus, Tokens


@dataclass(frozen=True)
class TokenizedCorpus(Corpus):
    """A text, as a tokenizer cuts it; nothing is put before it, after it or between.

    Attributes:
        folder: that holds the tokenizer's files. known: tokens that the model knows.
    """

    folder: Path
    known: int

    @cached_property
    def _tokenizer(self) -> Any:
        """Of the tokenizers library: from tokenizer.json, or as transformers reads older files."""
        transformers = import_offline("transformers", f"--tokens {TOKENIZER}")
        try:
            found = transformers.AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise MotleyError(
                f"--tokens {TOKENIZER}: {self.folder} has no tokenizer that can be read ({said}); "
                "copy the model's tokenizer.json there, or train on --tokens bytes"
            ) from None
        if not found.is_fast or not len(found):
            raise MotleyError(
                f"--tokens {TOKENIZER}: the tokenizer in {self.folder} does not say where in the "
                "text its tokens are; copy the model's tokenizer.json there"
            )
        backend = found.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend

    @property
    def vocabulary(self) -> int:
        """Tokens that there are, without added ones: a text seldom has these."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=False)
        return size

    def encode(self, text: str) -> Tokens:
        """See Corpus; MotleyError for a token that the model does not know."""
        found = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        if len(found) and (most := int(found.max())) >= self.known:
            raise MotleyError(
                f"--tokens {TOKENIZER}: the text has token {most} "
                f"({self._tokenizer.id_to_token(most)!r}) of {self.folder}, and the model knows "
                f"{self.known}, from 0; is the tokenizer another model's?"
            )
        return found.astype(np.min_scalar_type(self.known - 1))

    def decode(self, tokens: Sequence[int]) -> str:
        """See Corpus."""
        found: str = self._tokenizer.decode([int(token) for token in tokens],
                                            skip_special_tokens=False)  # fmt: skip
        return found

    def bytes_of(self, tokens: Tokens) -> int:
        """See Corpus; of all that is held out the sum is exact, to rounding of each piece."""
        return round(float(self._sizes[tokens].sum()))

    @cached_property
    def _sizes(self) -> NDArray[np.float64]:
        """Bytes of each token, [known], on average over what is held out: from where it begins to
        where the next does, so that spaces which a tokenizer drops, and characters that it cuts,
        are counted once."""
        text = self.split(held_out=True)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        width = np.array([len(character.encode()) for character in text], dtype=np.int64)
        place = np.concatenate(([0], np.cumsum(width)))
        starts = np.array([start for start, _ in found.offsets], dtype=np.int64)
        if len(starts):
            starts[0] = 0
        each = np.diff(place[np.append(starts, len(text))])
        ids = np.array(found.ids, dtype=np.int64)
        count = np.bincount(ids, minlength=self.known)
        total = np.bincount(ids, weights=each, minlength=self.known)
        usual = float(place[-1]) / max(1, len(ids))  # of those that it does not have
        return np.where(count > 0, total / np.maximum(count, 1), usual)
