"""passwordless_ssh.sh: from a password to keys, host keys, a mesh, and back, on real sshds."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_door import PRIVATE, Door, lab_up
from lab_terminal import Terminal
from project import ROOT, environment, venv

pytestmark = pytest.mark.mpi

SCRIPT = ROOT / "setup" / "passwordless_ssh.sh"
SHARED = """
[defaults]
shell = "tcsh"
[[host]]
name = "one1"
address = "10.97.96.1/24"
[[host]]
name = "one2"
address = "10.97.96.2/24"
[[host]]
name = "one3"
address = "10.97.96.3/24"
"""
ALONE = ["alone1", "alone2", "alone3"]
YES = ("right? [y/N]", "y")


@pytest.fixture(scope="module")
def shared() -> Iterator[Door]:
    """Three hosts with tcsh and one home."""
    with lab_up(SHARED) as made:
        yield made


@pytest.fixture(scope="module")
def lab() -> Iterator[Door]:
    """Three hosts with homes of their own."""
    with lab_up(PRIVATE) as made:
        yield made


@pytest.fixture
def private(lab: Door) -> Door:
    """The same, where nobody has used ssh yet."""
    for host in ALONE:
        lab.on(host, "rm", "-rf", ".ssh")
    return lab


def start(door: Door, *options: object) -> Terminal:
    head = next(iter(door.states()))
    return Terminal(door, head, "bash", SCRIPT, "--hostfile", "hosts.txt", *options)


def ssh_files(door: Door, host: str) -> dict[str, str]:
    """All in ~/.ssh of a host, but who the hosts are."""
    folder = door.home(host) / ".ssh"
    return {p.name: p.read_text() for p in folder.glob("*") if "known_hosts" not in p.name}


def keyscan(door: Door, host: str, seen_from: str) -> str:
    return door.on(seen_from, "sh", "-c", f"ssh-keyscan -t ed25519 {host} 2>/dev/null")


class Spy:
    """Looks for a word in the argv and environment of every process of the machine."""

    def __init__(self, word: str) -> None:
        self._word = word.encode()
        self.looks = 0
        self.found: list[bytes] = []

    def __call__(self) -> None:
        self.looks += 1
        for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
            try:
                content = path.read_bytes()
            except OSError:
                continue
            if self._word in content:
                self.found.append(content)


def test_one_password_opens_all_hosts_and_stays_secret(shared: Door) -> None:
    home = shared.home("one1")
    prepare = """
    mkdir -m 755 .ssh dotfiles; chmod 775 .
    printf '# mine' >.ssh/authorized_keys; chmod 664 .ssh/authorized_keys
    printf 'Host elsewhere\\n  Port 99' >dotfiles/config; chmod 640 dotfiles/config
    ln -s ../dotfiles/config .ssh/config
    """
    shared.on("one1", "sh", "-c", prepare)
    secret = shared.password()
    spy = Spy(secret)
    done = start(shared).answer(YES, ("one2, one3: ", secret), meanwhile=spy)
    assert done.code == 0, done.output
    assert secret not in done.output and not spy.found and spy.looks > 3
    assert "mode of ~/ changed from 775 to 755" in done.output
    assert re.search(r"one1 +this machine +not needed", done.output)
    assert re.search(r"one2 +key installed +works", done.output)
    assert re.search(r"one3 +key there already +works", done.output)
    mine, ours = (home / ".ssh" / "authorized_keys").read_text().splitlines()
    assert mine == "# mine" and ours.startswith("restrict,pty ssh-ed25519 ")
    assert ours.endswith(f" motley {home.name}@one1")
    config = home / "dotfiles" / "config"
    assert config.read_text().startswith(
        "Host elsewhere\n  Port 99\n# motley: begin\nHost one2 one3"
    )
    modes = [config, *(home / ".ssh" / name for name in ("authorized_keys", "id_ed25519_motley"))]
    assert [p.stat().st_mode & 0o777 for p in modes] == [0o640, 0o600, 0o600]
    assert shared.on("one1", "ssh", "-o", "BatchMode=yes", "one3", "uname -n; echo $shell").split(
        "\n"
    ) == ["one3", "/usr/bin/tcsh"]
    kept = [p for p in home.rglob("*") if p.is_file() and secret in p.read_text(errors="replace")]
    assert not kept

    before = ssh_files(shared, "one1")
    again = start(shared).answer()
    assert again.code == 0 and again.output.count("already done") == 2, again.output
    assert ssh_files(shared, "one1") == before

    mesh = start(shared, "--mesh").answer()
    assert mesh.code == 0 and "the home is shared" in mesh.output, mesh.output
    assert ssh_files(shared, "one1")["authorized_keys"] == before["authorized_keys"]
    assert shared.on("one2", "ssh", "-o", "BatchMode=yes", "one1", "uname -n") == "one1"

    gone = start(shared, "--remove").answer()
    assert gone.code == 0, gone.output
    rest = {"authorized_keys": "# mine\n", "config": "Host elsewhere\n  Port 99\n"}
    assert ssh_files(shared, "one1") == rest and (home / ".ssh" / "config").is_symlink()


def test_a_refused_password_names_its_hosts_and_a_full_disk_is_said(private: Door) -> None:
    other = 'user=$(ls /home); echo "$user:other" | chpasswd'
    private.do("exec", "--root", "alone3", "--", "sh", "-c", other)
    secret = private.password()
    done = start(private).answer(
        YES, ("alone2, alone3: ", secret), ("on alone3: ", "no"), ("on alone3: ", "")
    )
    assert done.code == 1, done.output
    assert re.search(r"alone2 +key installed +works", done.output)
    assert re.search(r"alone3 +password refused +no", done.output)
    assert "\nalone3 refuses this password" in done.output

    # A disk that has room for part of the line alone.
    fill = """
    user=$(ls /home); cd /home/$user; mkdir -p .ssh
    mount -t tmpfs -o size=8k,mode=700,uid=$(id -u $user) full .ssh; cd .ssh
    head -c 4090 /dev/zero | tr '\\0' '#' >authorized_keys; chown $user authorized_keys
    dd if=/dev/zero of=rest bs=4k 2>/dev/null || true
    """
    private.do("exec", "--root", "alone3", "--", "sh", "-c", fill)
    full = start(private).answer(("on alone3: ", "other"))
    held = private.on("alone3", "wc", "-c", ".ssh/authorized_keys")
    repair = f'umount /home/*/.ssh; echo "$(ls /home):{secret}" | chpasswd'
    private.do("exec", "--root", "alone3", "--", "sh", "-c", repair)
    assert full.code == 1 and re.search(r"alone3 +disk full +no", full.output), full.output
    assert held.startswith("4090 ")


def test_host_keys_come_from_a_yes_or_a_file_and_a_changed_one_is_refused(private: Door) -> None:
    silent = private.run("exec", "alone1", "--", "bash", SCRIPT, "--hostfile", "hosts.txt")
    assert silent.code == 2 and "--known-hosts FILE" in silent.output
    no = start(private).answer(("right? [y/N]", "n"))
    assert no.code == 2 and "nothing was changed" in no.output

    two = keyscan(private, "alone2", "alone1")
    wrong = two.replace("alone2", "alone3")
    private.on("alone1", "tee", "lab_keys", stdin=f"{two}\n{wrong}\n")
    options = ("--hostfile", "hosts.txt", "--known-hosts", "lab_keys")
    dry = private.run("exec", "alone1", "--", "bash", SCRIPT, *options, "--dry-run")
    for change in ("pin the host key of alone2", "make", "ask", "add the key", "name alone2"):
        assert f"would {change}" in dry.output, dry.output
    silent = private.run("exec", "alone1", "--", "bash", SCRIPT, *options)
    assert silent.code == 2 and "no terminal" in silent.output
    assert ssh_files(private, "alone1") == {}

    fingerprint = re.compile(r"SHA256:\S{43}")
    listed = start(private, "--known-hosts", "lab_keys").answer(("on alone2: ", private.password()))
    assert listed.code == 1, listed.output
    assert re.search(r"alone2 +key installed +works", listed.output)
    assert re.search(r"alone3 +host key differs +no", listed.output)
    assert len(set(fingerprint.findall(listed.output))) == 2

    known = private.home("alone1") / ".ssh" / "known_hosts"
    three = keyscan(private, "alone3", "alone1")
    known.write_text(f"a line cut sho\n@cert-authority * ssh-rsa AAAA\n{three}\n{three}\n".replace(
        three, three.replace("alone3", "alone2"), 1))  # fmt: skip
    changed = start(private).answer(("on alone3: ", private.password()))
    assert changed.code == 1, changed.output
    assert re.search(r"alone2 +host key changed +no", changed.output)
    assert re.search(r"alone3 +key installed +works", changed.output)
    assert len(set(fingerprint.findall(changed.output))) == 2


def test_a_mesh_of_private_homes_and_its_end(private: Door) -> None:
    private.on("alone3", "sh", "-c", "mkdir .ssh; echo '# mine' >.ssh/authorized_keys")
    before = {host: ssh_files(private, host) for host in ALONE}
    done = start(private, "--mesh").answer(YES, ("alone3: ", private.password()))
    assert done.code == 0 and "each of alone1, alone2, alone3 reaches each other" in done.output
    hop = "ssh -o BatchMode=yes alone3 'ssh -o BatchMode=yes alone1 uname -n'"
    assert private.on("alone2", "sh", "-c", hop) == "alone1"
    keys = [(private.home(host) / ".ssh" / "id_ed25519_motley").read_text() for host in ALONE]
    assert len(set(keys)) == 3
    assert all(ssh_files(private, h)["authorized_keys"].count("restrict") == 3 for h in ALONE)

    made = {host: ssh_files(private, host) for host in ALONE}
    assert start(private, "--mesh").answer().code == 0
    assert {host: ssh_files(private, host) for host in ALONE} == made

    # What a dead host keeps, the next --remove takes.
    private.do("kill", "alone3")
    part = start(private, "--remove").answer()
    private.do("boot", "alone3")
    assert part.code == 1 and re.search(r"alone3 +no answer", part.output), part.output
    whole = start(private, "--remove").answer()
    assert whole.code == 0 and re.search(r"alone3 +removed", whole.output), whole.output
    assert {host: ssh_files(private, host) for host in ALONE} == before
    assert "nothing is left to remove" in start(private, "--remove").answer().output


@pytest.mark.turns
@pytest.mark.parametrize("moment", ["alone3: ", "block of ~/.ssh/config", "alone2: keys added"])
def test_killed_half_way_the_same_command_finishes(private: Door, moment: str) -> None:
    job = start(private)
    at = job.await_text("right? [y/N]")
    job.type("y")
    at = job.await_text("Password of", at)
    if moment != "alone3: ":
        job.type(private.password())
    job.await_text(moment, at)
    job.kill()

    again = start(private)
    done = again.answer_if_asked("Password of", private.password())
    assert done.code == 0 and done.output.count("works") == 2, done.output
    for host in ALONE[1:]:
        assert ssh_files(private, host)["authorized_keys"].count("\n") == 1
    assert ssh_files(private, "alone1")["config"].count("# motley: begin") == 1


def test_as_shipped_nothing_is_to_be_done() -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT)], capture_output=True, text=True, check=True,
        env=environment(MOTLEY_VENV=str(venv())), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout == "localhost: this machine; there is nothing to do\n"
