"""Text from files, rows and data sets: what is read, held out, kept on the disk, refused."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from hf_models import pretrained_folder

from motley.errors import MotleyError
from motley.tasks import token_cache
from motley.tasks.builtin.text import TextTask
from motley.tasks.corpus import Codec, Pieces
from motley.tasks.text_sources import Sources
from motley.tasks.token_cache import TextSpec, open_text

ROWS = [f"Row {number}, of {number * number % 97} words or so." for number in range(60)]


def write_rows(path: Path, rows: list[Any], field: str = "text") -> str:
    """A .jsonl or .parquet file with a row for each text."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({field: rows, "id": list(range(len(rows)))}), path)
    else:
        path.write_text("".join(json.dumps({"id": 1, field: row}) + "\n" for row in rows))
    return str(path)


def texts(*names: str, **known: Any) -> list[Any]:
    return list(Sources(names, **known).read())


def test_files_folders_and_data_sets_are_read_in_one_order(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "all"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "a.md").write_text("é of b")
    (folder / "c.txt").write_text("c")
    (folder / "notes.py").write_text("no text")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "a.txt").write_text("a copy of an editor")
    write_rows(folder / "a.jsonl", ["one", "two"])
    write_rows(folder / "z.parquet", ["three"])
    assert texts(str(folder)) == ["one", "two", "é of b", "c", "three"]
    rows = write_rows(tmp_path / "own.jsonl", ["mine"], "body")
    assert texts(rows, field="body") == ["mine"]
    one = datasets.Dataset.from_dict({"text": ["a", "b"]})
    one.save_to_disk(str(tmp_path / "one"))
    both = datasets.DatasetDict({"train": one, "validation": one.select([1])})
    both.save_to_disk(str(tmp_path / "both"))
    for name in (str(tmp_path / "one"), f"hf:{tmp_path / 'one'}", f"hf:{tmp_path / 'both'}"):
        assert texts(name) == ["a", "b"]
    assert texts(f"hf:{tmp_path / 'both'}", held_out=True) == ["b"]
    assert Sources((f"hf:{tmp_path / 'both'}",)).have_held_out_split
    assert not Sources((f"hf:{tmp_path / 'one'}",)).have_held_out_split
    task = TextTask(text=(f"hf:{tmp_path / 'both'}",), length=1)
    assert task.codec.decode(task.corpus.held_out.tokens.tolist()) == "b\0"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2 is not valid JSON \(Expect"),
        ("a.jsonl", b'{"text": "a"}\n\n{"txt": "b", "id": 1}\n',
         r"line 3 has no field text \(nearest: txt\); its fields are txt, id; .*--text-field"),
        ("a.jsonl", b'{"text": null}\n', r"line 1: text is null, not a string"),
        ("a.jsonl", b'{"text": ["a"]}\n', r"is a list, not a string; conversations need --chat"),
        ("a.jsonl", b'["a"]\n', r"line 1 is a JSON list, not an object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n',
         r"line 2 is not UTF-8 text \(byte 24 of the file\).* iconv"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"character 0 is '\\ud800', half of a surrogate"),
        ("a.jsonl", b"[" * 100_000, r"line 1 is not valid JSON"),
        ("a.jsonl", b"\n", r"a\.jsonl: the file is empty"),
        ("a.txt", b"", r"a\.txt: the file is empty"),
        ("a.txt", b"ab\xff", r"a\.txt is not UTF-8 text \(byte 2\); convert it, as in: iconv"),
        ("a.parquet", b"PAR1 no table", r"a\.parquet cannot be read as parquet"),
        ("none.txt", None, r"none\.txt: No such file"),
        ("none.jsonl", None, r"none\.jsonl: No such file"),
        ("none.parquet", None, r"none\.parquet: No such file"),
    ],
)  # fmt: skip
def test_rows_that_are_no_text_are_refused_by_file_and_line(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(MotleyError, match=says):
        TextTask(text=(str(tmp_path / name),)).data(False)


def test_tables_and_folders_that_have_no_text_are_refused(tmp_path: Path) -> None:
    table = write_rows(tmp_path / "a.parquet", ["a", None], "texts")
    with pytest.raises(MotleyError, match=r"no column text \(nearest: texts\); its columns are te"):
        texts(table)
    with pytest.raises(MotleyError, match=r"a\.parquet, row 1: texts is null"):
        texts(table, field="texts")
    with pytest.raises(MotleyError, match=r"the file has no row"):
        texts(write_rows(tmp_path / "b.parquet", []))
    (tmp_path / "c").mkdir()
    with pytest.raises(MotleyError, match=r"c: no file in this folder ends with \.txt, \.md"):
        texts(str(tmp_path / "c"))
    with pytest.raises(
        MotleyError, match=r"--text hf:none is not a folder on this host; name a folder, or OW"
    ):
        texts("hf:none")
    short = write_rows(tmp_path / "short.jsonl", ["abc"])
    with pytest.raises(
        MotleyError, match=r"has 1 document, and holds out 1, so none is left to train"
    ):
        TextTask(text=(short,)).data(False)
    train = write_rows(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(MotleyError, match=r"--val-text .*short.jsonl is too short: it has 3 char"):
        TextTask(text=(train,), val_text=(short,)).data(True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokenizer": "a", "tokens": "bytes"}, "--tokenizer has no effect with --tokens bytes"),
        ({"val_text": ("a",), "val_fraction": 0.2}, "--val-fraction has no effect with --val-t"),
        ({"val_fraction": 1.0}, r"--val-fraction 1.0 leaves nothing to train or"),
        ({"paragraphs": True, "pack": True}, "and --pack make samples in different ways"),
    ],
)  # fmt: skip
def test_options_of_the_text_that_contradict_are_refused(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(MotleyError, match=says):
        TextTask(**options).check_options()


def documents(task: TextTask, held_out: bool) -> set[str]:
    """The documents of one part."""
    part = task.corpus.held_out if held_out else task.corpus.train
    pieces = Pieces(part, 10_000)
    found = [task.codec.decode(pieces[at][0].tokens.tolist()) for at in range(len(pieces))]
    assert all(text.endswith("\0") and "\0" not in text[:-1] for text in found)
    return {text[:-1] for text in found}


def test_documents_are_held_out_by_their_content(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*ROWS, *ROWS[:20]])
    task = TextTask(text=(path,), val_fraction=0.25, tokens="characters", length=16)
    held_out, rest = documents(task, True), documents(task, False)
    assert held_out | rest == set(ROWS) and not held_out & rest
    # A fourth of 80 rows; equal ones are on one side, and other files or places change nothing.
    assert 10 <= len(held_out) <= 20
    other = write_rows(tmp_path / "b.parquet", [*reversed(ROWS), *ROWS[:20]])
    again = TextTask(text=(other,), val_fraction=0.25, length=16)
    assert documents(again, True) == held_out
    mixed = TextTask(val_text=(write_rows(tmp_path / "d.jsonl", ["x", "y"]),))
    assert documents(mixed, True) == {"x", "y"}
    named = TextTask(text=(path,), val_text=(write_rows(tmp_path / "c.jsonl", ["x", "y"]),))
    assert documents(named, True) == {"x", "y"} and documents(named, False) == set(ROWS)
    whole = TextTask(val_fraction=0.5)
    parts = [len(whole.corpus.held_out.tokens), len(whole.corpus.train.tokens)]
    assert parts[0] == pytest.approx(parts[1], rel=0.05)  # characters, and not bytes


def open_spec(spec: TextSpec, folder: Path) -> None:
    open_text(spec, folder)


def test_a_text_is_encoded_once_for_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(token_cache, "_SMALL", 0)
    path = write_rows(tmp_path / "a.jsonl", ROWS * 40)
    spec = TextSpec(Sources((path,)), None, None, Codec("characters"), documents=True)
    cache = tmp_path / "cache"
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=open_spec, args=(spec, cache)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert capfd.readouterr().err.count("encoding 0 MiB of text, once for this host") == 1
    (file,) = cache.glob("tokens-*.safetensors")
    first = open_text(spec, cache)
    assert not capfd.readouterr().err
    assert str(file) in Path("/proc/self/maps").read_text(), "it is mapped, and not copied"
    monkeypatch.setattr(token_cache, "_SMALL", 1 << 40)
    fresh = open_text(spec, cache)
    for mapped, made in ((first.train, fresh.train), (first.held_out, fresh.held_out)):
        assert (mapped.tokens == made.tokens).all() and (mapped.ends == made.ends).all()
        assert mapped.tokens.dtype == made.tokens.dtype
    assert (first.codec, first.digest) == (fresh.codec, fresh.digest)
    monkeypatch.setattr(token_cache, "_SMALL", 0)
    # A changed byte of the tokens, and a file that is cut short.
    content = bytearray(file.read_bytes())
    for damaged in (content[:-2] + b"\1\1", content[:999], b"no file of tokens"):
        file.unlink()
        file.write_bytes(damaged)
        assert (open_text(spec, cache).train.tokens == fresh.train.tokens).all()
        assert "encoding" in capfd.readouterr().err
    # Another content or option is another file.
    write_rows(tmp_path / "a.jsonl", ROWS * 41)
    open_text(spec, cache)
    open_text(TextSpec(spec.train, None, 0.3, spec.codec, documents=True), cache)
    assert len(list(cache.glob("tokens-*.safetensors"))) == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(MotleyError, match=r"cannot be written to .*file.* --token-cache DIR"):
        open_text(spec, tmp_path / "file" / "below")


def test_a_tokenizer_has_a_folder_or_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    text = " ".join(ROWS)
    folder = pretrained_folder(tmp_path, text)
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    task = TextTask(text=(path,), tokenizer=str(folder), length=16, width=16, depth=1)
    assert task.tokens == "tokenizer" and task.codec.vocabulary == 300
    assert task.model().token.weight.shape == (300, 16)  # type: ignore[union-attr]
    held_out = "".join(sorted(task.codec.decode(task.corpus.held_out.tokens.tolist())))
    assert task.corpus.count_bytes(task.corpus.held_out.tokens) == len(held_out.encode())
    # The cache of the hub, as a download leaves it.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    own = tmp_path / "hub" / "models--owner--tokens"
    (own / "snapshots" / "0123").mkdir(parents=True)
    (own / "refs").mkdir()
    (own / "refs" / "main").write_text("0123")
    (folder / "tokenizer.json").rename(own / "snapshots" / "0123" / "tokenizer.json")
    (folder / "tokenizer_config.json").rename(own / "snapshots" / "0123" / "tokenizer_config.json")
    named = TextTask(text=(path,), tokenizer="owner/tokens", length=16)
    assert named.codec.encode(text).tolist() == task.codec.encode(text).tolist()
    assert named.identity() == task.identity() and "tokenizer_sha256" in task.identity()
    other = pretrained_folder(tmp_path, text, tokens=299)
    assert TextTask(text=(path,), tokenizer=str(other)).identity() != task.identity()
    before = constants.HF_HUB_OFFLINE
    with pytest.raises(
        MotleyError, match=r"--tokenizer owner/none is neither a folder on this machine nor a tok"
    ):
        TextTask(text=(path,), tokenizer="owner/none").data(False)
    assert before == constants.HF_HUB_OFFLINE
