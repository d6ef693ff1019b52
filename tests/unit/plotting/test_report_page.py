"""The report: what it says, and in a real browser, on wide and narrow screens, on paper, for who
cannot see it."""

import base64
import re
from pathlib import Path

import pytest
from chromium import Chromium
from forked import run_script
from matrices import KNOWN
from small_runs import START, write_gpu_log, write_run

from motley.cluster.hostfile import Host
from motley.plan.advice import Advice
from motley.records.classes import PNG, write_classes, write_worst
from motley.sweep.matrix import PRESETS, read_matrix
from motley.sweep.results import BaselineFolder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a matrix of which a cell failed, and of two runs."""
    root = tmp_path_factory.mktemp("page")
    hosts = (Host("a"), Host("b"))
    matrix = read_matrix(PRESETS["strong"], hosts, KNOWN)
    folder = BaselineFolder(root / "strong")
    folder.claim(matrix)
    for cell in (*matrix.references, matrix.cells[0]):
        run = write_run(folder.attempt(cell, 0).path)
        run.update_run(
            plan={"forecast": {"limit_s": 0.4 / cell.hosts}}, versions={"torch": "2"},
            commit=None, started=START, config={"task": "text"},
            task={"title": "GPT of 2 blocks", "unit": "tokens", "weight": 40.0},
        )  # fmt: skip
        folder.output(cell, 0).write_text("")
        folder.end(cell, 0, 0, 5.0)
    folder.output(matrix.cells[1], 0).write_text("motley: <b>& out of memory</b>")
    folder.end(matrix.cells[1], 0, 1, 5.0)
    for number, name in enumerate(("one", "two")):
        run = write_run(root / "logs" / name)
        write_gpu_log(run, "a", gpu=True)
        advice = Advice("few bytes", "--wire powersgd:8", 1.5, "it is inexact")
        forecast = {"global_batch": 40, "limit_s": 0.1, "step_s": 0.155, "compute_s": [0.1, 0.1]}
        run.update_run(
            advice=[advice.as_json()], plan={"wire": "exact", "forecast": forecast},
            started=START + number,
        )  # fmt: skip
    done = run_script("plots/report.py", root)
    assert done.returncode == 0, done.stderr
    return root / "report.html"


def test_the_worst_samples_are_shown_and_a_hostile_record_is_not(tmp_path: Path) -> None:
    run = write_run(tmp_path / "logs" / "one")
    pixels = base64.b64encode(b"a picture").decode()
    write_worst(run, [
        {"index": 3, "name": "/data/val/cat/<img src=x>.png", "loss": 4.5, "label": "cat",
         "predicted": "<script>dog", "probability": 0.9, "label_probability": 0.01,
         "picture": pixels, "picture_type": PNG},
        {"index": 1, "name": "b.png", "loss": None, "label": "cat", "predicted": "cat",
         "picture": '" onerror="alert(1)', "picture_type": PNG},
        {"index": 2, "name": "c.png", "loss": 0.5, "label": 1.25, "predicted": 3.0,
         "picture": pixels, "picture_type": "text/html"},
    ])  # fmt: skip
    assert run_script("plots/report.py", tmp_path).returncode == 0
    said = (tmp_path / "report.html").read_text()
    part = said[said.index("Held-out samples with the largest loss") :]
    assert "<strong>cat (1%)</strong>" in part and "&lt;script&gt;dog (90%)" in part
    assert part.count(f"data:image/png;base64,{pixels}") == 1
    assert "cat/&lt;img src=x&gt;.png" in part and "<img src=x>" not in part
    assert "alert(1)" not in part and "text/html" not in part and "predicted rightly" in part
    assert "<strong>1.25</strong>" in part and "<strong>3</strong>" in part
    write_classes(run, {(0, 0): 9, (0, 1): 1, (1, 1): 1, (1, 0): 3}, ["cat", "<script>dog"])
    assert run_script("plots/report.py", tmp_path).returncode == 0
    said = (tmp_path / "report.html").read_text()
    cells = re.findall(r"<td data-title=.*?>(.*?)</td>", said[said.index("held-out accuracy") :])
    assert cells[:4] == ["&lt;script&gt;dog", "25.0%", "4", "cat (3)"]
    assert cells[4:8] == ["cat", "90.0%", "10", "&lt;script&gt;dog (1)"]
    run.confusion_file.write_text("label\nx\n")
    run.worst_file.write_text("[[[")
    assert run_script("plots/report.py", tmp_path).returncode == 0
    said = (tmp_path / "report.html").read_text()
    assert "largest loss" not in said and "held-out accuracy" not in said


def test_it_is_one_page_that_says_what_won_and_what_failed(page: Path) -> None:
    said = page.read_text()
    assert "hosts1 is the fastest" in said and "hosts2 (out of memory)" in said
    assert "&lt;b&gt;&amp; out of memory" in said and "<b>&" not in said
    assert "GPT of 2 blocks, 30 steps per run" in said and " tokens/s" in said
    assert "A step took 0.158 s." in said and said.count("data:image/png;base64,") > 30
    assert "2 of 2 runs finished" in said and "<p>The run reached 63% of the limit" in said
    runs = said[said.index("2 of 2 runs finished") :]
    assert runs.index("The newest is two. ") < runs.index("<table")
    assert runs.index(">two</a>") < runs.index(">one</a>") < runs.index("<img")  # the newest first
    assert "held-out top-1 (%) of each run against time: vit_digits on digits" in runs
    for outside in ("http:", "https:", 'src="/', "@import"):
        assert outside not in said


@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_is_wrong_with_it_on_a_screen(page: Path, width: int) -> None:
    with Chromium() as browser:
        browser.open(page.as_uri(), width, 800)
        browser.await_text("2 of 2 runs finished.")
        browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert "--wire powersgd:8: about +50% images/s; it is inexact." in browser.text()
        assert browser.run("document.documentElement.scrollWidth") <= width
        cut = browser.run("""[
            ...document.querySelectorAll("h2:last-of-type ~ :is(.scroll, .pictures, details) *")
          ].filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0)
          .map(each => each.outerHTML.slice(0, 80))""")
        assert cut == []  # of the runs
        rows = """(place => {
            const pick = place.querySelectorAll("select")[1];
            pick.value = "one", pick.dispatchEvent(new Event("change"));
            return [...place.querySelectorAll("tbody tr")].map(each => each.textContent);
          })([...document.querySelectorAll(".compared")].at(-1))"""
        other = browser.run(rows.replace('"one"', '"two"'))  # the left one is one at first
        same = browser.run(rows)
        assert same and {each[:7] for each in same} == {"results"} and len(other) >= len(same)
        browser.run("document.querySelector('details').open = false; location.hash = '#one'")
        assert browser.run("document.getElementById('one').open")
        sizes = browser.run("[...document.images].map(each => [each.naturalWidth, each.alt])")
        assert len(sizes) > 6 and all(wide > 500 and len(alt) > 12 for wide, alt in sizes)
        assert browser.accessibility_faults() == []
        assert browser.said == []


def test_all_of_it_is_on_paper(page: Path) -> None:
    with Chromium() as browser:
        browser.open(page.as_uri(), 1280, 800)
        browser.await_text("2 of 2 runs finished.")
        paper = browser.paper()
    boxes = set(re.findall(rb"/MediaBox \[([0-9. ]+)\]", paper))
    assert [[round(float(side)) for side in box.split()] for box in boxes] == [[0, 0, 595, 842]]
    assert len(re.findall(rb"/Type /Page\b", paper)) >= 4  # with what is in drawers
