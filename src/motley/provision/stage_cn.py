"""Pack a folder of images into one file, and copy the file to every host's own disk.

The script can also shrink the images. A training reads the file with --dataset packed.

  bash setup/stage_cn.sh --data-dir flowers
  bash setup/stage_cn.sh --data-dir flowers --dry-run   # sizes, and free disk
  bash setup/stage_cn.sh --data-dir flowers --longest 256 --budget 20G

The folder has train/ and val/ with one folder per class in each, as for
--dataset folder. The file has the pixels that PIL decodes. Without shrinking,
training gets the same numbers from the file as from the folder, but decodes no
JPEGs. This machine makes the file and copies it by ssh to the same path on all
hosts at once, in blocks that are checked by hash. After an interruption, the
same command sends the missing blocks. If no block is missing, the command only
checks the file. If images have changed, they are packed again. The script names
each host without room before it packs or copies the file. On a host, only the
file and a hidden partial copy beside it are changed. A file at that path that
Motley has not made is left alone.

Options:
  --data-dir DIR    the folder of images
  --to FOLDER       folder on each host. Default: /var/tmp/motley-USER
  --longest PIXELS  shrink larger images to this longest side, by Lanczos
  --keep KIND       pixels (the default), or jpeg: a third of the bytes. Shrunk
                    JPEGs have quality 95, and all are decoded in training
  --budget SIZE     largest size on each host, as 20G. A larger file is refused
  --needs RATE      images/s that a host's GPUs process. A host with a slower
                    disk is named
  --jobs N          processes that pack. Default: all cores
  --hostfile FILE   default: the repository's hosts.txt (command motley: the current folder's)
  --dry-run         print every change, do none

Exit status: 0 all hosts have the file, 1 some host does not have it or has a
disk that is too slow, 2 nothing was begun.
"""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from motley.cluster.account import user_name
from motley.cluster.login import is_here
from motley.cluster.ssh import run_on_all, split
from motley.data.packed_file import (
    BEGIN,
    JPEG,
    PIXELS,
    SUFFIX,
    Folder,
    Keep,
    Packed,
    count_bytes,
    list_folder,
    open_packed,
    pack,
)
from motley.errors import HostTrouble, MotleyError
from motley.provision.setup_command import (
    Parser,
    ask_all,
    many,
    print_troubles,
    read_hostfile,
    run,
    table,
)
from motley.provision.stage_copy import (
    Bar,
    Copied,
    Source,
    Target,
    copy,
    format_size,
    full,
    look,
    parse_size,
    read_source,
)

LOOK_S, DAY_S = 40, 86400
HERE = "localhost"


def main(words: Sequence[str]) -> int:
    """Pack the images and copy the file to all hosts.

    Return 1 if some host has no copy, or has a disk that is too slow, else 0.
    """
    options = parse(words)
    folder, keep = list_folder(options.data_dir), Keep(options.keep, options.longest)
    path = options.to / file_name(options.data_dir, keep)
    hosts = [host.name for host in read_hostfile(options)]
    here = look(HERE, path)
    packed, why = packed_before(path, folder, keep)
    size = path.stat().st_size if packed else estimate(folder, keep)
    check_budget(size, options)
    seen = ask_all(hosts, lambda host: look(host, path), LOOK_S)
    targets, troubles = split(seen)
    away = [host for host in targets if not is_here(host)]
    lack = {host: full(host, path, targets[host], size) for host in away
            if targets[host].lacks(size)}  # fmt: skip
    if not packed and here.free < size:
        raise full("this machine", path, here, size)
    troubles |= lack
    if options.dry_run:
        print(table(("host", "free", str(path)), plan_rows(seen, lack, size, bool(packed))))
        print_troubles(troubles)
        return 1 if troubles else 0
    if packed is None:
        packed = pack_now(folder, keep, path, options.jobs, size, why)
    copied, failed = split(copy_all([host for host in targets if host not in lack], packed))
    troubles |= failed | slow(copied, options.needs)
    report(copied, packed, not why)
    print_troubles(troubles)
    return 1 if troubles else 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options, checked before any host is visited."""
    parser = Parser("stage_cn", __doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--to", type=Path, default=Path(f"/var/tmp/motley-{user_name()}"))
    parser.add_argument("--longest", type=int)
    parser.add_argument("--keep", choices=(PIXELS, JPEG), default=PIXELS)
    parser.add_argument("--budget", type=parse_size)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--needs", type=float, default=0.0)
    options = parser.parse_args(words)
    if not options.to.is_absolute():
        raise MotleyError(
            f"--to {options.to}: give an absolute path, which is the same on all hosts"
        )
    for name, least in (("longest", 8), ("jobs", 1)):
        if (value := getattr(options, name)) is not None and value < least:
            raise MotleyError(f"--{name} {value}: give {least} or more")
    options.data_dir = options.data_dir.resolve()
    return options


def file_name(folder: Path, keep: Keep) -> str:
    """Return the packed file's name, made of the folder's name and the kind of packing."""
    word = re.sub(r"[^A-Za-z0-9._-]", "_", folder.name).strip(".-") or "images"
    words = [word, *([str(keep.longest)] if keep.longest else []), *([JPEG] * (keep.kind == JPEG))]
    return "-".join(words) + SUFFIX


def packed_before(path: Path, folder: Folder, keep: Keep) -> tuple[Packed | None, str]:
    """Return the packed file if it exists and holds these images, else None.

    The second value is the reason for None.

    Raises:
        MotleyError: the file was made from another folder.
    """
    if not path.exists():
        return None, "it does not exist yet"
    try:
        packed = open_packed(path)
    except MotleyError as error:
        return None, str(error).partition(";")[0]
    about = packed.about
    if about.source != str(folder.root):
        raise MotleyError(
            f"{path} has the images of {about.source}, and --data-dir is {folder.root}; remove "
            "the file, or choose another folder with --to"
        )
    if (about.files, about.kept, about.longest) != (folder.files, keep.kind, keep.longest):
        return None, "the images have changed since it was packed"
    return packed, ""


def estimate(folder: Folder, keep: Keep) -> int:
    """Estimate the packed file's size in bytes, and print the size for both kinds of packing."""
    count = len(folder.paths)
    sizes = {kind: count_bytes(folder, Keep(kind, keep.longest)) for kind in (PIXELS, JPEG)}
    texts = [
        f"as {kind} {'' if kind == PIXELS else 'about '}{format_size(size / count)} an image, "
        f"{format_size(size)}"
        for kind, size in sizes.items()
    ]
    shrunk = f"of {keep.longest} pixels at most" if keep.longest else "not shrunk"
    print(f"{many(count, 'image')}, {shrunk}: {'; '.join(texts)}")
    return sizes[keep.kind] + 64 * count + 65536  # with the metadata of each image


def check_budget(size: int, options: argparse.Namespace) -> None:
    """Raise MotleyError if the packed file is larger than ``--budget``."""
    if options.budget is not None and size > options.budget:
        raise MotleyError(
            f"the packed images take {format_size(size)}, and --budget allows "
            f"{format_size(options.budget)}; make them smaller with --longest "
            f"PIXELS{('' if options.keep == JPEG else ' or --keep jpeg')}"
        )


def plan_rows(
    seen: Mapping[str, Target | HostTrouble],
    lack: Mapping[str, HostTrouble],
    size: int,
    is_packed: bool,
) -> list[tuple[str, str, str]]:
    """Return one table row per host: name, free disk, planned work."""
    rows = []
    for host, target in seen.items():
        if isinstance(target, HostTrouble):
            rows.append((host, "", target.kind))
        elif is_here(host):
            rows.append(
                (host, format_size(target.free), "is there" if is_packed else "would be packed")
            )
        elif host in lack:
            rows.append((host, format_size(target.free), lack[host].kind))
        elif is_packed and target.complete == size:
            rows.append((host, format_size(target.free), "it exists; would be checked"))
        else:
            rest = f", {format_size(target.part)} are there" if target.part else ""
            rows.append((host, format_size(target.free), f"would be copied{rest}"))
    return rows


def pack_now(folder: Folder, keep: Keep, path: Path, jobs: int, size: int, why: str) -> Packed:
    """Pack the file on this machine, print which images could not be read, and return the file."""
    print(f"packing {path}: {why}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Bar("packing", size) as bar:
        unreadable = pack(folder, keep, path, jobs, bar.at)
    for each in unreadable[:5]:
        print(f"cannot be read, and training reports it: {each}")
    if len(unreadable) > 5:
        print(f"and {len(unreadable) - 5} more")
    return open_packed(path)


def copy_all(hosts: Sequence[str], packed: Packed) -> Mapping[str, Copied | HostTrouble]:
    """Copy the packed file to all hosts at once. Return the copy or the fault of each host."""
    end = len(packed.content)
    with Bar("checking", packed.path.stat().st_size) as bar:
        source: Source = read_source(packed.path, (BEGIN, end, packed.about.images_sha256), bar.at)
    with Bar("copying", source.size * len(hosts)) as bar:
        return run_on_all(
            hosts, lambda host: copy(host, source, sample_bytes(packed), _part(bar)), DAY_S
        )


def sample_bytes(packed: Packed) -> int:
    """Return the mean size of an image in bytes."""
    return max(1, int(packed.rows[:, 1].mean()))


def _part(bar: Bar) -> Callable[[str, int], None]:
    return lambda host, size: bar.at(size, host)


def slow(copied: Mapping[str, Copied], needs: float) -> dict[str, HostTrouble]:
    """Return a fault for each host whose disk reads fewer images/s than its GPUs process."""
    return {
        host: HostTrouble(
            "slow disk",
            f"{host} reads {each.rate:,.0f} images/s from its disk, and training needs "
            f"{needs:,.0f}",
            "name a folder on a faster disk with --to (/dev/shm is in memory), or make the file "
            "smaller with --longest PIXELS or --keep jpeg; a file that fits in memory is read "
            "from the disk only once",
        )
        for host, each in copied.items()
        if each.rate is not None and each.rate < needs
    }  # fmt: skip


def report(copied: Mapping[str, Copied], packed: Packed, was_packed: bool) -> None:
    """Print a table of the copies, and the options with which to train from the file."""
    size = packed.path.stat().st_size
    rows = [
        (
            host, format_size(each.sent), f"{each.seconds:.1f}",
            f"{each.sent / 1e6 / each.seconds:.0f}" if each.sent else "",
            format_size(size - each.sent),
            "" if each.rate is None else f"{each.rate:,.0f} images/s",
        )
        for host, each in copied.items()
    ]  # fmt: skip
    if rows:
        columns = ("host", "sent", "seconds", "MB/s", "already there", "its disk reads")
        print(table(columns, rows))
    if was_packed and not any(each.sent for each in copied.values()):
        print("already done")
    print(f"\ntrain from it with: --dataset packed --data-dir {packed.path}")


if __name__ == "__main__":
    run(main)
