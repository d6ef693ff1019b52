"""The commands of lab/lab.sh; its -h explains them."""

import argparse
import os
import re
import shutil
import sys
import time
from pathlib import Path

from lab_change import Changes
from lab_host import LABS
from lab_machine import Lab
from lab_profile import LabHost, check_free, read_profile

from motley.errors import MotleyError
from motley.text import did_you_mean

ONE_HOST = ("cut", "heal", "freeze", "thaw", "kill", "boot")
COMMANDS = ("up", "status", "exec", *ONE_HOST, "cpus", "down")
# Debian's package of each program that a lab needs.
PACKAGES = {
    "ip": "iproute2", "tc": "iproute2", "sshd": "openssh-server", "ssh-keygen": "openssh-client",
    "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux",
    "sysctl": "procps", "useradd": "passwd", "chpasswd": "passwd",
    "bash": "bash", "tcsh": "tcsh", "zsh": "zsh",
}  # fmt: skip
COLUMNS = ("host", "address", "interface", "Mbit/s up/down", "shell", "state")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise MotleyError."""
        raise MotleyError(f"{message}; see bash lab/lab.sh -h")


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the words after ``--``."""
    rest: list[str] = []
    if "--" in words:
        rest = words[words.index("--") + 1 :]
        words = words[: words.index("--")]
    command = next((word for word in words if word in COMMANDS), words[0] if words else "")
    if command not in COMMANDS:
        raise MotleyError(
            f"the command {command!r} does not exist{did_you_mean(command, COMMANDS)}; the "
            f"commands are {', '.join(COMMANDS)}"
        )
    parser = Parser(prog="lab.sh", allow_abbrev=False)
    parser.add_argument("command")
    parser.add_argument("--name", default="lab")
    if command in ("exec", "cpus", *ONE_HOST):
        parser.add_argument("host")
    if command == "cpus":
        parser.add_argument("cpus", type=cpus_of, metavar="NUMBER|all")
    if command == "exec":
        parser.add_argument("--root", action="store_true")
    else:
        parser.add_argument("--dry-run", action="store_true")
    if command == "up":
        default = Path(__file__).with_name("tesla.toml")
        parser.add_argument("--profile", type=Path, default=default)
    options = parser.parse_args(words)
    if rest and command != "exec":
        raise MotleyError(f"{command} takes no words after --; see bash lab/lab.sh -h")
    # It becomes a part of names: an account, cgroups, a folder.
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,15}", options.name):
        raise MotleyError(
            f"--name {options.name!r} is not a valid name; use 1 to 16 lower-case letters and "
            "digits"
        )
    return options, rest


def cpus_of(text: str) -> float | None:
    """Return the argument of ``cpus``; None for all."""
    if text == "all":
        return None
    if re.fullmatch(r"\d+(\.\d*)?", text) and float(text) >= 0.01:
        return float(text)
    raise argparse.ArgumentTypeError(f"{text} is neither a number of 0.01 or more nor all")


def check_programs(hosts: tuple[LabHost, ...]) -> None:
    """Raise MotleyError if a program is missing, with the package that has it."""
    shells = {host.shell for host in hosts}
    wanted = [name for name in PACKAGES if name not in ("bash", "tcsh", "zsh") or name in shells]
    missing = [name for name in wanted if shutil.which(name) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[name] for name in missing}))
        raise MotleyError(f"missing {', '.join(missing)}; install with: apt-get install {packages}")


def up(lab: Lab, profile: Path, change: Changes) -> None:
    """Make a lab, unless it is up."""
    hosts = read_profile(profile)
    check_programs(hosts)
    check_free(hosts)
    if lab.is_up:
        if not lab.came_from(profile):
            raise MotleyError(
                f"lab {lab.name} is up with another profile; take it down first, or give the "
                "second lab another --name"
            )
        off = [name for name, state in lab.states().items() if state != "on"]
        print(f"lab {lab.name} is already up" + (f" (not on: {', '.join(off)})" if off else ""))
        return
    start = time.monotonic()
    if lab.exists:
        print(f"lab {lab.name} was left half-made; starting again")
        lab.down()
    lab.up(profile)
    if not change.dry_run:
        print(f"lab {lab.name} is up after {time.monotonic() - start:.1f} s")
        status(lab)


def status(lab: Lab) -> None:
    """Print the account and a table of the hosts."""
    if not lab.is_up:
        others = sorted(path.parent.name for path in LABS.glob("*/complete"))
        print(f"lab {lab.name} is not up" + (f"; up: {', '.join(others)}" if others else ""))
        return
    user = lab.account
    print(f"head {lab.head.name}, user {user.name}, password {user.password}, home {user.home}")
    states = lab.states()
    rows = [COLUMNS] + [
        (host.name, host.address, host.interface, f"{host.up_mbit:g}/{host.down_mbit:g}",
         host.shell, states[host.name])
        for host in lab.hosts
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def execute(lab: Lab, host: LabHost, command: list[str], as_root: bool) -> None:
    """Become a command on a host; its exit status is ours."""
    state = lab.states()[host.name]
    if state == "off" or "frozen" in state:
        undo = "boot" if state == "off" else "thaw"
        raise MotleyError(
            f"{host.name} is {state}; change that first with: bash lab/lab.sh {undo} {host.name}"
        )
    home, user = Path("/root") if as_root else lab.account.home, lab.account
    # What runs in the host ends with its nsenter here.
    words = ["nsenter", "-t", str(lab.inits()[host.name]), "-m", "-u", "-i", "-n", "-p",
             "setpriv", "--pdeathsig", "KILL"]  # fmt: skip
    if not as_root:
        words += [f"--reuid={user.uid}", f"--regid={user.uid}", "--init-groups", "--reset-env"]
    words += ["env", "-C", str(home), f"MOTLEY_VENV={lab.venv}"]
    lab.cgroups.join(host.name)
    sys.stdout.flush()
    os.execvp(words[0], words + (command or [shutil.which(host.shell) or host.shell, "-l"]))


def on_host(lab: Lab, command: str, host: LabHost) -> None:
    """Do one of ONE_HOST, unless it is so already."""
    state = lab.states()[host.name]
    wanted = {"boot": state != "off", "kill": state == "off", "cut": "cut" in state,
              "heal": "cut" not in state, "freeze": "frozen" in state,
              "thaw": "frozen" not in state}  # fmt: skip
    if state == "off" and command not in ("boot", "kill"):
        raise MotleyError(f"{host.name} is off; start it with: bash lab/lab.sh boot {host.name}")
    if wanted[command]:
        print(f"{host.name} is already {state}")
        return
    if command in ("cut", "heal"):
        lab.set_cable(host, up=command == "heal")
    else:
        {"boot": lab.boot, "kill": lab.kill, "freeze": lambda h: lab.cgroups.freeze(h.name),
         "thaw": lambda h: lab.cgroups.thaw(h.name)}[command](host)  # fmt: skip
    print(f"{host.name} is {lab.states()[host.name]}")


def main(words: list[str]) -> int:
    """Do what the words say; 2 for what the user can put right."""
    try:
        options, rest = parse(words)
        dry_run = getattr(options, "dry_run", False)
        if os.geteuid() != 0 and not (dry_run and not (LABS / options.name).exists()):
            raise MotleyError(
                "the lab needs root for its network namespaces and mounts; run: sudo bash "
                f"lab/lab.sh {' '.join(words)}"
            )
        os.umask(0o022)
        change = Changes(dry_run)
        if options.command in ("status", "exec"):
            lab = Lab(options.name, change).load()
            if options.command == "status":
                status(lab)
                return 0 if lab.is_up else 1
            execute(lab, lab.host(options.host), rest, options.root)
        with change.alone(options.name):
            lab = Lab(options.name, change)
            if options.command == "up":
                up(lab.load(), options.profile, change)
            elif options.command == "down":
                existed = lab.exists
                lab.down()
                print(f"lab {lab.name} is down" if existed else f"lab {lab.name} is not up")
            elif options.command == "cpus":
                host = lab.load().host(options.host)
                lab.cgroups.set_cpus(host.name, options.cpus)
                print(f"{host.name} may use {options.cpus or 'all'} processors")
            else:
                on_host(lab.load(), options.command, lab.host(options.host))
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # piped into head, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
