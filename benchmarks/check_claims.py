"""Check every figure that the pages claim against the result file that it comes from.

`benchmarks/claims.toml` lists the figures. Each one is an expression over one file of
`benchmarks/results/`, and stands in a table of `benchmarks/README.md`. README.md and `docs/` quote
figures by name. This program computes all figures again and fails if

- a page or a table shows another value, or a page shows a figure that no claim covers,
- a result file is missing, cannot be read, or differs from the one whose digest was recorded,
- more than `max_commits` commits changed the measured code since the result. An entry with
  `stale = "reason"` is listed on every run instead, and its pages must say so.

A figure of a page is a number with a decimal point, an exponent or a unit, outside of code. Numbers
in words ("half") are not found.

The digests stand in `benchmarks/results/SHA256SUMS`. A new result also holds a digest of its own
content. They show that a file changed after it was recorded. They cannot show that somebody wrote a
file by hand and recorded it then.

The age counts commits from the one that the result records. If git has no such commit, the age
counts from the last commit to the result file. Code that was not committed when it was measured
counts as newer than the result. A commit that changes only docstrings and comments does not count.
"""

import argparse
import ast
import csv
import hashlib
import json
import os
import posixpath
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from string import Formatter
from typing import Any

from result import ROOT, compute_digest

CLAIMS = Path("benchmarks/claims.toml")
RESULTS = Path("benchmarks/results")
SUMS = RESULTS / "SHA256SUMS"
TABLES = Path("benchmarks/README.md")
PAGES = ("README.md", "docs/*.md", "benchmarks/README.md")
EXAMPLE = "example: python benchmarks/check_claims.py"

_NUMBER = re.compile(r"(?<![\w.])[-+±]?\d+(?:,\d{3})*(?:\.\d+)*(?:e[-+]?\d+)?(?!\d)")
_UNIT = (
    r"\s?(?:%|(?:times|ms|s|seconds?|minutes?|hours?|(?:images|tokens|samples)/s|[KMGT]i?B(?:/s)?"
    r"|[KMG]bit/s|W|J|points?)\b)"
)
_UNIT_AHEAD = re.compile(rf"(?:(?:\sto\s|\sand\s|\sor\s|,\s){_NUMBER.pattern})*{_UNIT}")
_NO_PROSE = re.compile(
    r"^```.*?^```$|`[^`\n]*`|<!--.*?-->|(?<=\])\([^)\s]*\)", re.DOTALL | re.MULTILINE
)
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_HEADER = ("figure", "value", "peer", "spread, runs", "hardware", "date", "command", "file")


@dataclass
class Figure:
    """A figure: its value, and the other cells of its row."""

    value: float
    format: str
    row: dict[str, str]
    file: str = ""
    stale_since: str = ""

    def __str__(self) -> str:
        number, _, unit = self.format.partition(" ")
        return f"{self.value:{number}} {unit}".strip()


class Expression:
    """The names that an expression of `claims.toml` can use, over the content of one result."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.first_row: dict[str, Any] = {}

    def values(self, name: str, /, **where: Any) -> list[Any]:
        """Return one field of every row that matches, in the order of the file."""
        rows = [
            row
            for row in self.content["rows"]
            if name in row and all(row.get(key) == value for key, value in where.items())
        ]
        if not rows:
            raise LookupError(f"no row has {name} where {where}")
        self.first_row = self.first_row or rows[0]
        return [row[name] for row in rows]

    def get(self, name: str, /, **where: Any) -> Any:
        """Return one field of the only row that matches."""
        result = self.values(name, **where)
        if len(result) > 1:
            raise LookupError(f"{len(result)} rows have {name} where {where}")
        return result[0]

    def compute(self, expression: str) -> Any:
        """Evaluate an expression.

        Raises:
            LookupError, TypeError, ValueError, ...: the result does not have what it names.
        """
        names = {
            "get": self.get, "values": self.values, "result": self.content, "len": len, "abs": abs,
            "min": min, "max": max, "sum": sum, "zip": zip, "float": float,
            "standard_error": lambda x: statistics.stdev(x) / len(x) ** 0.5,
        }  # fmt: skip
        return eval(expression, {"__builtins__": {}, **names})


def dump_code(text: str) -> str:
    """Return a Python file's code without docstrings, comments and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


@dataclass
class Checker:
    """The claims of one repository, and the problems that were found."""

    root: Path
    claims: dict[str, Any]
    contents: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    codes: dict[str, str] = field(default_factory=dict)  # by blob; see read_code

    def fail(self, cause: str, found: str, fix: str) -> None:
        """Add a problem."""
        self.problems.append(f"{cause}: {found}; {fix}")

    # Result files.

    def check_files(self) -> None:
        """Compare every result file with its recorded digest, and every list with the others."""
        recorded = read_sums(self.root / SUMS)
        listed = self.claims["results"]
        there = {
            path.name
            for kind in ("json", "csv")
            for path in (self.root / RESULTS).glob(f"*.{kind}")
        }
        for name in sorted({*recorded, *listed, *there}):
            path = RESULTS / name
            if not (self.root / path).exists():
                self.fail(
                    f"{path} is missing", "a claim or SHA256SUMS names it", "measure it again"
                )
                continue
            if name not in listed:
                self.fail(
                    f"{path} is not listed", "no entry in claims.toml", f'add [results."{name}"]'
                )
            content = (self.root / path).read_bytes()
            try:
                self.contents[name] = parse_result(name, content.decode())
            except ValueError as error:
                self.fail(f"{path} cannot be read", str(error), "restore it, or measure it again")
                continue
            result = hashlib.sha256(content).hexdigest()
            if not has_own_digest(self.contents[name]):
                self.fail(
                    f"{path} was edited by hand",
                    "its content does not match the digest in it",
                    "restore it, or measure it again",
                )
            elif recorded.get(name) != result:
                self.fail(
                    f"{path} was edited by hand or not recorded",
                    f"its SHA-256 is {result[:12]}, {SUMS} has {recorded.get(name, 'none')[:12]}",
                    "restore it, or after a new measurement: "
                    f"python benchmarks/check_claims.py --record {path}",
                )

    def record(self, paths: list[Path]) -> None:
        """Write the digests of result files to SHA256SUMS."""
        sums = read_sums(self.root / SUMS)
        for path in paths:
            name = os.path.relpath(path, self.root / RESULTS)
            sums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
        (self.root / SUMS).write_text("".join(lines))

    # Age.

    def check_ages(self) -> None:
        """Count the commits to the measured code since each result, and mark the stale ones."""
        if self.git("rev-parse", "--git-dir") is None:
            self.notes.append("ages were not checked: this folder has no git repository")
            return
        if self.git("rev-parse", "--is-shallow-repository") == "true":
            self.notes.append("ages were not checked: the clone is shallow (git fetch --unshallow)")
            return
        limit = self.claims["max_commits"]
        for name, entry in self.claims["results"].items():
            if name not in self.contents:
                continue
            paths = [path for group in entry["code"] for path in self.claims["code"][group]]
            for path in paths:
                if not (self.root / path).exists():
                    self.fail(f"claims.toml, [code]: {path}", "no such path", "name its new place")
            age = self.count_commits(name, paths)
            reason = entry.get("stale")
            if age > limit and not reason:
                self.fail(
                    f"{RESULTS / name} is stale",
                    f"{age} commits changed the code that it measures, {limit} are allowed",
                    'measure it again, or add stale = "reason" to its entry in claims.toml',
                )
            elif reason:  # at any age: somebody may know that it does not hold any more
                self.notes.append(f"stale by at most {age} commits: {RESULTS / name}: {reason}")

    def count_commits(self, name: str, paths: list[str]) -> int:
        """Return the commits that changed the code in `paths` since a result was measured."""
        stated = self.claims["results"][name].get("commit") or self.contents[name].get("commit")
        base = None
        for commit in re.findall(r"\b[0-9a-f]{7,40}\b", str(stated)):
            if self.git("merge-base", "--is-ancestor", commit, "HEAD") is not None:
                base = commit
                break
        base = base or self.git("log", "-1", "--format=%H", "--", str(RESULTS / name))
        if not base or not paths:
            return 0
        count = int(self.git("rev-list", "--count", f"{base}..HEAD", "--", *paths) or 0)
        if count <= self.claims["max_commits"] or self.claims["results"][name].get("stale"):
            return count  # at most, which is enough
        log = self.git(
            "log", "--no-merges", "--format=%H", "--raw", "--no-abbrev", "--no-renames",
            f"{base}..HEAD", "--", *paths,
        )  # fmt: skip
        changed, here = set[str](), ""
        for line in filter(None, (log or "").splitlines()):
            if not line.startswith(":"):
                here = line
            elif here not in changed and self.changes_code(line):
                changed.add(here)
        return len(changed)

    def changes_code(self, line: str) -> bool:
        """Return True if a change changes more than docstrings and comments.

        Args:
            line: as ``git log --raw`` prints it.
        """
        about, _, path = line.partition("\t")
        _, _, old, new, kind = about.split()
        return kind != "M" or not path.endswith(".py") or self.read_code(old) != self.read_code(new)

    def read_code(self, blob: str) -> str:
        """Return a version of a Python file without docstrings, comments and layout."""
        if blob not in self.codes:
            text = self.git("cat-file", "blob", blob) or ""
            try:
                self.codes[blob] = dump_code(text)
            except SyntaxError:
                self.codes[blob] = text
        return self.codes[blob]

    def git(self, *arguments: str) -> str | None:
        """Run git in the repository. Return what it prints, or None if it fails."""
        try:
            done = subprocess.run(
                ["git", "-C", self.root, *arguments], capture_output=True, text=True
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Figures and tables.

    def compute_figures(self) -> None:
        """Compute every figure of `claims.toml`."""
        for table in self.claims["tables"]:
            name = table.get("file", "")
            entry = self.claims["results"].get(name, {})
            for identity, what, expression, form in table["figures"]:
                row = {"peer": table["peer"], "hardware": table.get("hardware", "")}
                if identity in self.figures:
                    self.fail(
                        f"claims.toml, {identity}", "two figures have this name", "rename one"
                    )
                if not name:  # no result file yet
                    row |= {"date": table["date"], "file": "none yet", "spread": table["runs"]}
                    row["command"] = f"`{table['command']}`"
                    self.figures[identity] = Figure(float(expression), form, row)
                    self.notes.append(f"no result file yet: {what}: {self.figures[identity]}")
                    continue
                if name not in self.contents:
                    continue  # a problem already
                content = self.contents[name]
                names = Expression(content)
                try:
                    value = names.compute(expression)
                except Exception as error:  # an expression can raise anything
                    self.fail(f"{RESULTS / name}, {identity}", f"{type(error).__name__}: {error}",
                              "correct the expression in claims.toml, or the file")  # fmt: skip
                    continue
                date = entry.get("date") or content.get("date", "")
                since = f"not measured since {date}" if entry.get("stale") else ""
                spread = names.first_row.get("spread") if table.get("spread", True) else None
                runs = [f"{spread:.1%}" if isinstance(spread, float) else "", table.get("runs", "")]
                command = entry.get("command") or content.get("command", "")
                command = re.sub(r" --json \S+", "", command).replace("|", "\\|")
                path = posixpath.normpath(f"results/{name}")
                row |= {
                    "hardware": entry["hardware"],
                    "date": since or date,
                    "spread": ", ".join(filter(None, runs)),
                    "command": f"`{command}`",
                    "file": f"[{posixpath.basename(name)}]({path})",
                }
                self.figures[identity] = Figure(value, form, row, name, since)

    def render_table(self, section: str) -> str:
        """Return a table as Markdown. Rows of one file after another give its command once."""
        rows = [list(_HEADER), ["---"] * len(_HEADER)]
        last_command = ""
        for table in self.claims["tables"]:
            if table["section"] != section:
                continue
            for identity, what, *_ in table["figures"]:
                if not (figure := self.figures.get(identity)):
                    continue
                row = figure.row
                if not what:  # another figure of the row above
                    rows[-1][1] += f"; {figure}"
                    continue
                command = row["command"]
                if command == last_command:
                    command = "as above"
                last_command = row["command"]
                rows.append([what, f"**{figure}**", row["peer"], row["spread"]])
                rows[-1] += [row["hardware"], row["date"], command, row["file"]]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def check_tables(self, write: bool) -> None:
        """Compare the tables of benchmarks/README.md with the results, or write them."""
        text = (self.root / TABLES).read_text(encoding="utf-8")
        there = {match[2] for match in _TABLE.finditer(text)}
        for section in {table["section"] for table in self.claims["tables"]} - there:
            self.fail(f"{TABLES} lacks a table", section, f"add <!-- table: {section} --> to it")
        made = _TABLE.sub(lambda match: match[1] + self.render_table(match[2]) + match[3], text)
        if write:
            (self.root / TABLES).write_text(made, encoding="utf-8")
            return
        for shown, computed in zip(_TABLE.finditer(text), _TABLE.finditer(made), strict=True):
            lines = shown[0].splitlines(), computed[0].splitlines()
            for line in sorted(set(lines[0]) ^ set(lines[1])):
                side = "the page shows" if line in lines[0] else "the results give"
                self.fail(
                    f"{TABLES}, table {shown[2]}",
                    f"{side} {' | '.join(line.split(' | ')[:2])}",
                    "python benchmarks/check_claims.py --write",
                )

    # Pages.

    def check_page(self, path: Path, write: bool) -> None:
        """Compare the figures of a page with the results, and find those that no claim covers."""
        page = path.relative_to(self.root).as_posix()
        text = path.read_text(encoding="utf-8")
        covered: list[tuple[int, int]] = [match.span() for match in _TABLE.finditer(text)]
        changes: list[tuple[int, int, str]] = []
        for claim in self.claims["claims"]:
            if claim["page"] != page:
                continue
            pattern, names = compile_claim(claim["text"])
            matches = list(pattern.finditer(text))
            if not matches:
                self.fail(f"{page} lacks a claim", claim["text"], "correct its text in claims.toml")
            for match in matches:
                for group, (name, form) in enumerate(names, 1):
                    covered.append(match.span(group))
                    if name not in self.figures:
                        self.fail(f"{page}: {match[0]!r}", f"{name} cannot be computed",
                                  "see its result file, or name another figure")  # fmt: skip
                        continue
                    figure = self.figures[name]
                    number = format(figure.value, form or figure.format.partition(" ")[0])
                    if match[group] != number:
                        changes.append((*match.span(group), number))
                        if not write:
                            file = RESULTS / figure.file if figure.file else CLAIMS
                            self.fail(f"{page}: {match[0]!r}",
                                      f"{match[group]} is {number} in {file} ({name})",
                                      "python benchmarks/check_claims.py --write")  # fmt: skip
                    paragraph = text[text.rfind("\n", 0, match.start()) + 1 :].partition("\n")[0]
                    needed = figure.stale_since or ("" if figure.file else "no result file yet")
                    if needed not in paragraph:
                        self.fail(f"{page}: {match[0]!r}", f"{name} is stale or has no file",
                                  f"say {needed!r} in that paragraph")  # fmt: skip
        for exception in self.claims["exceptions"]:
            for match in re.finditer(re.escape(exception["text"]), text):
                if any(fnmatch(page, pattern) for pattern in exception["pages"]):
                    covered.append(match.span())
                    exception["used"] = True
        for start, end in find_figures(text):
            if not any(first <= start and end <= last for first, last in covered):
                line = text.count("\n", 0, start) + 1
                around = " ".join(text[max(0, start - 30) : end + 30].split())
                self.fail(
                    f"{page}:{line}: {text[start:end]} is not covered",
                    around,
                    "add a claim to claims.toml, or an exception with its reason",
                )
        if write and changes:
            for start, end, number in sorted(changes, reverse=True):
                text = text[:start] + number + text[end:]
            path.write_text(text, encoding="utf-8")

    def check(self, write: bool = False) -> list[str]:
        """Check all claims. Return the problems."""
        self.check_files()
        self.check_ages()
        self.compute_figures()
        if all(
            row[0] in self.figures for table in self.claims["tables"] for row in table["figures"]
        ):
            self.check_tables(write)  # else each problem of a file would be one of its rows too
        pages = sorted(path for pattern in PAGES for path in self.root.glob(pattern))
        for path in pages:
            self.check_page(path, write)
        for claim in self.claims["claims"]:
            if self.root / claim["page"] not in pages:
                self.fail(f"claims.toml: {claim['page']}", "it is no page", f"one of {PAGES}")
        for exception in self.claims["exceptions"]:
            if "used" not in exception:
                self.fail(f"claims.toml: exception {exception['text']!r}", "no page has this text",
                          "remove it")  # fmt: skip
        return self.problems


def find_figures(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the figures of a page are: numbers with a point, an exponent or a unit."""
    prose = _NO_PROSE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for match in _NUMBER.finditer(prose):
        if re.search(r"[.e]", match[0]) or _UNIT_AHEAD.match(prose, match.end()):
            yield match.span()


def compile_claim(text: str) -> tuple[re.Pattern[str], list[tuple[str, str]]]:
    """Compile a claim such as `makes {speed:.2f} times` to a pattern, with names and formats."""
    pattern, names = "", []
    for literal, name, form, _ in Formatter().parse(text):
        pattern += re.escape(literal)
        if name is not None:
            pattern += rf"({_NUMBER.pattern})"
            names.append((name, form or ""))
    return re.compile(pattern), names


def parse_result(name: str, text: str) -> dict[str, Any]:
    """Return the content of a result file: its `rows`, and all else that a JSON file has.

    Raises:
        ValueError: the file is damaged.
    """
    if not name.endswith(".csv"):
        return dict(json.loads(text))
    rows = csv.DictReader(text.splitlines())
    return {"rows": [{key: parse_number(cell) for key, cell in row.items()} for row in rows]}


def parse_number(text: str) -> Any:
    """Return a cell of a CSV file as a number where it is one."""
    try:
        return float(text)
    except ValueError:
        return text


def read_sums(path: Path) -> dict[str, str]:
    """Read a file of `sha256sum`. Return digests by file name."""
    pairs = [line.split(maxsplit=1) for line in path.read_text().splitlines() if line]
    return {name: digest for digest, name in pairs}


def has_own_digest(content: dict[str, Any]) -> bool:
    """Return False if a result holds a digest of itself that does not match."""
    return "digest" not in content or content["digest"] == compute_digest(content)


def main() -> int:
    """Check the claims, and print one line for each problem."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], epilog=EXAMPLE, allow_abbrev=False
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository that is checked")
    parser.add_argument("--write", action="store_true", help="write the figures into the pages")
    parser.add_argument(
        "--record", type=Path, nargs="+", default=[], metavar="FILE",
        help="record the digest of new result files",
    )  # fmt: skip
    options = parser.parse_args()
    try:
        claims = tomllib.loads((options.root / CLAIMS).read_text(encoding="utf-8"))
        checker = Checker(options.root, claims)
        checker.record(options.record)
        problems = checker.check(options.write)
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        print(f"check_claims: cannot check: {type(error).__name__}: {error}; correct {CLAIMS}")
        return 1
    for note in checker.notes:
        print(f"check_claims: {note}")
    for problem in problems:
        print(f"check_claims: {problem}")
    covered = f"{len(checker.figures)} figures, {len(claims['claims'])} claims"
    print(f"check_claims: {covered}, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
