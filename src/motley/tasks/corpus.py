"""Encoders of text to tokens, and the samples of tokens from which a model learns.

Tokens are bytes, characters, or those of a tokenizer of the transformers library.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.errors import MotleyError
from motley.registry import import_offline
from motley.tasks.text_sources import Document, Message

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tokens = NDArray[np.unsignedinteger[Any]]

KINDS = ("bytes", "characters")
TOKENIZER = "tokenizer"  # tokens of a model's tokenizer, or of --tokenizer
_END = "\0"  # end of a document, where tokens are bytes or characters
_WIDER = (0x80, 0x800, 0x10000)  # first characters of 2, 3 and 4 bytes in UTF-8
_ANSWERS = "assistant"  # role of the messages that are learnt
_USER = "user"  # role of a question
_HEADER = "<|{}|>\n"  # of a message, by its role, in the plain template


@dataclass(frozen=True)
class Encoded:
    """The tokens of a document.

    Attributes:
        tokens: the tokens, [tokens].
        learnt: bool [tokens], True for tokens that count in the loss; None: all tokens count.
        widths: number of bytes of the document that each token covers, [tokens]; None: not known.
    """

    tokens: "NDArray[Any]"
    learnt: "NDArray[np.bool_] | None" = None
    widths: "NDArray[np.int64] | None" = None


@dataclass(frozen=True)
class Codec:
    """An encoder of text to tokens, which are bytes or the characters of an alphabet.

    Attributes:
        kind: kind of the tokens; see :data:`KINDS` and :data:`TOKENIZER`.
        alphabet: all characters in the order of their token numbers; empty if the tokens are not
            characters.
    """

    kind: str
    alphabet: str = ""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens of this encoder."""
        return len(self.alphabet) or 256

    @property
    def size(self) -> int:
        """Number of tokens from which generated text may be drawn, added tokens included."""
        return self.vocabulary

    @property
    def end(self) -> int | None:
        """Token that marks the end of a document; None: there is no such token."""
        if self.kind == "bytes":
            return 0
        return 0 if self.alphabet.startswith(_END) else None

    def encode(self, text: str) -> "Tokens":
        """Return the tokens of a text, [tokens], in the smallest unsigned dtype.

        The array is read-only.
        """
        import numpy as np

        if self.kind == "bytes":
            return np.frombuffer(text.encode(), dtype=np.uint8)
        known = np.array([ord(character) for character in self.alphabet])
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        return np.searchsorted(known, codes).astype(np.min_scalar_type(len(known)))

    def encode_documents(self, documents: Sequence[Document], ends: bool) -> list[Encoded]:
        """Return the tokens of documents.

        Args:
            documents: texts or conversations.
            ends: True: append :attr:`end` to each text. In a conversation, each answer is followed
                by :attr:`end` in any case.
        """
        return [self._encode_document(each, ends) for each in documents]

    def _encode_document(self, document: Document, ends: bool) -> Encoded:
        import numpy as np

        if isinstance(document, str):
            tokens = self.encode(document)
            end = [] if self.end is None or not ends else [self.end]
            return Encoded(np.append(tokens, np.array(end, dtype=tokens.dtype)))
        parts = [(self.encode(text), learnt) for text, learnt in turns(document)]
        parts = [
            (np.append(tokens, np.array([self.end], tokens.dtype)), learnt)
            if learnt and self.end is not None else (tokens, learnt)
            for tokens, learnt in parts
        ]  # fmt: skip
        return Encoded(
            np.concatenate([tokens for tokens, _ in parts]),
            np.concatenate([np.full(len(tokens), learnt) for tokens, learnt in parts]),
        )

    def ask(self, question: str) -> str:
        """Return the start of a conversation: a user's message, and the header of the answer."""
        parts = "".join(text for text, _ in turns([{"role": _USER, "content": question}]))
        return parts + _HEADER.format(_ANSWERS)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text that tokens represent.

        Bytes that are not UTF-8 become replacement characters.
        """
        if self.kind == "bytes":
            return bytes(tokens).decode(errors="replace")
        return "".join(self.alphabet[token] for token in tokens)

    def sizes(self, samples: Sequence[Encoded] = ()) -> "NDArray[np.float64]":
        """Return the number of UTF-8 bytes that each token stands for, [vocabulary].

        Args:
            samples: documents over which the number is averaged, if a token can stand for different
                numbers of bytes.
        """
        import numpy as np

        if self.kind == "bytes":
            return np.ones(256)
        return np.array([len(each.encode()) for each in self.alphabet], dtype=np.float64)


def make_alphabet(characters: set[str], ends: bool) -> str:
    """Return the sorted alphabet of a text.

    Args:
        characters: the characters of the text.
        ends: True: add a character that marks the end of a document.
    """
    return "".join(sorted(characters | {_END} if ends else characters))


def turns(messages: Sequence[Message]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a conversation in a plain template, each with a flag.

    The template writes a message as ``<|ROLE|>``, a newline, its content, and a newline. The flag
    is True for the content of an answer. Only this content counts in the loss.
    """
    for message in messages:
        yield _HEADER.format(message["role"]), False
        yield message["content"], message["role"] == _ANSWERS
        yield "\n", False


@dataclass(frozen=True)
class TokenizerCodec(Codec):
    """An encoder of text to the tokens of a tokenizer, without special tokens around a text.

    Attributes:
        folder: folder with the tokenizer's files.
        known: number of tokens in the model's vocabulary; None: all tokens of the tokenizer.
    """

    folder: Path = Path()
    known: int | None = None

    @cached_property
    def _loaded(self) -> Any:
        """Tokenizer of the transformers library.

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
                f"--tokens {TOKENIZER}: the tokenizer in {self.folder} cannot be read ({text}); "
                "copy the model's tokenizer.json there, or train on --tokens bytes"
            ) from None
        if not result.is_fast or not len(result):
            raise MotleyError(
                f"--tokens {TOKENIZER}: the tokenizer in {self.folder} does not report the "
                "positions of its tokens in the text, which Motley needs; copy the model's "
                "tokenizer.json there"
            )
        result.backend_tokenizer.no_truncation()
        result.backend_tokenizer.no_padding()
        return result

    @property
    def _backend(self) -> Any:
        """Tokenizer of the tokenizers library."""
        return self._loaded.backend_tokenizer

    @property
    def digest(self) -> str:
        """Hash of everything on which the tokens of a document depend."""
        content = f"{self._backend.to_str()} {self._loaded.chat_template} {self.end} {self.known}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def vocabulary(self) -> int:
        """Number of the tokenizer's tokens without added tokens, because these are rare."""
        if self.known is None:
            return self.size
        number: int = self._backend.get_vocab_size(with_added_tokens=False)
        return number

    @property
    def size(self) -> int:
        """Number of tokens from which generated text may be drawn, added tokens included."""
        number: int = self._backend.get_vocab_size(with_added_tokens=True)
        return number if self.known is None else min(number, self.known)

    @property
    def end(self) -> int | None:
        """End-of-text token of the tokenizer. None: the tokenizer has no such token."""
        result: int | None = self._loaded.eos_token_id
        return result

    def encode(self, text: str) -> "Tokens":
        """Return the tokens of a text, [tokens], in the smallest unsigned dtype.

        Raises:
            MotleyError: a token is not in the model's vocabulary.
        """
        return self._checked(self._backend.encode(text, add_special_tokens=False).ids)

    def _checked(self, ids: Sequence[int]) -> "Tokens":
        import numpy as np

        known = self.size if self.known is None else self.known
        result = np.array(ids, dtype=np.int64)
        if len(result) and (most := int(result.max())) >= known:
            raise MotleyError(
                f"--tokens {TOKENIZER}: the text has token {most} "
                f"({self._backend.id_to_token(most)!r}) of {self.folder}, and the model has only "
                f"{known} tokens, from 0. The tokenizer may belong to another model"
            )
        return result.astype(np.min_scalar_type(known - 1))

    def encode_documents(self, documents: Sequence[Document], ends: bool) -> list[Encoded]:
        """Return the tokens of documents, which threads encode in parallel."""
        marked = [self._mark(each) for each in documents]
        end = [] if self.end is None else [self.end]
        result = []
        texts = [text for text, _ in marked]
        for made, (text, spans) in zip(
            self._backend.encode_batch(texts, add_special_tokens=False), marked, strict=True
        ):
            behind = end if ends and spans is None else []
            result.append(self._with_offsets(made, text, spans, behind))
        return result

    def _with_offsets(
        self, made: Any, text: str, spans: list[tuple[int, int]] | None, behind: list[int]
    ) -> Encoded:
        """Return an encoded text, with the number of bytes of each token.

        A token's bytes extend from its start to the start of the next token. Spaces that the
        tokenizer drops are therefore counted once. Characters that the tokenizer divides among
        several tokens are also counted once.

        Args:
            made: result of the tokenizer.
            text: the text.
            spans: start and end of each answer in the text; None: not a conversation.
            behind: tokens to append.
        """
        import numpy as np

        tokens = self._checked([*made.ids, *behind])
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        width = 1 + sum((codes >= least).astype(np.int64) for least in _WIDER)
        place = np.concatenate(([0], np.cumsum(width)))
        starts = np.array([start for start, _ in made.offsets], dtype=np.int64)
        if len(starts):
            starts[0] = 0
        widths = np.append(np.diff(place[np.append(starts, len(text))]), np.zeros(len(behind), int))
        if spans is None:
            return Encoded(tokens, None, widths)
        learnt = np.zeros(len(tokens), dtype=bool)
        stops = np.array([stop for _, stop in made.offsets], dtype=np.int64)
        for begin, end in spans:  # a token that spans the end of a header belongs to the answer
            learnt |= (begin < stops) & (stops <= end)
        return Encoded(tokens, learnt, widths)

    def _mark(self, document: Document) -> tuple[str, list[tuple[int, int]] | None]:
        """Return a document's text, and the start and end of each answer in this text.

        The second value is None if the document is not a conversation.
        """
        if isinstance(document, str):
            return document, None
        if not self._loaded.chat_template:
            text, spans = "", []
            ending = self._loaded.eos_token or ""
            for part, learnt in turns(document):
                own = f"{part}{ending}" if learnt else part
                if learnt:
                    spans.append((len(text), len(text) + len(own)))
                text += own
            return text, spans
        text, spans = self._render(document), []
        for number, message in enumerate(document):
            if message["role"] != _ANSWERS:
                continue
            before = self._render(document[:number], add_generation_prompt=True)
            after = self._render(document[: number + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise MotleyError(
                    f"--chat: the chat template of {self.folder} writes message {number} of a "
                    "conversation differently when other messages follow, so its tokens cannot be "
                    "found. Keep only one answer in a conversation, as the last message"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return a conversation in the tokenizer's own template, which runs in a sandbox.

        Raises:
            MotleyError: the template refuses the conversation.
        """
        if not messages:
            return ""
        try:
            result: str = self._loaded.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            roles = ", ".join(each["role"] for each in messages)
            raise MotleyError(
                f"--chat: the chat template of {self.folder} refuses a conversation with the "
                f"roles {roles} ({text}); change the conversations, or the template"
            ) from None
        return result

    def ask(self, question: str) -> str:
        """Return the start of a conversation: a user's message, and the header of the answer.

        The conversation has the form of the tokenizer's chat template, if the tokenizer has one.
        """
        if not self._loaded.chat_template:
            return super().ask(question)
        return self._render([{"role": _USER, "content": question}], add_generation_prompt=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text that tokens represent."""
        result: str = self._backend.decode([int(token) for token in tokens],
                                           skip_special_tokens=False)  # fmt: skip
        return result

    def sizes(self, samples: Sequence[Encoded] = ()) -> "NDArray[np.float64]":
        """Return the number of UTF-8 bytes that each token stands for, [vocabulary].

        A token that stands for different numbers of bytes gets their mean over ``samples``.

        The sizes of all tokens of ``samples`` add up to the number of bytes of ``samples``.
        """
        import numpy as np

        known = self.size if self.known is None else self.known
        count, total = np.zeros(known), np.zeros(known)
        for each in samples:
            count += np.bincount(each.tokens, minlength=known)
            total += np.bincount(each.tokens, weights=each.widths, minlength=known)
        usual = float(total.sum()) / max(1.0, float(count.sum()))  # for tokens that do not occur
        return np.where(count > 0, total / np.maximum(count, 1), usual)


class Windows:
    """The items of one continuous text. A new item starts every ``length`` tokens.

    An item has up to ``2 * length`` tokens, so neighbouring items overlap. A training sample is
    ``length + 1`` consecutive tokens of an item, from a random start.
    """

    def __init__(self, tokens: "Tokens", length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> "Tokens":
        start = min(index * self._length, len(self._tokens) - self._length - 1)
        return self._tokens[start : start + 2 * self._length]


@dataclass(frozen=True)
class Part:
    """The tokens of the training text or of the held-out text.

    Attributes:
        tokens: all tokens, [tokens].
        ends: position in ``tokens`` at which each document ends, int64 [documents]; empty for one
            continuous text.
        learnt: bool [tokens], True for tokens that count in the loss; None: all tokens count.
    """

    tokens: "Tokens"
    ends: "NDArray[np.int64]"
    learnt: "NDArray[np.bool_] | None" = None

    @property
    def documents(self) -> int:
        """Number of documents of two tokens or more. Shorter ones have no token to predict."""
        import numpy as np

        return int(np.count_nonzero(np.diff(self.ends, prepend=0) > 1))


class Pieces:
    """Samples that consist of one document or paragraph each, or of several packed together.

    A document longer than ``length`` is cut into several pieces. Only the first piece of a
    conversation is used, since an answer depends on all tokens before it. The first token of a
    document is not predicted, because no token precedes it.

    Args:
        part: the tokens, with the end of each document.
        length: largest number of predicted tokens in a sample.
        packed: True: a sample has as many pieces as fit into ``length``.
    """

    def __init__(self, part: Part, length: int, packed: bool = False) -> None:
        import numpy as np

        self._part = part
        bounds = np.concatenate(([0], part.ends))
        begins, ends = bounds[:-1], bounds[1:]
        if part.learnt is None:
            # The last token of a piece is a target there, and the first input of the next piece.
            counts = np.maximum(0, -(-(ends - begins - 1) // length))
            number = np.repeat(np.arange(len(begins)), counts)
            within = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
            starts = begins[number] + within * length
            stops = np.minimum(starts + length + 1, ends[number])
            self.cut = self.dropped = 0
        else:
            starts, stops = begins, np.minimum(begins + length + 1, ends)
            before = np.concatenate(([0], np.cumsum(part.learnt)))
            some = before[stops] - before[np.minimum(starts + 1, stops)] > 0
            self.cut, self.dropped = int((stops < ends)[some].sum()), int((~some).sum())
            starts, stops = starts[some], stops[some]
        self._pieces = np.stack([starts, stops], axis=1)
        sizes = (stops - starts - 1).tolist()
        groups = _pack(sizes, length) if packed else [[number] for number in range(len(sizes))]
        self._order = np.array([number for group in groups for number in group], dtype=np.int64)
        self._ends = np.cumsum([0, *(len(group) for group in groups)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> list[Encoded]:
        result = []
        for number in self._order[self._ends[index] : self._ends[index + 1]]:
            piece = slice(*self._pieces[number])
            learnt = None if self._part.learnt is None else self._part.learnt[piece]
            result.append(Encoded(self._part.tokens[piece], learnt))
        return result

    @cached_property
    def sizes(self) -> "NDArray[np.int64]":
        """Number of tokens that the model reads for each sample, [samples]."""
        import numpy as np

        each = (self._pieces[:, 1] - self._pieces[:, 0] - 1)[self._order]
        total: NDArray[np.int64] = np.diff(np.concatenate(([0], np.cumsum(each)))[self._ends])
        return total


def _pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return groups of indices of pieces, each group with at most ``length`` tokens.

    A piece goes into the fullest group that has room for it, longest pieces first (best-fit
    decreasing). Groups are in the order of their first pieces.
    """
    room: dict[int, list[int]] = {}  # groups by their remaining tokens
    free: list[int] = []  # the keys of room in order
    groups: list[list[int]] = []
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        size = sizes[number]
        at = bisect_left(free, size)
        if at == len(free):
            group, left = len(groups), length - size
            groups.append([])
        else:
            had = free[at]
            group, left = room[had].pop(), had - size
            if not room[had]:
                del room[had], free[at]
        groups[group].append(number)
        if left > 0:
            if left not in room:
                room[left] = []
                free.insert(bisect_left(free, left), left)
            room[left].append(group)
    for members in groups:
        members.sort()
    return sorted(groups)
