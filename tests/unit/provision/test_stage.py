"""setup/stage_cn.sh on this machine alone, and its arithmetic."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import picture_folder

from motley.data.packed_file import open_packed
from motley.errors import MotleyError
from motley.provision import stage_cn
from motley.provision.stage_copy import (
    BLOCK,
    Copied,
    Target,
    bytes_in,
    count_blocks,
    format_size,
    missing,
    parse_size,
)


@given(
    st.lists(st.sampled_from("abc"), max_size=40),
    st.dictionaries(st.integers(0, 50), st.sampled_from("abc")),
    st.integers(1, 9),
    st.integers(1, BLOCK),
)
def test_runs_are_all_that_is_missing_and_nothing_else(
    wanted: list[str], there: dict[int, str], most: int, last: int
) -> None:
    runs = list(missing(wanted, there, most))
    found = [number for run in runs for number in range(run.first, run.last + 1)]
    assert found == [at for at, each in enumerate(wanted) if there.get(at) != each]
    assert all(run.last - run.first < most for run in runs)
    size = (len(wanted) - 1) * BLOCK + last
    if wanted:
        assert count_blocks(size) == len(wanted)
        lengths = [last if number == len(wanted) - 1 else BLOCK for number in found]
        assert sum(bytes_in(run, size) for run in runs) == sum(lengths)


@given(st.integers(1, 10**15))
def test_a_size_that_is_said_can_be_read(size: int) -> None:
    if size >= 1000:
        assert parse_size(format_size(size).replace(" ", "").replace(",", "")) == pytest.approx(
            size, rel=0.01
        )


@pytest.mark.parametrize("text", ["", "20", "-5G", "0G", "1e3G", "G", "20 X"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(MotleyError, match="is not a size; write it as 20G or 500M"):
        parse_size(text)


def test_what_a_cut_copy_holds_needs_no_room() -> None:
    assert Target(free=50, part=60).lacks(100) == 0
    assert Target(free=50, part=20).lacks(100) == 30
    assert Target(free=0, complete=100).lacks(100) == 0
    assert Target(free=50, complete=90).lacks(100) == 50


def test_a_disk_that_is_slower_than_its_gpu_is_named() -> None:
    found = stage_cn.slow({"a": Copied(0, 0, 90.0), "b": Copied(0, 0, None)}, needs=100)
    assert list(found) == ["a"] and "a reads 90 images/s from its disk" in found["a"].found


def test_packed_once_again_when_images_change_and_never_over_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, to = picture_folder(tmp_path / "pictures"), tmp_path / "to"
    (tmp_path / "hosts").write_text("localhost slots=1\n")

    def stage(*words: object, source: Path = root) -> str:
        always = ("--data-dir", source, "--to", to, "--hostfile", tmp_path / "hosts")
        code = stage_cn.main([*map(str, always), *map(str, words)])
        told = capsys.readouterr().out
        assert code == 0, told
        return told

    with pytest.raises(MotleyError, match="and --budget allows 1 KB; make them smaller with"):
        stage("--budget", "1K")
    assert "would be packed" in stage("--dry-run") and not to.exists()
    path = to / "pictures.packed"
    told = stage()
    assert "28 images, not shrunk: as pixels 3.6 KB an image" in told
    first = open_packed(path).identity
    assert "already done" in stage() and [each.name for each in to.iterdir()] == [path.name]

    image = root / "train" / "cat" / "3.png"
    image.write_bytes((root / "train" / "cat" / "4.png").read_bytes())  # in its place
    assert "the images have changed since it was packed" in stage()
    second = open_packed(path).identity
    assert second != first
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(MotleyError, match="is damaged: the hash of its images has changed"):
        stage()
    path.write_bytes(content[:-9])
    assert "is cut short" in stage() and open_packed(path).identity == second

    other = picture_folder(tmp_path / "more" / "pictures")
    with pytest.raises(MotleyError, match=rf"has the images of {root}, and --data-dir is {other}"):
        stage(source=other)
    path.write_text("mine")
    with pytest.raises(
        MotleyError, match="exists, and is not a packed data set; move that file away"
    ):
        stage()
    assert path.read_text() == "mine"
