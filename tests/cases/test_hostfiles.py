"""Hosts files as people write them: Motley takes what mpirun takes, and names what it cannot."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from project import LIMIT_S, ROOT, environment, venv

from motley.cluster.hostfile import read_hosts
from motley.errors import MotleyError

FILES = Path(__file__).parent / "hostfiles"
LOCAL = {
    "blank": 2, "bom": 2, "comment_end": 2, "comment_glued": 2, "cpu": 2, "crlf": 2,
    "crlf_blank": 2, "max_slots": 2, "no_newline": 2, "slashes": 2, "slots_big": 999999,
    "slots_max-slots": 2, "slots_max_slots": 2, "spaces_eq": 2, "tab": 2, "trailing_dot": 1,
}  # fmt: skip
REFUSED = {
    "Slots": "write a line as `name slots=N`",
    "badip": "line 2: '10.0.0.300' is not a host name",
    "bracket": "by its IP address",
    "colon": "is not a host name",
    "comma": "'slots=2,'",
    "dash": "is not a host name",
    "empty": "names no host",
    "hosts_comma": "one host per line",
    "http": "is not a host name",
    "lots": "'lots=8'",
    "num": "found '2' after the name; write a line as `name slots=N`",
    "port": r"~/.ssh/config instead: Host localhost, then Port 2222",
    "quoted": "is not a host name",
    "range": "one host per line",
    "reversed": "'slots=2' is not a host name",
    "semicolon": "line 2: ';'",
    "slots0": "N of 1 or more",
    "slots_two": "N of 1 or more",
    "twice": "named twice",
    "twice_case": "named twice",
    "umlaut": "is not a host name",
    "user_at": "write 192.168.1.10 alone here, and these two lines into ~/.ssh/config: "
    "Host 192.168.1.10, then User amd00",
    "zone": "is not a host name",
}
OTHERS = {"far": ("localhost", "203.0.113.7"), "v6": ("::1",)}


def test_every_file_has_its_right_result() -> None:
    names = {path.stem for path in FILES.iterdir()}
    assert names == {*LOCAL, *REFUSED, *OTHERS}


@pytest.mark.parametrize(("name", "slots"), LOCAL.items())
def test_what_mpirun_takes_is_taken(
    name: str, slots: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (host,) = read_hosts(FILES / f"{name}.txt")
    assert (host.name, host.slots) == ("localhost", slots)
    said = capsys.readouterr().err
    assert ("byte-order mark" in said) == (name == "bom")
    assert ("Windows line ends" in said) == ("crlf" in name)


@pytest.mark.parametrize(("name", "names"), OTHERS.items())
def test_hosts_elsewhere_are_read(name: str, names: tuple[str, ...]) -> None:
    assert tuple(host.name for host in read_hosts(FILES / f"{name}.txt")) == names


@pytest.mark.parametrize(("name", "says"), REFUSED.items())
def test_what_cannot_work_is_named_with_its_fix(name: str, says: str) -> None:
    with pytest.raises(MotleyError, match=re.escape(says)):
        read_hosts(FILES / f"{name}.txt")


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["bom", "crlf_blank", "spaces_eq"])
def test_mpirun_takes_what_is_taken(name: str, tmp_path: Path) -> None:
    """The environment's mpirun, whose own reader refuses a mark and CR."""
    for each in ("mpiexec", "ompirun_wrapper", "prterun"):
        (tmp_path / each).symlink_to(venv() / "bin" / each)
    wrapper = tmp_path / "mpirun"
    shutil.copy(ROOT / "setup/launcher/mpirun.sh", wrapper)
    wrapper.chmod(0o755)
    done = subprocess.run(
        [wrapper, "--hostfile", FILES / f"{name}.txt", "-np", "2", "echo", "hello"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "hello\nhello\n", done.stderr
    assert ("which Motley ignores" in done.stderr) == (name != "spaces_eq")
