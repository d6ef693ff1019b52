"""The archive of what compilers made: whole or not there, and nobody else's."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import clear_caches

from motley.cluster.account import RefusedError
from motley.cluster.facts import read_node
from motley.train import compile_archive
from motley.train.compile_archive import ERRORS, Carried, CompileArchive, hash_node_kind

KIND = "5eed"
FILES = {
    "inductor/ab/cab.main.so": b"\x7fELF" * 999,
    "inductor/fxgraph/xy/key/graph": b"a pickle",
    "triton/KEY/kernel.cubin": b"cubin",
    "triton/KEY/__grp__kernel.json": b"{}",
}
BELOW = ("inductor", "triton")


class Node:
    """A node's own cache folder, and the archive that it shares with others."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.archive = CompileArchive(place, KIND, folder, BELOW)

    def write(self, name: str, content: bytes, age_s: float = 60.0) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (time.time() - age_s,) * 2)

    def files(self) -> dict[str, bytes]:
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "archives"


@pytest.fixture
def full(tmp_path: Path, place: Path) -> Node:
    node = Node(tmp_path / "full", place)
    for name, content in FILES.items():
        node.write(name, content)
    return node


@pytest.fixture
def empty(tmp_path: Path, place: Path) -> Node:
    return Node(tmp_path / "empty", place)


def test_a_node_that_has_nothing_gets_all_and_one_that_has_all_gets_nothing(
    full: Node, empty: Node, place: Path
) -> None:
    assert empty.archive.unpack() is None
    full.write("inductor/locks/cab.lock", b"")
    full.write("matplotlib/fonts.json", b"not compiled")
    saved = full.archive.save()
    assert saved is not None and saved.files == len(FILES)
    assert place.stat().st_mode & 0o077 == 0
    empty.write("triton/KEY/kernel.cubin", b"its own")
    taken = empty.archive.unpack()
    assert taken is not None and taken.files == len(FILES) - 1
    assert empty.files() == {**FILES, "triton/KEY/kernel.cubin": b"its own"}
    assert empty.archive.unpack() is None and full.archive.save() is None


def test_a_run_that_compiles_nothing_keeps_nothing(full: Node, place: Path) -> None:
    for folder in full.folder.rglob("*"):
        os.utime(folder, (time.time() - 60.0,) * 2)
    since = time.time() - 10.0
    assert full.archive.save(since=since) is None and not place.exists()
    assert not full.archive.has_newer(since)  # so that no process is started
    full.write("inductor/fxgraph/xy/new/graph", b"new", age_s=5.0)
    assert full.archive.has_newer(since)
    assert full.archive.save(since=since) is not None


def test_files_keep_the_times_at_which_they_were_written(full: Node, empty: Node) -> None:
    full.write("triton/KEY/__grp__kernel.json", b"{}", age_s=30.0)
    full.archive.save()
    empty.archive.unpack()
    name = "triton/KEY/__grp__kernel.json"
    times = [(node.folder / name).stat().st_mtime for node in (full, empty)]
    assert times[0] == pytest.approx(times[1], abs=1e-3)


def test_what_is_new_replaces_the_archive_and_leaves_no_other(full: Node, place: Path) -> None:
    full.archive.save()
    (before,) = place.glob("*.tar.gz")
    (place / f".{KIND}.killed.1").write_bytes(b"half of an archive")
    full.write("triton/NEW/kernel.cubin", b"new")
    saved = full.archive.save()
    assert saved is not None and saved.files == len(FILES) + 1
    (after,) = place.glob("*.tar.gz")
    assert after != before and len(list(place.iterdir())) == 2


def test_what_may_not_be_whole_and_what_is_too_much_stays_out(
    full: Node, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.write("triton/FUTURE/kernel.cubin", b"being written", age_s=-1.5)
    full.write("inductor/cd/lock", b"")
    full.write("inductor/cd/built.so", b"being built")
    full.write("triton/LARGE/kernel.cubin", bytes(9999))
    monkeypatch.setattr(compile_archive, "MOST_BYTES", 9998)
    full.archive.save()
    index = json.loads((place / f"{KIND}.json").read_text())
    assert index["files"] == {name: len(content) for name, content in FILES.items()}


def _open_to_others(place: Path) -> None:
    place.chmod(0o775)


def _archive_open_to_others(place: Path) -> None:
    next(place.glob("*.tar.gz")).chmod(0o666)


def _of_another(place: Path) -> None:
    os.chown(place / f"{KIND}.json", 12345, -1)


@pytest.mark.parametrize("change", [_open_to_others, _archive_open_to_others, _of_another])
def test_what_others_could_have_written_is_refused(
    full: Node, empty: Node, place: Path, change: object
) -> None:
    if change is _of_another and os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    full.archive.save()
    assert callable(change)
    change(place)
    with pytest.raises(RefusedError, match=r"other users can write|the user of number 12345"):
        empty.archive.unpack()
    assert empty.files() == {}


def test_a_link_is_not_followed(full: Node, empty: Node, place: Path, tmp_path: Path) -> None:
    full.archive.save()
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        empty.archive.unpack()


def test_damage_is_no_archive(full: Node, empty: Node, place: Path) -> None:
    full.archive.save()
    (archive,) = place.glob("*.tar.gz")
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        empty.archive.unpack()
    index = (place / f"{KIND}.json").read_text()
    for text in ("", "[]", "[" * 200_000, '{"archive": 3}', '{"other": 1}',
                 index.replace(archive.name, f"../{archive.name}")):  # fmt: skip
        (place / f"{KIND}.json").write_text(text)
        with pytest.raises(ERRORS):
            empty.archive.unpack()
    assert empty.files() == {}
    for name, content in FILES.items():
        empty.write(name, content)
    assert empty.archive.save() is not None, "what is damaged is replaced"
    assert full.archive.save() is None


def test_an_archive_writes_nowhere_else(empty: Node, place: Path, tmp_path: Path) -> None:
    names = ["matplotlib/x", "triton/../../outside"]
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name in ("triton/unlisted", *names):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
    place.mkdir(mode=0o700)
    packed = gzip.compress(content.getvalue())
    (place / "x.tar.gz").write_bytes(packed)
    digest = hashlib.sha256(packed).hexdigest()
    index = {"archive": "x.tar.gz", "sha256": digest, "files": dict.fromkeys(names, 4)}
    (place / f"{KIND}.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"it has the name triton/\.\./\.\./outside"):
        empty.archive.unpack()
    assert not (tmp_path / "outside").exists() and empty.files() == {}


@pytest.mark.skipif(os.getuid() != 0, reason="a small disk needs root to mount it")
def test_a_full_disk_keeps_the_archive_that_was_there(full: Node, empty: Node, place: Path) -> None:
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", place], check=True)
    try:
        full.archive.save()
        full.write("triton/NEW/kernel.cubin", os.urandom(100_000))
        with pytest.raises(OSError, match="No space left"):
            full.archive.save()
        taken = empty.archive.unpack()
        assert taken is not None and empty.files() == FILES
        assert len(list(place.iterdir())) == 2
    finally:
        subprocess.run(["umount", place], check=True)


def test_the_kind_of_a_node_is_what_it_computes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = read_node()
    other_host = replace(node, host="elsewhere", cores=node.cores + 1)
    assert (
        hash_node_kind(node)
        == hash_node_kind(other_host)
        != hash_node_kind(replace(node, cpu="another"))
    )
    own = hash_node_kind(node)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert hash_node_kind(node) != own


def test_what_was_carried_is_said() -> None:
    assert str(Carried(1210, 35_200_000, 0.42)) == "1,210 files, 35.2 MB, in 0.4 s"


def compute(shift: torch.Tensor) -> torch.Tensor:
    return torch.sin(shift).exp() + 1


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its cache folder; without headers that are compiled once for many kernels, for half a
    minute, and without trying which vectors this processor has, in a Python that imports torch."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.setattr(inductor, "cpp_cache_precompile_headers", False)
    monkeypatch.setattr(inductor.cpp, "vec_isa_ok", False)
    return folder


def hits_of_compiling() -> int:
    """How often the cache had what was asked for."""
    torch._dynamo.reset()
    clear_caches()
    counters.clear()
    given = torch.linspace(0, 1, 64)
    torch.testing.assert_close(torch.compile(compute)(given), compute(given))
    return counters["inductor"]["fxgraph_cache_hit"]


def libraries(folder: Path) -> dict[str, float]:
    found = folder.glob("inductor/*/*.so")
    return {str(path.relative_to(folder)): path.stat().st_mtime for path in found}


def test_what_was_compiled_is_taken(node: Path, tmp_path: Path) -> None:
    archive = CompileArchive(tmp_path / "kept", hash_node_kind(read_node()), node, ["inductor"])
    assert hits_of_compiling() == 0
    built = libraries(node)
    assert built and archive.save() is not None
    node.rename(tmp_path / "old")
    node.mkdir()
    assert archive.unpack() is not None
    assert hits_of_compiling() == 1
    assert libraries(node) == pytest.approx(built, abs=1e-3), "nothing is compiled again"
