"""Records of a host with a disk of its own are copied while it writes them."""

from pathlib import Path

import pytest
from live_runs import LiveRun

from motley.cluster.ssh import Remote
from motley.errors import HostTrouble
from motley.live.follow import MOST, RunFollower
from motley.live.runs import Copies
from motley.live.snapshot import take_snapshot
from motley.records.run_folder import RunFolder

THERE = Remote("b", None)  # its script, run here


def test_copies_hold_the_same_whole_lines_and_the_run_is_seen_with_them(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "there", ["a", "b"])
    place, head = tmp_path / "copies", tmp_path / "head"
    place.mkdir()
    head.mkdir()
    copies = Copies(live.run, live.run.read_run(), "b", place)
    copies.update(THERE)
    assert not (place / "steps.rank1.jsonl").read_bytes()
    names = ("steps.rank1.jsonl", "gpu.b.csv")
    for step in range(6):
        live.take_step(slow={1: 2.0})
        live.take_samples()
        torn = live.run.path / names[step % 2]
        whole = torn.read_bytes()
        if step % 3 == 0:
            torn.write_bytes(whole[:-9])  # it is being written
        copies.update(THERE)
        torn.write_bytes(whole)
    copies.update(THERE)
    assert all((place / name).read_bytes() == (live.run.path / name).read_bytes() for name in names)
    assert sorted(path.name for path in place.iterdir()) == sorted(names)

    for name in ("run.json", "steps.rank0.jsonl", "gpu.a.csv"):  # what the head has
        (head / name).write_bytes((live.run.path / name).read_bytes())
    followed = RunFollower(RunFolder(head), [RunFolder(place)])
    followed.look(0.0, 0.0)
    now = take_snapshot(followed, live.now)
    assert not now.elsewhere and now.rows[1].load == 0.93 and now.rows[1].step == 5
    assert now.rows[1].waited > 0.4

    live.run.drop_after(3, 1, [0, 1])  # a resumed run takes these steps again
    copies.update(THERE)
    followed.look(1.0, 0.0)
    assert take_snapshot(followed, live.now).rows[1].step == 2
    live.close()


def test_of_a_long_file_the_first_line_and_the_end_come(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "there", ["a", "b"])
    live.take_samples()
    with live.run.gpu_file("b").open("a") as log:
        log.write(live.run.gpu_file("b").read_text().splitlines(keepends=True)[1] * 6000)
    copies = Copies(live.run, live.run.read_run(), "b", tmp_path)
    copies.update(THERE)
    copied = (tmp_path / "gpu.b.csv").read_bytes()
    whole = live.run.gpu_file("b").read_bytes()
    assert MOST < len(copied) + 1000 < len(whole) and whole.endswith(copied[-MOST // 2 :])
    assert copied.splitlines()[0] == whole.splitlines()[0]
    live.take_samples()
    copies.update(THERE)
    new = live.run.gpu_file("b").read_bytes()[len(whole) :]
    assert new and (tmp_path / "gpu.b.csv").read_bytes() == copied + new
    live.close()


def test_a_host_without_the_folder_is_named(tmp_path: Path) -> None:
    about = {"ranks": [{"rank": 1, "host": "b"}]}
    copies = Copies(RunFolder(tmp_path / "none"), about, "b", tmp_path)
    with pytest.raises(HostTrouble, match=f"b has no folder {tmp_path}/none; run this command in"):
        copies.update(THERE)


def test_a_long_file_that_is_wanted_whole_comes_by_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.live.runs._PIECE", 10_000)
    live = LiveRun(tmp_path / "there", ["a", "b"])
    live.take_samples()
    with live.run.gpu_file("b").open("a") as log:
        log.write(live.run.gpu_file("b").read_text().splitlines(keepends=True)[1] * 600)
    live.close()
    copies = Copies(live.run, live.run.read_run(), "b", tmp_path, whole=True)
    pieces = 1
    while copies.update(THERE):
        pieces += 1
    assert (tmp_path / "gpu.b.csv").read_bytes() == live.run.gpu_file("b").read_bytes()
    assert pieces > 5
