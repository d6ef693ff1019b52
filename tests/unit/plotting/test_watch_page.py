"""plots/watch.py as a page: who may ask for what, and what a real browser shows."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium
from forked import run_script
from live_runs import LAB, LiveRun
from small_runs import write_run
from watched_page import served

HOSTILE = "<img src=x onerror=document.title='taken'>"


def ask(
    address: str, path: str = "/", host: str | None = None, method: str = "GET"
) -> tuple[int, str, dict[str, str]]:
    """Status, body (of a stream the first event), and headers."""
    found = re.match(r"http://([^/]+):([0-9]+)/", address)
    assert found is not None
    line = http.client.HTTPConnection("127.0.0.1", int(found[2]), timeout=10)
    try:
        line.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        line.putheader("Host", f"127.0.0.1:{found[2]}" if host is None else host)
        line.endheaders()
        answer = line.getresponse()
        stream = answer.getheader("Content-Type") == "text/event-stream"
        body = answer.fp.readline() if stream else answer.read()
        return answer.status, body.decode(), dict(answer.getheaders())
    finally:
        line.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path / "logs" / "lab", compute_s=4.0, samples_s=30.0)
    for _ in range(30):
        run.take_step()
    run.take_samples(others="alice")
    yield run
    run.close()


def test_it_tells_this_machine_alone_and_only_what_is_to_be_seen(live: LiveRun) -> None:
    with served(live.run.path.parent) as address:
        status, page, headers = ask(address)
        assert status == 200 and "<title>Motley</title>" in page
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
        status, event, _ = ask(address, "/live?run=lab&rank=2")
        told = json.loads(event.removeprefix("data: "))
        assert status == 200 and told["run"]["step"] == 30 and told["run"]["history"]["rank"] == 2
        for name in ("localhost:1", "[::1]:8080"):
            assert ask(address, host=name)[0] == 200
        for name in ("evil.example", "127.0.0.1.evil.example:80", ""):
            assert ask(address, host=name)[0] == 403
        for path in ("/../../etc/passwd", "/%2e%2e/run.json", "/run.json", "/live/..", "//etc"):
            assert ask(address, path)[0] == 404
        for run in ("..", "../lab", "%2e%2e%2flab", "/etc", "%00", "x" * 5000):
            assert '"run": null' in ask(address, f"/live?run={run}")[1]
        for rank in ("-1", "x", "9" * 400, "77"):
            assert '"history": null' in ask(address, f"/live?run=lab&rank={rank}")[1]
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(address, "/live", method=method)[0] == 501


def test_bound_to_all_it_wants_the_token_in_the_address(live: LiveRun) -> None:
    with served(live.run.path, "0.0.0.0:0") as address:
        token = address.partition("?token=")[2]
        assert len(token) > 20
        for path in ("/", "/live", "/?token=", f"/?token={token[:-1]}", "/live?token=%ff", "/x"):
            status, body, _ = ask(address, path)
            assert status == 403 and "wrong token" in body
        assert ask(address, f"/?token={token}", host="head.lab:80")[0] == 200
        assert ask(address, f"/live?token={token}&run=lab")[0] == 200


def test_an_address_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for where, said in (
            (f"127.0.0.1:{port}", "Address already in use; choose another port"),
            ("here", "is not an address; write HOST:PORT"), ("1.2.3.4:99999", "is not an address"),
            ("203.0.113.7:8080", "cannot serve on 203.0.113.7:8080"),
        ):  # fmt: skip
            done = run_script("plots/watch.py", tmp_path, "--serve", where)
            assert done.returncode == 2 and said in done.stderr
            assert len(done.stderr.splitlines()) == 1


def test_a_browser_shows_it_on_wide_and_on_narrow_screens(live: LiveRun, tmp_path: Path) -> None:
    ranks = [{"rank": rank, "host": HOSTILE if rank == 4 else host, "uuid": f"GPU-{rank}"}
             for rank, host in enumerate(LAB)]  # fmt: skip
    live.run.update_run(ranks=ranks)
    live.run.event("replan", text=HOSTILE)
    with served(live.run.path.parent) as address, Chromium() as browser:
        browser.open(address, 1280, 800)
        text = browser.await_text("no rank waits")
        assert HOSTILE in text and "alice 0.6G" in text and "images/s" in text
        for _ in range(5):
            live.take_step(slow={3: 2.0})
        browser.await_text("waits for tesla3 (rank 3)", limit=6)
        browser.run("document.querySelectorAll('td.rank button')[3].click()")
        browser.await_text("rank 3 on tesla3")
        assert browser.run("document.querySelectorAll('#curves svg').length") >= 5
        browser.run(
            "const sort = document.getElementById('sort');"
            "sort.value = 'who is waited for'; sort.dispatchEvent(new Event('change'))"
        )
        assert browser.run("document.querySelector('td.host').textContent") == "tesla3"
        browser.picture(tmp_path / "wide.png")
        assert browser.accessibility_faults() == []
        browser.open(address, 375, 800, dark=True)
        browser.await_text("waits for tesla3 (rank 3)")
        for width in ("scrollWidth", "clientWidth"):  # nothing reaches beyond the screen
            assert browser.run(f"document.documentElement.{width}") == 375
        browser.picture(tmp_path / "narrow.png")
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert "taken" not in browser.run("document.title") and not browser.said
        write_run(live.run.path.parent / "other")  # curves of both, and metrics of one
        browser.await_text("all runs", limit=8)
        browser.run("document.getElementById('all').click()")
        browser.await_text("loss from ")
        assert browser.run("document.querySelectorAll('#chart polyline').length") == 2
        browser.run(
            "const metric = document.getElementById('metric');"
            "metric.value = 'held-out top1'; metric.dispatchEvent(new Event('change'))"
        )
        browser.await_text("held-out top1 from 0.5000 to 0.7000, step 20 to 60")
        assert browser.run("document.querySelectorAll('#chart polyline').length") == 1
        browser.picture(tmp_path / "runs.png")
        assert browser.accessibility_faults() == []
    with served(live.run.path.parent, "0.0.0.0:0") as address, Chromium() as browser:
        browser.open(address.replace("0.0.0.0", "127.0.0.1"), 1280, 800)
        browser.await_text("waits for tesla3 (rank 3)")
