"""Rows of the fault matrix: what is wrong when a job is launched."""

import socket
import time
from importlib.metadata import version

from fault_job import until
from fault_lab import LabPlace
from fault_places import Place
from fault_row import Seen, row
from fault_story import Story, refused
from result import ROOT, VENV

_LAST = "our line last, with the host; not 0"


def _one_lost(place: Place, seen: Seen, how: str, limit_s: float) -> None:
    assert isinstance(place, LabPlace)
    place.harm(how, place.hosts[1])
    refused(place, seen, place.hosts[1], limit_s=limit_s)


@row("a host is cut off, at launch", _LAST, lab=2)
def launch_host_cut(place: Place, seen: Seen) -> None:
    _one_lost(place, seen, "cut", 60)


@row("a host is off, at launch", _LAST, lab=2)
def launch_host_off(place: Place, seen: Seen) -> None:
    _one_lost(place, seen, "kill", 60)


@row("a host is frozen, at launch", _LAST, lab=2)
def launch_host_frozen(place: Place, seen: Seen) -> None:
    _one_lost(place, seen, "freeze", 90)


@row("a host's sshd refuses connections, at launch", _LAST, lab=2)
def launch_ssh_refused(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    lost = place.hosts[1]
    begin = 'env -i PATH="$PATH" $(command -v sshd) -E /run/sshd.log'
    place.root(lost, "kill $(cat /run/sshd.pid)", undo=begin)
    refused(place, seen, lost)


@row("hosts.txt names a host that nobody knows, at launch", _LAST, lab=2)
def launch_host_unknown(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    place.lab.on_head("echo nosuchhost slots=1 >>~/hosts.txt")
    refused(place, seen, "nosuchhost", ranks=3, again=False)


@row("a host's key has changed, at launch", _LAST, lab=2)
def launch_host_key_changed(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    lost, file = place.hosts[1], "~/.ssh/known_hosts"
    keep = f"cp {file} ~/kept; ssh-keygen -q -R {lost} 2>/dev/null"
    place.lab.on_head(f"{keep}; echo {lost} $(cut -d ' ' -f 1,2 ~/.ssh/id_ed25519.pub) >>{file}")
    try:
        refused(place, seen, lost, again=False)
    finally:
        place.lab.on_head(f"mv ~/kept {file}")


@row("a host is lost while its ranks start", "our line, with the host; not 0", lab=2)
def start_host_lost(place: Place, seen: Seen) -> None:
    _while_starting(place, seen, "kill")


@row("a host freezes while its ranks start", "our line, with the host; not 0", lab=2)
def start_host_frozen(place: Place, seen: Seen) -> None:
    _while_starting(place, seen, "freeze")


def _while_starting(place: Place, seen: Seen, how: str) -> None:
    assert isinstance(place, LabPlace)
    lost = place.hosts[1]
    story = Story(place, seen, 2, "--max-steps", 8, MOTLEY_START_TIMEOUT="10")
    assert until(lambda: len(place.ranks()) == 2, 30), "no ranks"
    story.harm(lambda: place.harm(how, lost))
    story.ended(60, lost, next_launch=False)


@row("a host has another file", "refused, with the host, the file and sync_cn.sh", lab=2)
def other_files(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    odd, name = place.hosts[1], "src/motley/engines/optimizer.py"
    place.other_file(odd, ROOT / name, "$a # edited")
    refused(place, seen, odd, name, "sync_cn.sh", last=False)


@row("a host has another torch", "refused, with the host, both versions and install_cn.sh", lab=2)
def other_torch(place: Place, seen: Seen) -> None:
    assert isinstance(place, LabPlace)
    usual, odd, hosts = version("torch").partition("+")[0], "1.13.1", place.hosts
    (about,) = VENV.glob(f"lib/python3*/site-packages/torch-{usual}*.dist-info/METADATA")
    place.other_file(hosts[1], about, f"s/^Version: .*/Version: {odd}/")
    has = f"{odd} on {hosts[1]} .*{usual} on {hosts[0]}"
    refused(place, seen, "versions of torch", has, "install_cn.sh", last=False)


@row("MASTER_PORT is taken", "one line: which port, and what to do")
def port_taken(place: Place, seen: Seen) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        says = (f"MASTER_PORT={port} cannot be used", "another program listens")
        refused(place, seen, *says, last=False, MASTER_PORT=port)


@row("MASTER_PORT is no number", "one line: which port, and what to do", quick=True)
def port_no_number(place: Place, seen: Seen) -> None:
    refused(place, seen, "MASTER_PORT='x'", "unset it", last=False, MASTER_PORT="x")


@row("two runs in one folder at once", "the second is refused, the first goes on")
def two_runs_in_one_folder(place: Place, seen: Seen) -> None:
    story = Story(place, seen, 2, "--max-steps", 200).reach(5)
    began = time.time()
    job = place.start("x", 1, "--max-steps", 200, "--resume", "auto")
    code = job.wait(60)
    seen.said = [place.tidy(line.text) for line in job.said()]
    seen.line = seen.said[-1] if seen.said else ""
    seen.end_s = time.time() - began
    seen.expect(code not in (0, None), f"exit status {code}")
    seen.expect("in use" in seen.line, "the line does not say that it is in use")
    first = story.job.wait(90)
    seen.expect(first == 0, f"the first run ended with {first}")
    story.judge_losses()
    story.judge_left()


@row("three unnamed runs in one second", "each in a folder of its own")
def three_unnamed_runs(place: Place, seen: Seen) -> None:
    words = ["--logs", place.logs, "--max-steps", 2, "--eval-samples", 60, "--shares", 1]
    jobs = [place.start("", 1, *words, train=False) for _ in range(3)]
    codes = [job.wait(120) for job in jobs]
    seen.expect(codes == [0, 0, 0], f"exit status {codes}")
    folders = sorted(path.name for path in place.logs.glob("[!.]*"))
    seen.expect(len(folders) == 3, f"folders {folders}")
    seen.line = ", ".join(folders)
