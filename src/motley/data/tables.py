"""The rows of a table: a CSV file, a file with a JSON object in each line, or a parquet file."""

import contextlib
import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.registry import import_extra
from motley.text import plural

JSON_ENDINGS, PARQUET = (".jsonl", ".ndjson"), ".parquet"
TABLES = (".csv", ".tsv", *JSON_ENDINGS, PARQUET)
AT_ONCE = 1000  # rows of a parquet file in memory

Row = Mapping[str, Any]


class CsvFile:
    """A CSV file whose first line names the columns and shows the delimiter.

    Args:
        path: the file.
        name: name of the file in errors, such as ``--labels FILE``.

    Attributes:
        path: the file.
        names: names of the columns.
        line: number of the line that was read last, from 1.

    Raises:
        MotleyError: the file cannot be read, or is not UTF-8 text.
    """

    def __init__(self, path: Path, name: str) -> None:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise MotleyError(f"{name}: {error.strerror}; name a CSV file") from None
        except UnicodeDecodeError:
            raise MotleyError(f"{name}: the file is not UTF-8 text; save it as UTF-8") from None
        csv.field_size_limit(sys.maxsize)  # the default is 131,072 characters in a cell
        self.path, self.line = path, 1
        header = text.partition("\n")[0]
        self._delimiter = max(",;\t", key=header.count)
        # splitlines() would also end a line at other characters, such as U+2028 inside a cell.
        self._lines = csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter)
        self.names = [each.strip() for each in next(self._lines, [])]

    def rows(self, least: int | None = None) -> Iterator[list[str]]:
        """Yield the list of cells of each line, without empty lines.

        Args:
            least: smallest number of cells in a line; None: exactly as many as the header has.

        Raises:
            MotleyError: a line is not valid CSV, or has a wrong number of cells.
        """
        try:
            for row in self._lines:
                self.line = self._lines.line_num
                if len(row) < 2 and not "".join(row).strip():
                    continue
                if len(row) != len(self.names) if least is None else len(row) < least:
                    raise MotleyError(
                        f"{self.path}, line {self.line} has {plural(len(row), 'cell')}, and the "
                        f"header has {len(self.names)}; write a cell for each column, and quote a "
                        f"cell that contains {self._delimiter!r}"
                    )
                yield row
        except csv.Error as error:
            raise MotleyError(
                f"{self.path}, line {self._lines.line_num}: {error}; write it as CSV"
            ) from None


def read_json_rows(path: Path, name: str, column: str) -> Iterator[tuple[int, Row]]:
    """Yield the line number and the JSON object of each line that is not empty.

    Args:
        path: a file with a JSON object in each line.
        name: name of the file in errors, such as ``--text FILE``.
        column: name of a field, for the example in an error.

    Raises:
        MotleyError: the file cannot be read or is empty, or a line is not a JSON object.
    """
    start, empty = 0, True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    value = json.loads(line.decode()) if line.strip() else None
                except UnicodeDecodeError as error:
                    raise MotleyError(
                        f"{name}, line {number} is not UTF-8 text (byte {start + error.start} of "
                        f"the file); convert it, as in: iconv -t UTF-8 {path}"
                    ) from None
                except (ValueError, RecursionError) as error:
                    raise MotleyError(
                        f"{name}, line {number} is not valid JSON ({error}); write one object per "
                        f'line, as in {{"{column}": ...}}'
                    ) from None
                start += len(line)
                if not line.strip():
                    continue
                empty = False
                if not isinstance(value, dict):
                    raise MotleyError(
                        f"{name}, line {number} is a JSON {type(value).__name__}, not an object; "
                        f'write one object per line, as in {{"{column}": ...}}'
                    )
                yield number, value
    except OSError as error:
        raise MotleyError(f"{name}: {error.strerror}") from None
    if empty:
        raise MotleyError(f"{name}: the file is empty; leave it out")


@contextlib.contextmanager
def open_parquet(path: Path, name: str) -> Iterator[Any]:
    """Open a parquet file as pyarrow's ParquetFile in a ``with`` block.

    Args:
        path: the file.
        name: name of the file in errors, such as ``--text FILE``.

    Raises:
        MotleyError: pyarrow is not installed, or the file cannot be read or has no row.
    """
    pyarrow = import_extra("pyarrow", name)
    parquet = import_extra("pyarrow.parquet", name, "pyarrow")
    try:
        with parquet.ParquetFile(path) as table:
            if not table.metadata.num_rows:
                raise MotleyError(f"{name}: the file has no row; leave it out")
            yield table
    except OSError as error:  # pyarrow raises it for some damaged files, too
        raise MotleyError(f"{name}: {error.strerror or error}") from None
    except pyarrow.ArrowException as error:
        raise MotleyError(
            f"{name} cannot be read as parquet ({' '.join(str(error).split())[:200]}); write the "
            "file again"
        ) from None


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield each row of a table as a pair: its place, and its values by column.

    The place is a text for errors, such as ``a.csv, line 3``. The values of a CSV file are texts.

    Raises:
        MotleyError: the file is not a table or has no row, or a row cannot be read.
    """
    count = 0
    for count, row in enumerate(_read_rows(path), 1):  # noqa: B007
        yield row
    if not count:
        raise MotleyError(f"{path}: the file has no row; leave it out")


def _read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    ending = path.suffix.lower()
    if ending not in TABLES:
        raise MotleyError(f"{path} is no table; name a file that ends with {', '.join(TABLES)}")
    if ending == PARQUET:
        with open_parquet(path, str(path)) as table:
            batches = table.iter_batches(batch_size=AT_ONCE)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
    elif ending in JSON_ENDINGS:
        for number, row in read_json_rows(path, str(path), "x"):
            yield f"{path}, line {number}", row
    else:
        file = CsvFile(path, str(path))
        if repeated := [name for name, count in Counter(file.names).items() if count > 1]:
            raise MotleyError(
                f"{path} has several columns with the name {repeated[0]!r}; give each column a "
                "different name"
            )
        for cells in file.rows():
            yield f"{path}, line {file.line}", dict(zip(file.names, cells, strict=True))
