"""Write docs/messages.md: every message of an error in the sources, with what it names in <angles>.

python docs/list_messages.py            # after a message was changed
python docs/list_messages.py --check    # exit code 1 if the page is not the sources'
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "messages.md"
# What says something to a user, and which of its arguments are the words.
ERRORS = {
    **dict.fromkeys(
        ("MotleyError", "NoMemoryError", "NotFiniteError", "DeviceError", "ArgumentTypeError",
         "UnreadableSample"), slice(0, 1),
    ),
    "HostTrouble": slice(0, 3), "Fault": slice(3, 5),
}  # fmt: skip
PLACES = {  # in the order in which a user meets them
    "setup": "Preparing hosts",
    "lab": "The emulated lab",
    "src/motley/cluster": "Hosts and GPUs",
    "src/motley/launch": "Launch and lost ranks",
    "src/motley/membership": "Launch and lost ranks",
    "src/motley/provision": "Preparing hosts",
    "src/motley/config": "Options",
    "src/motley/plan": "Options",
    "src/motley/tasks": "Tasks",
    "src/motley/data": "Data",
    "src/motley/measure": "Measuring and planning",
    "src/motley/comm": "Communication",
    "src/motley/engines": "Engines",
    "deepspeed": "Engines",
    "src/motley/checkpoint": "Checkpoints and runs",
    "src/motley/records": "Records",
    "src/motley/train": "Training",
    "src/motley/library": "Your own loop",
    "src/motley": "Commands and files of your own",
    "src/motley/infer": "Inference and export",
    "torch_dist": "Inference and export",
    "src/motley/sweep": "Baselines",
    "src/motley/live": "Reports, plots and live views",
    "src/motley/publish": "Trackers",
    "src/motley/plotting": "Reports, plots and live views",
}
HEAD = (
    "# Every message of an error\n\n"
    "This page lists the messages and explains nothing beyond them. Each names the cause, the "
    "finding, and mostly the fix. Search for some words of your message; `<angles>` mark a value. "
    "For the first steps when something is wrong, see [trouble](trouble.md). "
    "`docs/list_messages.py` makes this page of the sources.\n"
)


def words_of(node: ast.expr) -> str:
    """Return a text as it is written in the source, with a name in angles for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(words_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"<{name_of(node.value)}>"
    if isinstance(node, ast.BinOp):
        return words_of(node.left) + words_of(node.right)
    if isinstance(node, ast.Call) and name_of(node.func) == "typed_command":
        return words_of(node.args[0])
    return f"<{name_of(node)}>"


def name_of(node: ast.expr) -> str:
    """Return the last name of an expression, for what is filled in."""
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    if isinstance(node, ast.Call):
        join = isinstance(node.func, ast.Attribute) and node.func.attr == "join"
        return name_of(node.args[0] if node.args and join else node.func)
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_")
    if isinstance(node, ast.Name):
        return node.id.strip("_")
    return "..."


def messages(path: Path) -> Iterator[str]:
    """Of one source file, in its order."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            parts = [words_of(each) for each in node.args[ERRORS.get(name, slice(0))]]
            kind = f"{parts.pop(0)}: " if name == "HostTrouble" and parts[0] else ""
            text = re.sub(r"\s+", " ", kind + "; ".join(filter(None, parts))).strip()
            if len(re.sub("<[^>]*>", "", text).strip()) > 8:
                yield text


def page() -> str:
    """All of it."""
    result: dict[str, list[str]] = {title: [] for title in PLACES.values()}
    for folder in sorted(PLACES, key=len, reverse=True):
        own = [path for path in sorted((ROOT / folder).rglob("*.py")) if place_of(path) == folder]
        result[PLACES[folder]] += [text for path in own for text in messages(path)]
    parts = [HEAD]
    for title, texts in result.items():
        unique = sorted(dict.fromkeys(texts), key=str.lower)
        parts.append(f"\n## {title}\n\n" + "".join(f"- `{text.replace('`', chr(39))}`\n"
                                                   for text in unique))  # fmt: skip
    return "".join(parts)


def place_of(path: Path) -> str:
    """Return the longest of PLACES that a file is under."""
    within = path.relative_to(ROOT).as_posix()
    return max((place for place in PLACES if within.startswith(f"{place}/")), key=len, default="")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
