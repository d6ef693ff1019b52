"""A standalone Python comes from a mirror, and is checked."""

import shutil
import subprocess
import sys
from pathlib import Path

from project import ROOT


def test_a_standalone_python_comes_from_a_mirror_and_is_checked(
    tmp_path: Path, python_archive: Path
) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine = subprocess.check_output(["uname", "-m"], text=True).strip()
    name = f"cpython-{version}.9+20990101-{machine}-unknown-linux-gnu-install_only.tar.gz"
    mirror, target = tmp_path / "mirror", tmp_path / "python"
    mirror.mkdir()
    shutil.copy(python_archive, mirror / name)
    digest = subprocess.check_output(["sha256sum", mirror / name], text=True).split()[0]
    older = name.replace(".9+", ".10+").replace("install_only", "debug")

    def get(sha: str) -> subprocess.CompletedProcess[str]:
        (mirror / "SHA256SUMS").write_text(f"{sha}  {name}\n{'0' * 64}  {older}\n")
        return subprocess.run(
            ["bash", ROOT / "setup/get_python.sh", target, "--version", version],
            env={"PATH": "/usr/bin:/bin", "MOTLEY_PYTHON_URL": mirror.as_uri()},
            text=True, capture_output=True, check=False,
        )  # fmt: skip

    bad = get("1" * 64)
    assert bad.returncode == 1 and "is not what its SHA256SUMS says" in bad.stderr
    assert not target.exists()
    good = get(digest)
    assert good.returncode == 0, good.stderr
    told = subprocess.check_output([target / "bin/python3", "-c", "import sys; print(sys.prefix)"])
    assert Path(told.decode().strip()) == target
    assert [path.name for path in tmp_path.iterdir() if "python" in path.name] == ["python"]
