"""setup/stage_cn.sh: one file on each host's own disk; a copy that was cut goes on."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import wait_until
from lab_door import Door, lab_up
from PIL import Image
from project import LIMIT_S, ROOT

pytestmark = pytest.mark.mpi

HEAD, CUT, LITTLE = NAMES = ("stage1", "stage2", "stage3")
PROFILE = """
[defaults]
home = "private"
down_mbit = 60
[[host]]
name = "stage1"
address = "10.97.91.1/24"
[[host]]
name = "stage2"
address = "10.97.91.2/24"
shell = "tcsh"
[[host]]
name = "stage3"
address = "10.97.91.3/24"
shm_mib = 8
"""
NAME = "a__touch_it__touch_it-2000.packed"  # of what would do so, were it run
BLOCK = 8 << 20


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Door]:
    """Three hosts, and on the first 48 MB of images."""
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / "images" / part / label).mkdir(parents=True)
            image = Image.effect_noise((2400, 2400), 60).convert("RGB")
            image.save(tmp_path / "images" / part / label / "1.jpg", quality=20)
    with lab_up(PROFILE, keys=True) as door:
        door.give(HEAD, tmp_path / "images", "a$(touch it);touch it")
        yield door


def command(*words: str) -> list[str]:
    line = f"cd; exec bash {ROOT}/setup/stage_cn.sh --hostfile hosts.txt --longest 2000"
    return ["exec", HEAD, "--", "bash", "-c", " ".join((line, "--data-dir 'a$(touch it);touch it'",
                                                        *words))]  # fmt: skip


def rows(output: str) -> dict[str, list[str]]:
    lines = (re.split(r"\s{2,}", line) for line in output.splitlines())
    return {cells[0]: cells[1:] for cells in lines if cells[0] in NAMES}


def test_a_copy_that_was_cut_goes_on_where_it_was(lab: Door) -> None:
    homes = {name: lab.home(name) for name in NAMES}
    lab.on(CUT, "sh", "-c", f"mkdir /dev/shm/to; echo mine >/dev/shm/to/{NAME}")
    done = lab.run(*command("--to /dev/shm/to --dry-run"))
    assert done.code == 1 and [row[-1] for row in rows(done.output).values()] == [
        "would be packed", "not writable", "disk full"
    ], done.output  # fmt: skip
    assert (
        "and is not a packed data set\n  move that file away, or choose another folder with"
        in done.output
    )
    assert re.search(
        r"stage3 has 8\.\d+ MB free for /dev/shm/to/.* which needs 48\.\d MB", done.output
    )
    assert not lab.on(HEAD, "ls", "/dev/shm")

    job = lab.start(*command("--to ~/to"))
    part = homes[CUT] / "to" / f".{NAME}.{CUT}.part"
    wait_until(lambda: part.exists() and part.stat().st_size > 2 * BLOCK, 40)
    lab.on(CUT, "pkill", "-KILL", "sshd")
    output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 1 and "stage2 closed the connection during the command" in output, (
        output
    )
    assert rows(output)[LITTLE][0] == "48 MB"
    size = part.stat().st_size
    with part.open("r+b") as file:  # and the disk forgets a bit
        file.write(b"?")

    again = lab.run(*command("--to ~/to"))
    assert again.code == 0, again.output
    sent = {host: row[0] for host, row in rows(again.output).items()}
    assert sent[HEAD] == sent[LITTLE] == "0 B"
    whole = (homes[HEAD] / "to" / NAME).stat().st_size
    rest = whole - (size // BLOCK - 1) * BLOCK
    assert float(sent[CUT].removesuffix(" MB")) == pytest.approx(rest / 1e6, abs=BLOCK / 1e6)
    assert {(homes[name] / "to" / NAME).read_bytes() for name in NAMES} == {
        (homes[HEAD] / "to" / NAME).read_bytes()
    }
    assert "already done" in lab.run(*command("--to ~/to")).output
    kept = {name: sorted(p.name for p in (homes[name] / "to").iterdir()) for name in NAMES}
    assert all(names == [NAME] for names in kept.values())
    assert not [path for home in homes.values() for path in home.rglob("it*")]
