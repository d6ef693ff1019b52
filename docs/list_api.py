"""Write docs/api.md: the public names of the package, with their docstrings.

python docs/list_api.py            # after a docstring was changed
python docs/list_api.py --check    # exit code 1 if the page is not the sources'
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import motley  # noqa: E402
from motley import records  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
HEAD = (
    "# The Python API\n\n"
    "Made of the docstrings by `docs/list_api.py`. `import motley` loads neither torch nor MPI: a "
    "name is imported when it is first used. Every other name in the package may change between "
    "two releases.\n\n"
    "A script that calls it is started on all ranks by `mpirun -np 2 motley run SCRIPT.py`, or "
    "from a clone by `mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh SCRIPT.py`. "
    "[examples/my_script.py](../examples/my_script.py) is one.\n"
)
SECTION = re.compile(r"(Args|Returns|Raises|Attributes):$")
ENTRY = re.compile(r"([a-zA-Z]\w*(?:, \w+)*): ")  # of a section


def to_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: sections as lists, code behind ``::`` in fences."""
    lines = list[str]()
    for title, body in _split_parts(inspect.cleandoc(docstring)):
        text = [_format_line(line) for line in body]
        if title == "code":
            lines += ["```python", *body, "```", ""]
        elif title in ("Args", "Raises", "Attributes"):
            lines += [f"*{title}*", "", *map(_format_item, text), ""]
        else:
            lines += [f"*{title}*", ""] if title else []
            lines += [*text, ""]
    return re.sub(r"\n{3,}(?=\*)", "\n\n", "\n".join(lines)).strip("\n")


def _split_parts(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the parts of a docstring: a title and its lines without their indentation.

    The title is that of a section, ``code`` or empty.
    """
    title, body = "", list[str]()
    for line in text.splitlines():
        if title and line and not line.startswith(" "):  # the section or the code has ended
            yield title, inspect.cleandoc("\n".join(body)).splitlines()
            title, body = "", []
        result = SECTION.match(line)
        if result or (not title and line.endswith("::")):
            yield title, body if result else [*body, line.removesuffix(":")]
            title, body = result[1] if result else "code", []
        else:
            body.append(line)
    yield title, inspect.cleandoc("\n".join(body)).splitlines() if title else body


def _format_line(line: str) -> str:
    """Return a line with Markdown's quotes in place of reStructuredText's."""
    return re.sub(r":(?:func|meth|class):`([\w.]+)`", r"`\1`", line).replace("``", "`")


def _format_item(line: str) -> str:
    """Return a line of a section as a part of a list; one of a list within it keeps its place."""
    named = ENTRY.match(line)
    if named:
        return f"- `{named[1]}`: {line[named.end() :]}"
    return f"  {line.strip()}" if line.strip() else ""


def describe_function(name: str, function: Any, level: str = "##") -> str:
    """Return the chapter of a function or method."""
    plain = function.fget if isinstance(function, property) else function
    signature = "" if isinstance(function, property) else str(_read_signature(plain))
    signature = re.sub(r"(?:\w+\.)+(\w+)", r"\1", signature).replace("(self, ", "(")
    signature = signature.replace("(self)", "()")
    return f"\n{level} `{name}{signature}`\n\n{to_markdown(plain.__doc__)}\n"


def _read_signature(function: Any) -> inspect.Signature:
    """Return a signature with types that a module imports for type checkers alone."""
    module = inspect.getmodule(function)
    names = dict[str, Any]()
    for node in ast.parse(inspect.getsource(module)).body if module else ():
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(ast.unparse(node.body), names)
    return inspect.signature(function, locals=names, eval_str=True)


def describe_class(name: str, kind: type) -> Iterator[str]:
    """Yield the chapters of a class and of its public methods."""
    yield f"\n## `{name}`\n\n{to_markdown(str(kind.__doc__))}\n"
    if issubclass(kind, Exception) or dataclasses.is_dataclass(kind):
        return
    for method, value in vars(kind).items():
        if not method.startswith("_") and isinstance(value, FunctionType | property):
            yield describe_function(method, value, "###")


def make_page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name in motley.__all__:
        value = getattr(motley, name)
        if isinstance(value, type):
            parts += describe_class(f"motley.{name}", value)
        elif inspect.isfunction(value):
            parts.append(describe_function(f"motley.{name}", value))
        if name == "join":
            parts += describe_class("motley.Lab", motley.Lab)
    parts.append(describe_function("motley.records.load", records.load))
    parts += describe_class("motley.records.Run", records.Run)
    return "".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text(encoding="utf-8") != make_page())
    PAGE.write_text(make_page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
