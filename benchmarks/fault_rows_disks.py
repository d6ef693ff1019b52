"""Rows of the fault matrix: disks that are full, gone or closed, and other things used up."""

import shutil
import subprocess
import time
from pathlib import Path

from fault_disk import fill, small_disk
from fault_places import Place
from fault_row import Seen, row
from fault_story import Story

from motley.faults import FaultKind


@row("the disk is full while it saves", "named; status failed; goes on once there is room")
def disk_full_saving(place: Place, seen: Seen) -> None:
    disk = small_disk(place.folder / "disk", 24 << 10)
    try:
        place.logs = disk / "logs"
        story = Story(place, seen, 2, "--max-steps", 60, "--save-every", 5).reach(3)
        story.harm(lambda: fill(disk))
        code = story.end(40)
        seen.expect(code != 0, f"exit status {code}")
        seen.expect("No space left" in seen.line or "cannot save" in seen.line, "no cause")
        (disk / "filler").unlink()
        story.judge_records(FaultKind.REFUSED, "failed", {})
        story.judge_left()
        story.launch_again()
    finally:
        place.end()
        subprocess.run(["umount", "-l", str(disk)], check=True)


@row("the disk is full while it logs", "named; status failed; goes on once there is room")
def disk_full_logging(place: Place, seen: Seen) -> None:
    disk = small_disk(place.folder / "disk", 24 << 10)
    try:
        place.logs = disk / "logs"
        story = Story(place, seen, 2, "--max-steps", 200, "--save-every", 1000).reach(12)
        story.harm(lambda: fill(disk))
        code = story.end(40)
        seen.expect(code != 0, f"exit status {code}")
        seen.expect("No space left" in seen.line, "the line lacks the cause")
        (disk / "filler").unlink()
        story.judge_records(FaultKind.REFUSED, "failed", {})
        story.judge_left()
    finally:
        place.end()
        subprocess.run(["umount", "-l", str(disk)], check=True)


@row("the run's folder is removed in mid-run", "said at the next record; not 0")
def folder_removed(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 2, "--max-steps", 200).reach(12)
    story.harm(lambda: shutil.rmtree(story.folder.path))
    story.end(30)
    seen.expect(story.job.process.returncode != 0, "exit status 0")
    seen.expect("gone" in seen.line, "the line does not say that it is gone")
    story.judge_left()


@row("the run's folder is a symbolic link, to a folder and to nowhere",
     "refused in one line, with where it leads; nothing is written there")  # fmt: skip
def folder_a_link(place: Place, seen: Seen) -> None:
    place.logs.mkdir()
    there, nowhere = place.folder / "there", place.folder / "nowhere"
    there.mkdir()
    for target, more in ((there, ()), (nowhere, ()), (there, ("--resume", "auto"))):
        link = place.logs / "x"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        story = Story(place, seen, 2, "--max-steps", 8, *more)
        code = story.end(60)
        seen.expect(code not in (0, None), f"exit status {code}")
        says = f"logs/x is a symbolic link to {place.tidy(str(target))};"
        seen.expect(len(seen.said) == 1 and says in seen.line, f"not one line with {says!r}")
    seen.expect(not any(there.iterdir()) and not nowhere.exists(), "it was followed")
    story.judge_left()


@row("logs cannot be written to", "one line, before it trains")
def logs_read_only(place: Place, seen: Seen) -> None:
    place.logs = Path("/proc/motley-logs")
    story = Story(place, seen, 2, "--max-steps", 8)
    code = story.end(60)
    seen.expect(code not in (0, None), f"exit status {code}")
    seen.expect("logs" in seen.line, "the line does not name the folder")
    seen.expect("Traceback" not in story.job.output, "a traceback")
    story.judge_left()


@row("descriptors are used up (ulimit -n 60)", "named, with ulimit -n; not 0")
def no_descriptors(place: Place, seen: Seen) -> None:
    limited = place.folder / "entry.sh"
    limited.write_text('#!/bin/bash\nulimit -n 60\nexec ./entry_cn.sh "$@"\n')
    limited.chmod(0o755)
    words = map(str, place.options("x", 2, ()))
    job = place.command("mpirun", "-np", 2, "--hostfile", "hosts.txt", limited,
                        "torch_dist/train_vit.py", "--max-steps", 60, *words)  # fmt: skip
    code = job.wait(60)
    seen.said = [place.tidy(line.text) for line in job.said()]
    seen.line = seen.said[-1] if seen.said else ""
    if code != 0:  # it may also do with so few
        seen.expect(bool(seen.line), "no line of ours")
    seen.left = place.left()
    seen.expect(not seen.left, "left behind: " + ", ".join(seen.left)[:160])


@row("/dev/shm has 1 MB, with loader workers", "said before or named after; never a hang")
def small_shared_memory(place: Place, seen: Seen) -> None:
    script = place.folder / "entry.sh"
    script.write_text(
        "#!/bin/bash\n[ -n \"$NESTED\" ] || NESTED=1 exec unshare -m \"$0\" \"$@\"\n"
        "mount -t tmpfs -o size=1m none /dev/shm && exec ./entry_cn.sh \"$@\"\n"
    )  # fmt: skip
    script.chmod(0o755)
    words = [*map(str, place.options("x", 1, ())), "--max-steps", "60", "--workers", "2"]
    words += ["--dataset", "synthetic", "--model", "vit_digits"]
    began = time.time()
    job = place.command("mpirun", "-np", 1, "--hostfile", "hosts.txt", script,
                        "torch_dist/train_vit.py", *words)  # fmt: skip
    code = job.wait(90)
    seen.end_s = time.time() - began
    seen.said = [place.tidy(line.text) for line in job.said()]
    seen.line = seen.said[-1] if seen.said else ""
    seen.expect(code is not None, "it hangs")
    if code:
        seen.expect("/dev/shm" in seen.line, "the line does not name /dev/shm")


@row("--logs is empty", "refused in one line", quick=True)
def logs_empty(place: Place, seen: Seen) -> None:
    job = place.command(
        "mpirun", "-np", 1, "--hostfile", "hosts.txt", "./entry_cn.sh", "torch_dist/train_vit.py",
        "--max-steps", 2, "--logs", "",
    )  # fmt: skip
    code = job.wait(60)
    seen.said = [place.tidy(line.text) for line in job.said()]
    seen.line = seen.said[-1] if seen.said else ""
    seen.expect(code not in (0, None), f"exit status {code}")
    seen.expect("--logs" in seen.line and len(seen.said) == 1, "not one line with --logs")


def _pictures(folder: Path) -> Path:
    """Two classes of a few images, one of which is cut short and one of which is a bomb."""
    from PIL import Image

    for split in ("train", "val"):
        for kind in ("a", "b"):
            (folder / split / kind).mkdir(parents=True)
            for number in range(24):
                shade = 7 * number + (40 if kind == "b" else 0)
                Image.new("RGB", (32, 32), (shade, 99, 255 - shade)).save(
                    folder / split / kind / f"{number}.png"
                )
    cut = folder / "train" / "a" / "3.png"
    cut.write_bytes(cut.read_bytes()[:60])
    Image.new("1", (20_000, 20_000)).save(folder / "train" / "b" / "4.png")
    return folder


@row("an image is cut short and one is a decompression bomb, with --bad-samples skip",
     "both skipped and named")  # fmt: skip
def bad_images(place: Place, seen: Seen) -> None:
    folder = _pictures(place.folder / "pictures")
    words = ("--dataset", "folder", "--data-dir", folder, "--bad-samples", "skip", "--epochs", 1,
             "--batch-size", 32, "--eval-samples", 8, "--img-size", 32, "--model", "resnet18",
             "--micro-batch", 32)  # fmt: skip
    story = Story(place, seen, 1, *words)
    code = story.job.wait(90)
    seen.expect(code == 0, f"exit status {code}")
    for name in ("3.png", "4.png"):
        named = [e for e in story.folder.read_events() if name in str(e.get("sample"))]
        seen.expect(bool(named), f"{name} is not named in events.jsonl")
    text = [line.text for line in story.job.lines if "could not be read" in line.text]
    seen.line = place.tidy(text[0]) if text else ""
    seen.expect(bool(text), "nothing says that some could not be read")
    story.judge_left()


@row("a parameter is flipped on rank 0 of three", "rank 0 is named, and put right by the majority")
def parameter_flipped(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 3, "--max-steps", 60, "--save-every", 12,
                  driver=("--flip", "0:parameter:12"),
                  script="tests/support/drivers/flipped.py")  # fmt: skip
    code = story.job.wait(120)
    seen.expect(code == 0, f"exit status {code}")
    lines = [line.text.strip() for line in story.job.lines if "rank 0" in line.text]
    named = [line for line in lines if "differ" in line or "majority" in line or "most" in line]
    seen.line = place.tidy(named[0] if named else "")
    seen.expect(bool(named), "rank 0 is not named")
    story.judge_losses()
    story.judge_left()
