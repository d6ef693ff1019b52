"""A whole lab: what there is of it, and what may be done to it."""

import contextlib
import json
import secrets
import select
import subprocess
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab_cgroups import Cgroups
from lab_change import Changes
from lab_host import LABS, Account, HostFiles, environment_path
from lab_net import Switch
from lab_profile import LabHost, read_profile

from motley.errors import MotleyError
from motley.text import did_you_mean

# In the environment of every process that a lab starts on the machine, so that all can be
# found again whatever became of the lab.sh that started them.
_LAB, _HOST = "MOTLEY_LAB", "MOTLEY_LAB_HOST"
_SWITCH = "@switch"
_BOOT_S = 20
_LOOKS, _LOOK_S = 20, 0.05


class Lab:
    """One lab by name, up or not.

    Attributes:
        folder: all its files.
        hosts: from the profile that it was made from; empty until :meth:`load`, or if not up.
    """

    def __init__(self, name: str, change: Changes) -> None:
        self.name = name
        self.folder = LABS / name
        self._change = change
        self.cgroups = Cgroups(change, name)
        self._profile = self.folder / "profile.toml"
        self._settings = self.folder / "lab.json"
        self._complete = self.folder / "complete"
        self.hosts: tuple[LabHost, ...] = ()

    def load(self) -> "Lab":
        """Read what an earlier lab.sh made; a lab that is not up has nothing to read."""
        if self.is_up:
            try:
                self.hosts = read_profile(self._profile)
                settings = json.loads(self._settings.read_text())
                self.account, self.venv = Account(**settings["account"]), settings["venv"]
            except (MotleyError, OSError, ValueError, KeyError, TypeError) as error:
                raise MotleyError(
                    f"the files of lab {self.name} are damaged, or of another version "
                    f"({error!r}); remove the lab with: bash lab/lab.sh down --name {self.name}"
                ) from None
        return self

    @property
    def is_up(self) -> bool:
        """It came up in full (its hosts may be switched off)."""
        return self._complete.exists()

    @property
    def exists(self) -> bool:
        """There is something of it, perhaps left by a lab.sh that was killed."""
        return self.folder.exists() or bool(processes(self.name)) or bool(self.cgroups.left())

    @property
    def head(self) -> LabHost:
        """The host from which mpirun is typed."""
        return self.hosts[0]

    def came_from(self, profile: Path) -> bool:
        """Whether it is up from this very profile."""
        return self._profile.read_bytes() == profile.read_bytes()

    def host(self, name: str) -> LabHost:
        """Return a host by its name; MotleyError if the lab is not up or has none."""
        if not self.is_up:
            raise MotleyError(
                f"lab {self.name} is not up; start it with: bash lab/lab.sh up --name {self.name}"
            )
        for host in self.hosts:
            if host.name == name:
                return host
        names = [host.name for host in self.hosts]
        raise MotleyError(
            f"lab {self.name} has no host {name!r}{did_you_mean(name, names)}; its hosts are "
            f"{', '.join(names)}"
        )

    def up(self, profile: Path) -> None:
        """Make the lab; what is made is taken down again if anything fails."""
        hosts = read_profile(profile)
        # Each thing has a name that follows from the lab's, so down finds it even if this
        # process is killed between any two lines.
        self._change.folder(self.folder, 0o700)
        try:
            self.hosts = hosts
            self.account = Account(
                f"motley-{self.name}", _free_uid(self.name), secrets.token_hex(6)
            )
            self._change.write(self._profile, profile.read_text())
            settings = {"account": vars(self.account), "venv": str(environment_path())}
            self._change.write(self._settings, json.dumps(settings) + "\n", 0o600)
            self._start_switch()
            files = [HostFiles(self.folder, host, self.account) for host in hosts]
            for home in {each.homes: each for each in files}.values():
                home.make_home(self._change, hosts)
            # A dry run prints in order.
            with ThreadPoolExecutor(1 if self._change.dry_run else len(hosts)) as pool:
                list(pool.map(self._make_host, hosts))
            self._change.write(self._complete, "")
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Take down all that there is of the lab, in whatever state."""
        pids = list(processes(self.name))
        self._change.kill(pids)
        self.cgroups.thaw_all()
        self._change.await_end(pids)
        self.cgroups.remove_all()
        if self.folder.exists():
            # Mounts below it were private to the hosts, and are gone with them.
            self._change.remove(self.folder)
        if not self._change.dry_run:
            with contextlib.suppress(OSError):  # there are other labs, or never was one
                LABS.rmdir()

    def boot(self, host: LabHost) -> None:
        """Switch a host on: its processes, its interfaces, its cable."""
        files = HostFiles(self.folder, host, self.account)
        port = self.hosts.index(host)
        switch = self._switch()
        if port in switch.plugged():
            switch.unplug(port)  # left by a host that ended by itself
        self.cgroups.thaw(host.name)
        started = self._start(host.name, files.log, [
            "unshare", "--net", "--mount", "--propagation", "slave", "--uts", "--ipc", "--pid",
            "--fork", "--kill-child", "bash", str(files.script),
        ])  # fmt: skip
        pid = self._wait_ready(host, started, files.log) if started else f"PID-of-{host.name}"
        switch.plug(port, host, pid)

    def kill(self, host: LabHost) -> None:
        """Switch a host off: its peers hear nothing more, not even that it went."""
        port = self.hosts.index(host)
        if port in self._switch().plugged():
            self._switch().unplug(port)
        pids = [pid for pid, name in processes(self.name).items() if name == host.name]
        self._change.kill(pids)
        self.cgroups.thaw(host.name)  # under v1 a frozen process cannot end
        self._change.await_end(pids)

    def set_cable(self, host: LabHost, up: bool) -> None:
        """Put in or pull a host's cable."""
        self._switch().set_cable(self.hosts.index(host), up)

    def states(self) -> dict[str, str]:
        """Return the state of each host: on, off, or on with its faults."""
        inits = self.inits()
        plugged = self._switch().plugged()
        states = {}
        for port, host in enumerate(self.hosts):
            words = ["frozen"] if self.cgroups.frozen(host.name) else []
            words += ["cut"] if not plugged.get(port) else []
            states[host.name] = (", ".join(words) or "on") if host.name in inits else "off"
        return states

    def inits(self) -> dict[str, int]:
        """Process 1 of each host that is on, as the machine numbers it."""
        return {
            name: pid
            for pid, name in processes(self.name).items()
            if name != _SWITCH and _is_init(pid)
        }

    def _make_host(self, host: LabHost) -> None:
        HostFiles(self.folder, host, self.account).make(self._change, self.hosts)
        self.cgroups.make(host.name, host.cpus, host.memory_mib)
        self.boot(host)

    def _switch(self) -> Switch:
        pids: list[int] = []
        for _ in range(_LOOKS):  # a process that is just becoming another program shows no name
            pids = [pid for pid, name in processes(self.name).items() if name == _SWITCH]
            if pids or self._change.dry_run:
                break
            time.sleep(_LOOK_S)
        if not pids and not self._change.dry_run:
            raise MotleyError(
                f"the switch of lab {self.name} does not run any more; take the lab down, and up "
                f"again: bash lab/lab.sh down --name {self.name}"
            )
        return Switch(self._change, pids[0] if pids else "PID-of-the-switch")

    def _start_switch(self) -> None:
        started = self._start(_SWITCH, self.folder / "switch.log", [
            "unshare", "--net", "bash", "-c", "echo ready; exec sleep infinity >/dev/null",
        ], join=False)  # fmt: skip
        if started and started.stdout and not started.stdout.readline():
            raise MotleyError(
                f"the switch does not start: {(self.folder / 'switch.log').read_text().strip()}"
            )
        self._switch().power_on()

    def _start(
        self, host: str, log: Path, command: Sequence[str], join: bool = True
    ) -> "subprocess.Popen[str] | None":
        """Start a process that stays, marked, and in the host's cgroups from its first line."""
        folders = [str(folder) for folder in self.cgroups.all_of(host)] if join else []
        enter = 'n=$1; shift; for f in "${@:1:n}"; do echo $$ >"$f/cgroup.procs"; done; shift "$n"'
        return self._change.start(
            ["bash", "-euc", f'{enter}; exec "$@"', "lab", str(len(folders)), *folders, *command],
            {_LAB: self.name, _HOST: host}, log,
        )  # fmt: skip

    def _wait_ready(self, host: LabHost, started: "subprocess.Popen[str]", log: Path) -> int:
        assert started.stdout is not None
        text, _, _ = select.select([started.stdout], [], [], _BOOT_S)
        if not text or started.stdout.readline() != "ready\n":
            why = log.read_text().strip().splitlines() or [f"it said nothing in {_BOOT_S} s"]
            raise MotleyError(f"{host.name} does not boot: {why[-1]}")
        return self.inits()[host.name]


def processes(lab: str) -> dict[int, str]:
    """Return the processes that a lab started, each with its host."""
    result = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if folder.stat().st_uid != 0:
                continue
            words = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or is not ours to read
            continue
        marks = dict(word.decode(errors="replace").partition("=")[::2] for word in words if word)
        if marks.get(_LAB) == lab:
            result[int(folder.name)] = marks.get(_HOST, "")
    return result


def _is_init(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
    return len(numbers) > 1 and numbers[-1] == "1"


def _free_uid(lab: str) -> int:
    """Return a user id that neither an account nor another lab has."""
    taken = {int(line.split(":")[2]) for line in Path("/etc/passwd").read_text().splitlines()}
    for settings in LABS.glob("*/lab.json"):
        with contextlib.suppress(OSError, ValueError):  # it is being made, or taken down
            taken.add(json.loads(settings.read_text())["account"]["uid"])
    start = zlib.crc32(lab.encode()) % 5000
    return next(
        uid for uid in (50_000 + (start + k) % 5000 for k in range(5000)) if uid not in taken
    )
