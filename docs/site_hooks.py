"""Hooks of the site (mkdocs.yml): pages and files outside of ``docs/`` that pages link to.

The site has them under ``repository/``, at their paths in the repository. Their own links are
followed too, so every page of the site has the pictures and files that it names.
"""

import html
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS, OUTSIDE = "docs", "repository"
# Fences and code in a line, which are no links, or the target of a link or a picture.
_LINK = re.compile(
    r"^```.*?^```$|`[^`\n]*`|\]\((?P<link>[^)\s]+)|(?:src|href)=\"(?P<html>[^\"]+)",
    re.MULTILINE | re.DOTALL,
)
_ELSEWHERE = re.compile(r"[a-z]+:|/|#")  # another site, an absolute path, this page
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_TITLE = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to, directly or through each other."""
    found = set[str]()
    left = [f"{DOCS}/{file.src_uri}" for file in files if file.is_documentation_page()]
    while left:
        page = left.pop()

        def follow(target: str, page: str = page) -> str:
            path, _ = _split(target, page)
            if path and not path.startswith(f"{DOCS}/") and path not in found:
                found.add(path)
                left.extend([path] if path.endswith(".md") else [])
            return target

        _replace_links((ROOT / page).read_text(encoding="utf-8"), follow)
    for path in sorted(found):
        files.append(File.generated(config, f"{OUTSIDE}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links of a page lead to places of the site."""
    uri = page.file.src_uri
    outside = uri.startswith(f"{OUTSIDE}/")
    source = uri.removeprefix(f"{OUTSIDE}/") if outside else f"{DOCS}/{uri}"

    def move(target: str) -> str:
        path, anchor = _split(target, source)
        if path is None:
            return target
        inside = path.startswith(f"{DOCS}/")
        place = path.removeprefix(f"{DOCS}/") if inside else f"{OUTSIDE}/{path}"
        return posixpath.relpath(place, posixpath.dirname(uri) or ".") + anchor

    return _replace_links(markdown, move)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give the cells of a wide table their column's title, which site.css shows on a telephone."""
    return _TABLE.sub(lambda table: _label_cells(table[0]), content)


def _label_cells(table: str) -> str:
    """Return a table of three or more columns with the attribute ``data-label`` on its cells."""
    titles = [re.sub(r"<[^>]+>", "", title) for title in _TITLE.findall(table)]
    if len(titles) < 3:
        return table

    def label(row: re.Match[str]) -> str:
        left: Iterator[str] = iter(titles)
        return re.sub(
            r"<td\b", lambda _: f'<td data-label="{html.escape(next(left), quote=True)}"', row[0]
        )

    return _ROW.sub(label, table)


def _replace_links(markdown: str, change: Callable[[str], str]) -> str:
    """Return Markdown with the target of each link and picture changed."""

    def replace(match: re.Match[str]) -> str:
        for name in ("link", "html"):
            if (target := match[name]) and not _ELSEWHERE.match(target):
                return match[0].removesuffix(target) + change(target)
        return match[0]

    return _LINK.sub(replace, markdown)


def _split(target: str, page: str) -> tuple[str | None, str]:
    """Return the path in the repository that a link leads to, and its anchor with ``#``.

    A folder stands for its README. The path is None if there is no such file: MkDocs then names
    the broken link.

    Args:
        target: the link.
        page: path of the page that has the link.
    """
    place, mark, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), place))
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    return (path if (ROOT / path).is_file() else None), mark + anchor
