"""Rows of a table, whatever its format, and faults in it."""

from pathlib import Path

import pytest

from motley.data.tables import read_rows
from motley.errors import MotleyError
from motley.infer.predict import main


@pytest.mark.parametrize(("name", "content", "due"), [
    ("a.csv", "\ufeffa;b\r\n1;'x\r\n\r\n;\r\n", [{"a": "1", "b": "'x"}, {"a": "", "b": ""}]),
    ("a.csv", "a,b\rx\u2028y,2\r", [{"a": "x\u2028y", "b": "2"}]),
    ("a.tsv", 'a\tb\n"1\n2"\t3\n', [{"a": "1\n2", "b": "3"}]),
    ("a.csv", f"a\n{'x' * 200_000}\n", [{"a": "x" * 200_000}]),
    ("a.jsonl", '{"a": 1}\n\n{"b": [2]}', [{"a": 1}, {"b": [2]}]),
], ids=["csv", "cr", "tsv", "long", "jsonl"])  # fmt: skip
def test_rows_are_read_by_column(
    tmp_path: Path, name: str, content: str, due: list[dict[str, object]]
) -> None:
    (tmp_path / name).write_text(content, newline="")
    assert [row for _, row in read_rows(tmp_path / name)] == due


@pytest.mark.parametrize(("name", "content", "says"), [
    ("a.csv", b"a\n1\n2,3\n", r"a\.csv, line 3 has 2 cells, and the header has 1; write a cell"),
    ("a.csv", b"a,b\n1\n", r"line 2 has 1 cell, and the header has 2"),
    ("a.csv", b"a\n", "the file has no row; leave it out"),
    ("a.csv", b"", "the file has no row; leave it out"),
    ("a.csv", b"a,a\n1,2\n", "has several columns with the name 'a'"),
    ("a.csv", b"a\n\xe9\n", "the file is not UTF-8 text; save it as UTF-8"),
    ("a.jsonl", b"[1]\n", "line 1 is a JSON list, not an object"),
    ("a.parquet", b"PAR1", "a.parquet"),
    ("a.txt", b"1", "is no table; name a file that ends with .csv, .tsv"),
])  # fmt: skip
def test_a_table_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MotleyError, match=says):
        list(read_rows(tmp_path / name))


def test_options_that_do_not_fit_a_table_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, other = tmp_path / "a.csv", tmp_path / "a.png"
    table.write_text("a\n1\n")
    for words, says in (
        (["--out", str(table)], "would replace"), (["--top-k", "2"], "--top-k applies to images"),
        ([str(other)], "a.csv is a table, and "),
    ):  # fmt: skip
        assert main([str(tmp_path), str(table), *words]) == 1
        assert says in capsys.readouterr().err
    assert table.read_text() == "a\n1\n"
