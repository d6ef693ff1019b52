"""The mark of a machine that is away, and the end that all ranks agree on."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from motley.cluster.processes import send, ticks
from motley.errors import MotleyError
from motley.faults import FaultKind
from motley.membership import away
from motley.membership.away import find_other_user, mark_away, read_away, remove_mark
from motley.membership.detector import RankStatus
from motley.membership.pause import LEAVE_SIGNAL, OwnPause, PauseAgreement
from motley.membership.protocol import AskStep, encode


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(away, "_PARENT", tmp_path)
    return tmp_path / f"motley-{os.getuid()}"


def mark_of(folder: Path) -> Path:
    return folder / f"away.{os.uname().nodename}.json"


def test_a_mark_lasts_until_its_time_or_until_it_is_removed(folder: Path) -> None:
    assert read_away() is None
    remove_mark()
    assert mark_away(3600).until_words().startswith(", until ")
    assert mark_of(folder).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    found = read_away()
    assert found is not None and found.words().startswith("leaves as asked (leave_cn.sh, until ")
    mark_away(None)
    found = read_away()
    assert found is not None and found.words() == "leaves as asked (leave_cn.sh)"
    remove_mark()
    assert read_away() is None
    mark_away(0.05, "--polite: somebody is at its console")
    found = read_away()
    assert found and found.words() == "gives way (--polite: somebody is at its console)"
    time.sleep(0.06)
    assert read_away() is None
    assert [path.name for path in folder.iterdir()] == [mark_of(folder).name]


def test_a_mark_of_before_the_machine_was_booted_is_none(folder: Path) -> None:
    mark_away(None)
    content = json.loads(mark_of(folder).read_text())
    mark_of(folder).write_text(json.dumps({**content, "boot": "another"}))
    assert read_away() is None


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 4000, '{"until": 1}', '{"since": {}, "until": 1}']
)
def test_what_is_damaged_is_no_mark(folder: Path, text: str) -> None:
    mark_away(None)
    mark_of(folder).write_text(text)
    assert read_away() is None


def test_no_link_is_followed_and_nothing_is_shared(folder: Path, tmp_path: Path) -> None:
    mark_away(None)
    elsewhere = tmp_path / "elsewhere"
    mark_of(folder).rename(elsewhere)
    mark_of(folder).symlink_to(elsewhere)
    assert read_away() is None
    mark_away(None)  # replaces the link, and not what it names
    assert not mark_of(folder).is_symlink() and read_away()
    mark_of(folder).chmod(0o666)
    assert read_away() is None
    mark_of(folder).chmod(0o600)
    folder.chmod(0o777)
    assert read_away() is None
    with pytest.raises(MotleyError, match="other users may write to it"):
        mark_away(None)
    folder.chmod(0o700)
    folder.rename(tmp_path / "real")
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(MotleyError, match="must be your own folder"):
        mark_away(None)
    assert read_away() is None


def test_all_stop_before_the_step_after_the_last_that_any_has_begun() -> None:
    rank0, rank1, pause = OwnPause(), OwnPause(), PauseAgreement(2)
    assert rank0.begin(7) and rank1.begin(7) and rank1.begin(8)
    here, there = socket.socketpair()
    others = {here: RankStatus(1, 1, "b")}
    assert not pause.ask(others, rank0)  # nobody wants it
    pause.want(1, "b", "leaves as asked (leave_cn.sh)")
    for _ in range(2):  # each is asked once
        assert not pause.ask(others, rank0)  # rank 1 has not answered
    assert there.recv(99) == encode(AskStep())
    here.close()
    there.close()
    begun = list[bool]()
    waits = threading.Thread(target=lambda: begun.append(rank0.begin(8)))
    waits.start()
    time.sleep(0.05)
    assert not begun  # until it is decided
    assert pause.answer(1, rank1.ask_step())
    assert pause.at == 9
    rank0.stop_before(9)
    rank1.stop_before(9)
    waits.join(5)
    assert begun == [True]
    assert not rank0.begin(9) and not rank1.begin(9)
    fault = pause.fault(9)
    assert (fault.kind, fault.rank, fault.host) == (FaultKind.LEFT, 1, "b")
    assert fault.line().startswith("b leaves as asked (leave_cn.sh) after step 9; continue with")


def test_before_the_first_step_there_is_nothing_to_agree_on() -> None:
    pause = PauseAgreement(2)
    pause.want(0, "a", None)
    assert not pause.answer(1, None)
    assert pause.answer(0, None)
    assert pause.at is None and pause.fault(None).kind is FaultKind.PAUSED


def test_a_signal_goes_to_who_has_a_handler_for_it_alone() -> None:
    code = "import os, signal, time; {} print(1, flush=True); time.sleep(60)"
    # Not print(), which the signal may have interrupted.
    handler = f"signal.signal({int(LEAVE_SIGNAL)}, lambda *_: os.write(1, b'2' + bytes([10])));"
    for text, caught in ((code.format(""), False), (code.format(handler), True)):
        with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
            assert process.stdout and process.stdout.readline() == b"1\n"
            start = ticks(process.pid)
            assert not send(process.pid, start + 1, LEAVE_SIGNAL)  # another process by now
            assert send(process.pid, start, LEAVE_SIGNAL) is caught
            assert not caught or process.stdout.readline() == b"2\n"
            assert process.poll() is None
            process.kill()


LOGINCTL = """#!/bin/sh
case $2 in
list-sessions) echo "c1 1000 alice seat0" ;;
show-session) printf 'Name=alice\\nSeat=%s\\nClass=user\\nActive=yes\\nRemote=no\\nIdleHint=%s\\nLockedHint=no\\n' "$SEAT" "$IDLE" ;;
esac
"""  # noqa: E501


@pytest.mark.parametrize(
    ("seat", "idle", "here"), [("seat0", "no", True), ("seat0", "yes", False), ("", "no", False)]
)
def test_who_is_at_the_console_is_asked_of_logind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seat: str, idle: str, here: bool
) -> None:
    (tmp_path / "loginctl").write_text(LOGINCTL)
    (tmp_path / "loginctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SEAT", seat)
    monkeypatch.setenv("IDLE", idle)
    assert find_other_user() == ("alice is at its console" if here else "")
