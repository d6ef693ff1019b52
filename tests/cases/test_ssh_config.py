"""~/.ssh/config as people write it: Motley logs in as ssh itself would."""

import os
import pwd
import shutil
from pathlib import Path

import pytest

from motley.cluster.login import read_login
from motley.errors import HostTrouble

FILES = Path(__file__).parent / "sshconfig"
BAD = "Host gpu10\n  Port not-a-number\n"


@pytest.fixture
def use_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Put the real ssh, with a configuration file in place of this user's, first on PATH."""
    ssh = shutil.which("ssh")
    assert ssh

    def use(name: str, without: str = "") -> None:
        (tmp_path / "config.d").mkdir()
        shutil.copy(FILES / "config_d_lab", tmp_path / "config.d" / "lab")
        text = (FILES / name).read_text().replace(without, "")
        (tmp_path / "config").write_text(text.replace("config.d/", f"{tmp_path}/config.d/"))
        shim = tmp_path / "ssh"
        shim.write_text(f'#!/bin/sh\nexec {ssh} -F {tmp_path}/config "$@"\n')
        shim.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return use


LOGINS = {
    "inc1": ("10.1.1.1", 2299, "", "[10.1.1.1]:2299"),
    "gpu1": ("10.9.9.1", 2222, "alice", "[10.9.9.1]:2222"),
    "short": ("short.example.org", 22, "", "short.example.org"),
    "gpu4": ("gpu4", 2022, "", "[gpu4]:2022"),
    "gpu5": ("gpu5", 2023, "", "[gpu5]:2023"),
    "gpu6": ("gpu6", 22, "", "lab-gpu"),
    "gpu7": ("gpu7", 2224, "", "[gpu7]:2224"),
    "a.example.net": ("a.example.net", 22, "net", "a.example.net"),
    "bad.example.net": ("bad.example.net", 22, "", "bad.example.net"),
}
TROUBLES = {
    "gpu2": "through another host, bastion", "gpu3": "through another host, ssh -W",
    "gpu9": "refuses its own",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "user"), [("config_ok", ""), ("config_match_final", "zed")], ids=["ok", "match_final"]
)
def test_a_login_is_what_ssh_says(use_config: object, name: str, user: str) -> None:
    use_config(name, BAD)  # type: ignore[operator]
    own = user or pwd.getpwuid(os.getuid()).pw_name
    for host, (address, port, named, known_as) in LOGINS.items():
        login = read_login(host)
        assert (login.address, login.port, login.user, login.known_as) == (
            address, port, named or own, known_as,
        )  # fmt: skip
    assert [file.name for file in read_login("gpu6").known_files][-1] == "known_lab"
    assert read_login("gpu6").uses_agent and not read_login("gpu11").uses_agent
    for host, says in TROUBLES.items():
        with pytest.raises(HostTrouble, match=says):
            read_login(host)


@pytest.mark.parametrize("name", ["config_bad_port", "config_match_final"])
def test_a_file_that_ssh_refuses_is_named_with_its_line(use_config: object, name: str) -> None:
    use_config(name)  # type: ignore[operator]
    with pytest.raises(HostTrouble, match=r"config line \d+: Bad port 'not-a-number'"):
        read_login("gpu1")
