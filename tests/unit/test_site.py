"""The site that MkDocs makes of the pages: each page is there, and each link leads somewhere."""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from project import LIMIT_S, ROOT

PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


class Html(HTMLParser):
    """The links of a built page.

    Attributes:
        links: targets of links. loads: targets of pictures, scripts and styles.
        names: places in the page that a link can lead to.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.loads, self.names = set[str](), set[str](), set[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name == "id":
                self.names.add(value)
            elif value and name in ("href", "src"):
                (self.links if tag == "a" else self.loads).add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, text=True, capture_output=True, timeout=LIMIT_S,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there_and_in_the_menu(site: Path) -> None:
    names = {"index.html" if stem == "README" else f"{stem}.html" for stem in PAGES}
    assert names <= {path.name for path in site.iterdir()}
    assert names - {"index.html"} <= Html(site / "index.html").links
    assert not [*site.rglob("*.py.html"), *site.glob("*.py")]


def test_the_search_has_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {f"{stem}.html" for stem in PAGES if stem != "README"} <= found


def test_no_link_leads_nowhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Html(path) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = list[str]()
    for path, page in pages.items():
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if parts.scheme:
                broken += [f"{path}: loads {link}"] if link in page.loads else []
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            names = pages[target].names if target in pages else set[str]()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in names):
                broken.append(f"{path}: {link}")
    assert broken == []
