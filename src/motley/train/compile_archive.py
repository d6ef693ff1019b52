"""The archive of compiled code, for later runs and for nodes whose disk lacks the code.

The archive has the content of Motley's cache folder: the files of TorchInductor, Triton and MIOpen,
and DeepSpeed's extensions. (torch.compiler.save_cache_artifacts returns only the files that
TorchInductor made in one process, without libraries for a CPU.) A folder holds

    <kind>.json            {"archive": "<kind>-<hash>.tar.gz", "sha256": "...", "files": {
                            "triton/XW3.../kernel.cubin": 5120, ...}}
    <kind>-<hash>.tar.gz   the same files, in the order in which they were written

TorchInductor unpickles the files of its cache. A user with write access to the archive could
therefore make other users run code; see motley.cluster.account. Compilers name a file by a hash of
its source, so an existing file is never replaced.

The archive lies beside the folders of the runs, because the next run needs the same code. Nodes are
of one kind if they can run the same compiled code. One rank of each kind of node writes the archive
after the first steps, so that even a run that is killed later leaves an archive. The rank writes
the archive again at the end, with the code for evaluations and for other batch sizes.
"""

import contextlib
import errno
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from motley.cluster.account import cache_folder, create, open_own, own_folder
from motley.cluster.facts import NodeFacts
from motley.cluster.processes import ChildTimeoutError, run_child
from motley.config.options import Config
from motley.launch.process import compiled_below, die_with_parent
from motley.launch.same_code import version

if TYPE_CHECKING:  # these load torch, which the process that packs does not need
    from motley.checkpoint.run import Run
    from motley.launch.world import World
    from motley.measure.process_group import ProcessGroup

MOST_BYTES = 512 << 20  # largest total size of an archive's files; newest first
_WHOLE_S = 2.0  # a file that was written to within this time may be incomplete
# Folders of temporary files. dynamo has guesses of sizes, by name.
_OF_A_MOMENT = ("locks", "precompiled_headers", "dynamo")
_SUFFIXES = (".lock", ".tmp")
_PACKAGES = ("torch", "triton", "deepspeed")
DAMAGE = (
    tarfile.TarError, zlib.error, ValueError, EOFError, LookupError, TypeError, AttributeError,
    RecursionError,
)  # fmt: skip
ERRORS = (OSError, *DAMAGE)


@dataclass(frozen=True)
class Carried:
    """A summary of the files that were packed into an archive or unpacked from an archive.

    Attributes:
        files: number of files.
        size: total size of the unpacked files in bytes.
        seconds: seconds that packing or unpacking took.
    """

    files: int
    size: int
    seconds: float

    def __str__(self) -> str:
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        return f"{files}, {self.size / 1e6:,.3g} MB, in {self.seconds:.1f} s"


@dataclass(frozen=True)
class Index:
    """The index of one kind of node's archive.

    Attributes:
        archive: name of the archive's file.
        sha256: hash of the archive.
        files: sizes in bytes by name, such as ``triton/XW3.../kernel.cubin``.
    """

    archive: str = ""
    sha256: str = ""
    files: Mapping[str, int] = field(default_factory=dict)


def hash_node_kind(node: NodeFacts) -> str:
    """Return a hash of all properties of a node on which compiled code depends.

    Two of these properties are the features of the CPU, which compiled code uses, and the paths of
    folders, which Triton's files contain.
    """
    fits = {
        "packages": {name: version(name) for name in _PACKAGES},
        "python": platform.python_version(), "machine": platform.machine(),
        "libc": platform.libc_ver(), "cpu": [node.cpu, _cpu_features()],
        "devices": sorted({device.name for device in node.devices}), "folder": str(cache_folder()),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(fits, sort_keys=True).encode()).hexdigest()[:16]


def _cpu_features() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    return ""


class CompileArchive:
    """The archive of one kind of node, in a folder that nodes may share.

    Args:
        place: folder of the archive.
        kind: name of the kind of node.
        folder: the node's own folder of compiled code.
        below: subfolders of ``folder`` in which compilers keep their files.
        is_damaged: True: replace the current archive without reading it.
    """

    def __init__(
        self, place: Path, kind: str, folder: Path, below: Sequence[str], is_damaged: bool = False
    ) -> None:
        self._place, self._kind, self._folder, self._below = place, kind, folder, below
        self._is_damaged = is_damaged

    @property
    def words(self) -> tuple[str, ...]:
        """Arguments of :func:`main` that identify this archive."""
        return (str(int(self._is_damaged)), str(self._place), self._kind, str(self._folder),
                *self._below)  # fmt: skip

    def unpack(self) -> Carried | None:
        """Unpack the files that the node lacks, and return a summary. None: no file is missing.

        Raises:
            OSError: the disk is full or not writable. Files unpacked before the error stay.
            Exception: one of DAMAGE, if the archive is damaged.
        """
        try:
            return self._unpack()
        except DAMAGE:
            self._is_damaged = True
            raise

    def _unpack(self) -> Carried | None:
        started = time.monotonic()
        if not self._below or not self._place.exists():
            return None
        with own_folder(self._place) as place:
            index = self._index(place)
            missing = {
                name: size for name, size in index.files.items()
                if name.startswith(tuple(f"{part}/" for part in self._below))
                and not (self._folder / name).exists()
            }  # fmt: skip
            if not missing:
                return None
            size = sum(missing.values())
            if 2 * size > shutil.disk_usage(self._folder).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
            with open_own(place, Path(index.archive).name) as file:
                _check_hash(file, index)
                self._put(file, missing)
        return Carried(len(missing), size, time.monotonic() - started)

    def _put(self, file: io.BufferedReader, missing: Mapping[str, int]) -> None:
        """Extract the files ``missing``, in the order in which compilers wrote them.

        Triton's list of a kernel's files is thus written after these files. The method extracts the
        files one by one, because Python 3.11.0 to 3.11.3 have no filters for tarfile. Also, the
        filter "data" accepts links, and accepts names that are not in the index.

        Args:
            file: the opened archive.
            missing: sizes in bytes of the files to extract, by name.
        """
        with tarfile.open(fileobj=file, mode="r:gz") as tar:
            for member in tar:
                if not member.isreg() or missing.get(member.name) != member.size:
                    continue
                to, content = self._folder / member.name, tar.extractfile(member)
                if os.path.normpath(member.name) != member.name or content is None:
                    raise ValueError(f"it has the name {member.name}")
                to.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=to.parent, suffix=".tmp") as new:
                    shutil.copyfileobj(content, new)
                    new.flush()
                    os.fchmod(new.fileno(), member.mode & 0o700)
                    os.utime(new.fileno(), (member.mtime, member.mtime))
                    with contextlib.suppress(FileExistsError):  # another process was first
                        os.link(new.name, to)

    def has_newer(self, since: float) -> bool:
        """Return True if the node compiled any file after ``since``, in seconds since 1970.

        A new file changes the modification time of its folder. Only folders are examined, because a
        look at thousands of files would hold the GIL while the training thread launches kernels.
        """
        return any(_has_newer(self._folder / part, since, _DEPTH) for part in self._below)

    def save(self, since: float = 0.0) -> Carried | None:
        """Replace the archive by the node's current files, and return a summary.

        None: no file is new, and the archive is unchanged.

        Args:
            since: time in seconds since 1970. Only files that were compiled later count as new,
                because other runs archive earlier files.

        Raises:
            OSError: the disk is full or not writable. The archive is unchanged.
            Exception: one of DAMAGE.
        """
        started = time.monotonic()
        result = _list_complete_files(self._folder, self._below)
        if not any(info.st_mtime >= since for info in result.values()):
            return None
        with contextlib.suppress(FileExistsError):
            self._place.mkdir(mode=0o700)
        with own_folder(self._place) as place:
            known = self._list_saved(place)
            if all(known.files.get(name) == info.st_size for name, info in result.items()):
                return None
            self._replace(place, result)
        size = sum(info.st_size for info in result.values())
        return Carried(len(result), size, time.monotonic() - started)

    def _list_saved(self, place: int) -> Index:
        """Return the index of the saved archive, or an empty index if the archive is damaged.

        Args:
            place: descriptor of the folder of the archive.
        """
        try:
            return Index() if self._is_damaged else self._index(place)
        except DAMAGE:
            return Index()

    def _replace(self, place: int, found: Mapping[str, os.stat_result]) -> None:
        own = f".{self._kind}.{os.uname().nodename}.{os.getpid()}"
        sizes = {name: info.st_size for name, info in found.items()}
        try:
            digest = self._pack(place, own, found)
            archive = f"{self._kind}-{digest[:16]}.tar.gz"
            os.replace(own, archive, src_dir_fd=place, dst_dir_fd=place)
            with create(place, own) as file:
                index = {"archive": archive, "sha256": digest, "files": sizes}
                file.write(json.dumps(index).encode())
            os.replace(own, f"{self._kind}.json", src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(own, dir_fd=place)
            raise
        for name in os.listdir(place):  # older archives, and the leftovers of a killed rank
            if name.startswith((f"{self._kind}-", f".{self._kind}.")) and name != archive:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=place)

    def _pack(self, place: int, name: str, found: Mapping[str, os.stat_result]) -> str:
        """Write the archive, and return its SHA-256."""
        with create(place, name) as file:
            with (
                gzip.GzipFile("", "wb", 1, file, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w") as tar,
            ):
                for each in sorted(found, key=lambda each: (found[each].st_mtime_ns, each)):
                    tar.add(self._folder / each, each, recursive=False)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _index(self, place: int) -> Index:
        """Return the index of the saved archive, or an empty index if there is no archive."""
        try:
            with open_own(place, f"{self._kind}.json") as file:
                index = Index(**json.load(file))
            os.stat(Path(index.archive).name, dir_fd=place, follow_symlinks=False)
        except FileNotFoundError:
            return Index()
        return index


def describe_error(error: BaseException) -> str:
    """Return a text that explains the cause of an error."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def main(since: str, is_damaged: str, place: str, kind: str, folder: str, *below: str) -> None:
    """Save an archive in this process, at a lower priority than the training.

    Args:
        since: see :meth:`CompileArchive.save`.
        is_damaged: see :attr:`CompileArchive.words`.
        place: see :attr:`CompileArchive.words`.
        kind: see :attr:`CompileArchive.words`.
        folder: see :attr:`CompileArchive.words`.
        *below: see :attr:`CompileArchive.words`.
    """
    die_with_parent()
    os.nice(5)
    archive = CompileArchive(Path(place), kind, Path(folder), below, is_damaged == "1")
    try:
        archive.save(float(since))
    except ERRORS as error:
        sys.exit(describe_error(error))


def _list_complete_files(folder: Path, below: Sequence[str]) -> dict[str, os.stat_result]:
    """Return the complete files by name, up to the size limit of an archive.

    Temporary files are left out, and so are folders to which a compiler is still writing. Recently
    changed folders come first.
    """
    folders = _folders(folder, below)
    if any(map(_is_fresh, folders.values())):  # this run wrote there, and may be done by then
        time.sleep(_WHOLE_S)
        folders = _folders(folder, below)
    result: dict[str, os.stat_result] = {}
    room = MOST_BYTES
    for here in sorted(folders, key=lambda here: _newest(folders[here]), reverse=True):
        size = sum(info.st_size for info in folders[here].values())
        unfinished = Path(here, "lock").exists()  # an extension that is being built
        if size <= room and not unfinished and not _is_fresh(folders[here]):
            result |= folders[here]
            room -= size
    return result


def _newest(files: Mapping[str, os.stat_result]) -> float:
    return max(info.st_mtime for info in files.values())


def _is_fresh(files: Mapping[str, os.stat_result]) -> bool:
    return abs(time.time() - _newest(files)) < _WHOLE_S


def _has_newer(folder: Path, since: float, depth: int) -> bool:
    """Return True if a folder, or one at most ``depth`` levels below it, has changed.

    Args:
        folder: the folder.
        since: seconds since 1970.
        depth: number of levels.
    """
    with contextlib.suppress(FileNotFoundError):
        info = folder.stat()
        if info.st_mtime >= since:
            return True
        if depth and info.st_nlink != 2:  # a folder with two links has no folders in it
            with os.scandir(folder) as entries:
                inner = [Path(each) for each in entries if each.is_dir(follow_symlinks=False)]
            return any(_has_newer(each, since, depth - 1) for each in inner)
    return False


def _folders(folder: Path, below: Sequence[str]) -> dict[str, dict[str, os.stat_result]]:
    """Return the files of each folder below ``folder``, by the path of the folder.

    The files of a folder are listed by their paths relative to ``folder``.
    """
    folders: defaultdict[str, dict[str, os.stat_result]] = defaultdict(dict)
    for part in below:
        for here, inner, names in os.walk(folder / part):
            inner[:] = [name for name in inner if name not in _OF_A_MOMENT]
            for path in (Path(here, name) for name in names if not name.endswith(_SUFFIXES)):
                with contextlib.suppress(FileNotFoundError):
                    info = path.lstat()
                    if stat.S_ISREG(info.st_mode):
                        folders[here][str(path.relative_to(folder))] = info
    return folders


def _check_hash(file: io.BufferedReader, index: Index) -> None:
    """Raise ValueError if the hash of the archive differs from the hash in the index."""
    if hashlib.file_digest(file, "sha256").hexdigest() != index.sha256:
        raise ValueError(f"{index.archive} is damaged")
    file.seek(0)


if __name__ == "__main__":
    main(*sys.argv[1:])


FOLDER = ".compiled"  # name of a folder in the folder of all runs
_FIRST_STEPS = 8
_LOOK_S = 1.0
_DEPTH = 2  # Compilers make a folder for each kernel or graph at most this deep.
_SAVE_LIMIT_S = 600.0
_LAST_S = 30.0  # limit of the last save; an archive is complete or missing


class CompileKeeper:
    """An object that unpacks the archive at the start, and saves it after the first steps.

    Args:
        world: the ranks.
        config: the options.
    """

    def __init__(self, world: "World", config: Config) -> None:
        self._notes: list[str] = []
        self._since = time.time()
        self._host, self._place = world.host, Path(config.logs) / FOLDER
        self._kind = hash_node_kind(world.nodes[world.rank])
        self._archive = CompileArchive(
            self._place, self._kind, cache_folder(), compiled_below(os.environ)
        )
        self._ends, self._failed = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._run: Run

    def take(self, world: "World") -> None:
        """Unpack the archived code on each node, and store notes on the results.

        All ranks call this method before anything is compiled. A failure does not end the run.
        """
        received = [each for each in world.once_per_node(self._take) if each is not None]
        took = {host: carried for host, carried, _ in received if carried is not None}
        if took:
            most = max(took.values(), key=lambda carried: carried.size)
            self._notes.append(
                f"compiled code for {', '.join(took)} comes from {self._place}: {most}"
            )
        troubles = [trouble for _, _, trouble in received if trouble]
        self._notes += troubles
        self._failed = bool(troubles)  # mostly a fault of the folder; the notes report it

    def take_notes(self) -> list[str]:
        """Return the notes on the unpacked code, and clear them. All ranks have equal notes."""
        notes, self._notes = self._notes, []
        return notes

    def _take(self) -> tuple[str, Carried | None, str] | None:
        """Unpack the archive on this node.

        Return the node's host name, a summary of the unpacked files, and a text about an error.
        The result is None if there is nothing to report.
        """
        try:
            taken = self._archive.unpack()
        except ERRORS as error:
            why = describe_error(error)
            note = f"compiled code in {self._place} is not used on {self._host}: {why}"
            return self._host, None, note
        return (self._host, taken, "") if taken is not None else None

    def begin(self, run: "Run", group: "ProcessGroup", step: Callable[[], int | None]) -> None:
        """Start to archive newly compiled code, on the first rank of each kind of node.

        All ranks that train call this method.

        Args:
            run: the run, which records failures.
            group: process group of the ranks that train.
            step: function that returns the number of the last step, or None before the first step.
                Another thread calls it.
        """
        from motley.comm.collectives import all_gather_object  # see TYPE_CHECKING

        kinds = all_gather_object(self._kind)
        if kinds.index(self._kind) == group.rank and self._thread is None:
            self._run = run
            self._thread = threading.Thread(
                target=self._keep, args=(step,), name="compile keeper", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """Save the compiled code in the archive at the end of the run."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _keep(self, step: Callable[[], int | None]) -> None:
        first = None
        while not self._ends.wait(_LOOK_S):
            now = step()
            first = now if first is None else first
            if now is not None and first is not None and now - first >= _FIRST_STEPS:
                self._save()
                break
        self._ends.wait()
        self._save()

    def _save(self) -> None:
        """Save the archive in a separate process.

        Packing thousands of files in this process would hold the GIL for seconds, and the training
        thread could launch no kernel. If nothing new was compiled, no process is started.
        """
        if not self._archive.has_newer(self._since):
            return
        command = [sys.executable, "-P", "-m", "motley.train.compile_archive", str(self._since)]
        try:
            done = run_child([*command, *self._archive.words], _SAVE_LIMIT_S, "see its disk")
            code, errors = done.returncode, done.stderr
        except ChildTimeoutError as error:
            code, errors = 1, str(error)
        if code:
            if not self._failed:
                message = errors.strip().splitlines() or [f"exit status {code}"]
                text = (
                    f"compiled code cannot be stored in {self._place}: {message[-1]}; training "
                    "continues, and another node compiles it again"
                )
                print(f"motley: {self._host}: {text}", flush=True)
                self._run.event("compile_archive", text=text)
            self._failed = True
