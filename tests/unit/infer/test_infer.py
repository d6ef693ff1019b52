"""Inference on ranks that need not one another: shards, leases, deaths, and what is merged."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import wait_until
from project import ROOT, environment

from motley.errors import MotleyError
from motley.infer.infer_vit import Leases, Shards


def test_a_lease_is_taken_once_and_from_whoever_is_gone(tmp_path: Path) -> None:
    with Leases(tmp_path, gone_s=1.0) as mine:
        assert mine.take("a") and not mine.is_free("a")
        yours = Leases(tmp_path, gone_s=1.0)
        assert not yours.take("a") and yours.take("b")
        time.sleep(1.5)  # mine is renewed, and of a process that lives; so is theirs
        assert not yours.take("a")
        mine.drop("a")
        assert yours.take("a")
        # Of another machine, and not touched for long.
        (tmp_path / "c.lease").write_text("elsewhere.1\n")
        assert not mine.take("c")
        os.utime(tmp_path / "c.lease", (time.time() - 9, time.time() - 9))
        assert mine.is_free("c") and mine.take("c")
        # Of this machine, and dead.
        dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                              capture_output=True, text=True, check=True).stdout  # fmt: skip
        (tmp_path / "d.lease").write_text(f"{os.uname().nodename}.{dead}")
        assert mine.take("d")
    assert {path.name for path in tmp_path.iterdir()} == {"a.lease", "b.lease"}


def test_a_disk_that_fails_for_a_moment_costs_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    def fail(path: Path) -> NoReturn:
        tries.append(path)
        raise OSError(errno.ESTALE, "Stale file handle")

    with Leases(tmp_path, gone_s=1.0) as mine:
        assert mine.take("a")
        with monkeypatch.context() as network:
            network.setattr(mine, "_locked", fail)
            wait_until(lambda: len(tries) > 1, 5)
        path = tmp_path / "a.lease"
        before = path.stat().st_mtime_ns
        wait_until(lambda: path.stat().st_mtime_ns > before, 5)


RACE = """
import sys, time
from pathlib import Path
from motley.infer.infer_vit import Leases

folder, count = Path(sys.argv[1]), int(sys.argv[2])
leases = Leases(folder)
print("ready", flush=True)
sys.stdin.readline()
print(*(number for number in range(count) if leases.take(str(number))), flush=True)
sys.stdin.readline()  # who ends is gone
"""


def test_of_many_who_see_that_an_owner_is_gone_one_takes_its_lease(tmp_path: Path) -> None:
    count = 1500
    for number in range(count):
        lease = tmp_path / f"{number}.lease"
        lease.write_text("elsewhere.1\n")
        os.utime(lease, (time.time() - 99, time.time() - 99))
    takers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, tmp_path, str(count)], text=True, env=environment(
                PYTHONPATH=str(ROOT / "src")
            ), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]  # fmt: skip
    lines = [[taker.stdout.readline() for taker in takers if taker.stdout]]
    for taker in takers:
        assert taker.stdin
        taker.stdin.write("go\n")
        taker.stdin.flush()
    lines += [[taker.stdout.readline() for taker in takers if taker.stdout]]
    for taker in takers:
        taker.communicate()
    assert sorted(int(won) for line in lines[1] for won in line.split()) == list(range(count))


def test_who_was_thought_gone_leaves_the_new_owners_lease_alone(tmp_path: Path) -> None:
    lease = tmp_path / "a.lease"
    with Leases(tmp_path, gone_s=0.4) as frozen:
        assert frozen.take("a")
        lease.write_text("elsewhere.1\n")  # another machine has taken it over meanwhile
        os.utime(lease, (time.time() - 9, time.time() - 9))
        time.sleep(0.3)
        assert lease.stat().st_mtime < time.time() - 5, "not the frozen one's to renew"
        frozen.drop("a")
        assert lease.read_text() == "elsewhere.1\n"
    assert lease.exists()


@given(st.integers(1, 60), st.integers(1, 20))
def test_shards_hold_every_item_once(items: int, size: int) -> None:
    shards = Shards(Path(), items, size, ())
    assert [i for n in range(shards.count) for i in shards.get_items(n)] == list(range(items))


def test_shards_are_whole_and_of_one_thing(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "out", 5, 2, ("index", "word"))
    shards.open({"model": "a"})
    shards.open({"model": "a"})  # again is fine
    with pytest.raises(MotleyError, match=r"model a .now: b.. Give another folder with --out"):
        shards.open({"model": "b"})
    with pytest.raises(MotleyError, match=r"shard 2 .now: 3."):
        Shards(tmp_path / "out", 5, 3, ()).open({"model": "a"})

    def broken() -> Iterator[tuple[object, ...]]:
        yield 0, "x"
        raise ValueError

    with pytest.raises(ValueError):
        shards.write(0, broken())
    assert shards.missing() == [0, 1, 2]
    for number in (2, 0, 1):
        shards.write(number, [(i, f'with "quotes", {i}') for i in shards.get_items(number)])
    lines = shards.merge().read_text().splitlines()
    assert lines[0] == "index,word" and [line[0] for line in lines[1:]] == list("01234")
    (tmp_path / "out" / "shard.00001.csv").write_text("index\n2\n3\n")  # of an earlier version
    with pytest.raises(MotleyError, match="has the columns index, and this run writes index, word"):
        shards.merge()
    (tmp_path / "out" / "shard.00001.csv").write_text("index,word\n2,x\n")
    with pytest.raises(MotleyError, match="has 1 rows, and should have 2; remove the file"):
        shards.merge()
