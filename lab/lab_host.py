"""What a host is made of: its folder of files, and the script that is its process 1."""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab_change import Changes
from lab_profile import LabHost

from motley.errors import MotleyError

ROOT = Path(__file__).resolve().parents[1]
LABS = Path("/var/lib/motley-lab")

# What a host has of its own; what lies there on the machine is hidden.
_OWN = ("/etc", "/home", "/tmp", "/var/tmp", "/run", "/dev/shm")

_SSHD = """\
# Written by Motley's lab/lab.sh for one host of a lab.
HostKey /etc/ssh/ssh_host_ed25519_key
AllowUsers {user}
PasswordAuthentication yes
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
Subsystem sftp internal-sftp
"""

# Process 1 adopts and reaps orphans (bash does) and lives until the host is switched off.
_LIVE = """
echo ready
exec >/dev/null 2>&1
while :; do sleep infinity & wait $!; done
"""


@dataclass(frozen=True)
class Account:
    """The one user of a lab. It exists in the hosts' own /etc alone."""

    name: str
    uid: int
    password: str

    @property
    def home(self) -> Path:
        """As the hosts see it."""
        return Path("/home") / self.name


class HostFiles:
    """The files of one host, all under the lab's folder.

    Args:
        lab: the lab's folder.
        host: from the profile.
        account: the lab's user.

    Attributes:
        folder: where they are.
        homes: what the host has as /home.
    """

    def __init__(self, lab: Path, host: LabHost, account: Account) -> None:
        self.folder = lab / "hosts" / host.name
        self.script = self.folder / "init.sh"
        self.log = self.folder / "init.log"
        self.homes = lab / "homes" / (host.name if host.home == "private" else "shared")
        self._host = host
        self._account = account

    def make(self, change: Changes, hosts: Sequence[LabHost]) -> None:
        """Make them; the account and the host key follow at the first boot."""
        host, etc = self._host, self.folder / "etc"
        change.folder(self.folder)
        change.run("cp", "-a", "/etc", etc)
        change.run("find", etc / "ssh", "-name", "ssh_host_*", "-delete")
        change.run("rm", "-f", etc / "resolv.conf")  # often a link to somewhere else
        change.write(etc / "resolv.conf", "# a lab has no name server\n")
        change.write(etc / "hostname", f"{host.name}\n")
        names = "".join(f"{other.ip} {other.name}\n" for other in hosts)
        change.write(etc / "hosts", f"127.0.0.1 localhost\n{names}")
        change.folder(etc / "ssh")
        change.write(etc / "ssh" / "sshd_config", _SSHD.format(user=self._account.name))
        change.folder(self.folder / "tmp", 0o1777)
        change.write(self.script, self._script())

    def make_home(self, change: Changes, hosts: Sequence[LabHost]) -> None:
        """Make the user's home with a hostfile in it; hosts may share one."""
        change.folder(self.homes)
        home = self.homes / self._account.name
        change.folder(home, 0o755, self._account.uid)
        listed = "".join(f"{other.name} slots=1\n" for other in hosts)
        change.write(home / "hosts.txt", listed, owner=self._account.uid)

    def _script(self) -> str:
        stage = self.folder / "stage"
        saved = kept_paths()
        steps: list[Sequence[object]] = []
        for number, path in enumerate(["/sys/fs/cgroup", *saved]):
            steps.append(("mkdir", "-p", stage / str(number)))
            steps.append(("mount", "--rbind", path, stage / str(number)))
        steps += [
            ("mount", "-t", "tmpfs", "-o", "mode=755", "lab", path) for path in _closed(saved)
        ]
        steps += self._mounts()
        for number, path in enumerate(["/sys/fs/cgroup", *saved]):
            steps.append(("mkdir", "-p", path))
            steps.append(("mount", "--move", stage / str(number), path))
        lines = [
            "#!/bin/bash",
            f"# Process 1 of {self._host.name}: its own mounts, account and sshd.",
            "set -euo pipefail",
            "umask 022",
            *(shlex.join(map(str, step)) for step in steps),
            f"echo {shlex.quote(self._host.name)} >/proc/sys/kernel/hostname",
            *self._first_boot(),
            # From a bare environment: sshd's own would reach every session.
            f'env -i PATH="$PATH" {shutil.which("sshd")} -E /run/sshd.log',
        ]
        return "\n".join(lines) + "\n" + _LIVE.lstrip("\n")

    def _mounts(self) -> list[Sequence[object]]:
        folder, shm = self.folder, self._host.shm_mib
        size = f",size={round(shm * 2**20)}" if shm is not None else ""
        steps: list[Sequence[object]] = [
            ("mount", "--bind", folder / "etc", "/etc"),
            ("mount", "--bind", self.homes, "/home"),
            ("mount", "--bind", folder / "tmp", "/tmp"),
            ("mount", "--bind", folder / "tmp", "/var/tmp"),
            ("mount", "-t", "tmpfs", "-o", "mode=755", "lab", "/run"),
            ("mkdir", "-p", "/run/sshd", "/run/lock"),
            ("mount", "-t", "tmpfs", "-o", f"mode=1777{size}", "lab", "/dev/shm"),
            ("mount", "-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=620,gid=5", "lab",
             "/dev/pts"),
            ("mount", "-t", "proc", "lab", "/proc"),
            ("mount", "-t", "sysfs", "lab", "/sys"),
        ]  # fmt: skip
        return steps + self._hide_python()

    def _hide_python(self) -> list[Sequence[object]]:
        """Hide what the profile says is missing, under an overlay on /usr."""
        hidden = hidden_paths(self._host.python)
        if not hidden:
            return []
        # On a tmpfs: a container's own disk is often an overlay, on which none can stand.
        layer = self.folder / "usr"
        covered = [layer / "upper" / path.relative_to("/usr") for path in hidden]
        folders = sorted({path.parent for path in covered})
        layers = f"lowerdir=/usr,upperdir={layer / 'upper'},workdir={layer / 'work'}"
        return [
            ("mkdir", "-p", layer),
            ("mount", "-t", "tmpfs", "-o", "mode=755", "lab", layer),
            ("mkdir", "-p", layer / "work", *folders),
            # To overlayfs, such a device means that this name is gone.
            *(("mknod", path, "c", "0", "0") for path in covered),
            ("mount", "-t", "overlay", "-o", layers, "lab", "/usr"),
        ]

    def _first_boot(self) -> list[str]:
        user, shell = self._account, shutil.which(self._host.shell) or self._host.shell
        key = "/etc/ssh/ssh_host_ed25519_key"
        make_user = shlex.join(
            [
                "useradd",
                "-M",
                "-u",
                str(user.uid),
                "-U",
                "-d",
                str(user.home),
                "-s",
                shell,
                user.name,
            ]
        )
        return [
            f"if ! [ -e {key} ]; then",
            f"  {make_user} >&2",
            f"  chpasswd <<<{shlex.quote(f'{user.name}:{user.password}')} >&2",
            f"  ssh-keygen -q -t ed25519 -N '' -C {shlex.quote(self._host.name)} -f {key} >&2",
            "fi",
        ]


def hidden_paths(python: str) -> list[Path]:
    """Return the files of the machine's Python that a host lacks, all under /usr.

    Args:
        python: ``normal``, ``no-pip``, ``no-ensurepip`` (and no pip) or ``none``.
    """
    pip = ["bin/pip*", "local/bin/pip*", "lib/python3*/*-packages/pip",
           "local/lib/python3*/*-packages/pip"]  # fmt: skip
    patterns = {
        "normal": [],
        "no-pip": pip,
        "no-ensurepip": [*pip, "lib/python3*/ensurepip", "local/lib/python3*/ensurepip"],
        "none": [*pip, "bin/python*", "local/bin/python*"],
    }[python]
    return sorted({path for pattern in patterns for path in Path("/usr").glob(pattern)})


def environment_path() -> Path:
    """Where Motley's Python environment is, or would be."""
    return Path(os.environ.get("MOTLEY_VENV", ROOT / ".venv")).absolute()


def kept_paths() -> list[Path]:
    """Return the paths that every host needs though they would be hidden there.

    The repository, the environment, and the Python that the environment was made from.
    """
    venv = environment_path()
    wanted = [ROOT, venv]
    settings = venv / "pyvenv.cfg"
    if settings.exists():
        for line in settings.read_text().splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home":
                wanted.append(Path(value.strip()).resolve().parent)
    saved: list[Path] = []
    for path in wanted:
        below = any(path.is_relative_to(other) for other in saved)
        hidden = any(path.is_relative_to(own) for own in _OWN) or _first_closed(path)
        if path.is_dir() and hidden and not below:
            saved.append(path)
    for path in saved:
        if str(path) in (*_OWN, "/"):
            raise MotleyError(
                f"the repository, the environment or its Python lies directly in {path}, where "
                "each host of the lab has a folder of its own; move it into a folder below "
                f"{path}"
            )
    return saved


def _first_closed(path: Path) -> Path | None:
    """Return the first folder on the way that other users may not enter."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


def _closed(kept: Sequence[Path]) -> list[Path]:
    closed = {_first_closed(path) for path in kept} - {None}
    outside = [p for p in closed if p and not any(p.is_relative_to(own) for own in _OWN)]
    return sorted(outside)
