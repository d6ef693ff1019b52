"""Write docs/api.md: the public names of the package, with their docstrings.

python docs/list_api.py            # after a docstring was changed
python docs/list_api.py --check    # exit code 1 if the page is not the sources'
"""

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
FIELD = re.compile(r"(\w[\w, ]*): ")


def in_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: sections as lists, and code behind ``::`` in fences."""
    text = re.sub(r":(?:func|meth|class):`(?:~)?([\w.]+)`", r"``\1``", inspect.cleandoc(docstring))
    lines = list[str]()
    for block in re.split(r"\n\n+", text):
        first, *rest = block.splitlines()
        if SECTION.match(first):
            body = inspect.cleandoc("\n".join(rest)).splitlines()
            lines += ["", f"*{first.rstrip(':')}*", "", *_items(body)]
        elif first.startswith("    "):
            lines += ["", "```python", *inspect.cleandoc(block).splitlines(), "```"]
        else:
            lines += ["", *(line.removesuffix(":") + ":" if line.endswith("::") else line
                            for line in (first, *rest))]  # fmt: skip
    return "\n".join(lines).replace("``", "`").replace("`````", "```").strip("\n")


def _items(body: list[str]) -> Iterator[str]:
    """Yield the entries of a section, a list item each; a section may be plain text."""
    for line in body:
        if named := FIELD.match(line):
            yield f"- `{named[1]}`: {line[named.end() :]}"
        else:
            yield f"  {line.strip()}" if line.startswith(" ") else line


def of_function(name: str, function: Any, level: str = "##") -> str:
    """Return the chapter of a function or method."""
    plain = function.fget if isinstance(function, property) else function
    signature = str(inspect.signature(plain)) if not isinstance(function, property) else ""
    signature = re.sub(r"(?:\w+\.)+(\w+)", r"\1", signature).replace("(self, ", "(")
    signature = signature.replace("(self)", "()")
    return f"\n{level} `{name}{signature}`\n\n{in_markdown(plain.__doc__)}\n"


def of_class(name: str, kind: type) -> Iterator[str]:
    """Yield the chapters of a class and of its public methods."""
    yield f"\n## `{name}`\n\n{in_markdown(str(kind.__doc__))}\n"
    if issubclass(kind, Exception) or dataclasses.is_dataclass(kind):
        return
    for method, value in vars(kind).items():
        if not method.startswith("_") and isinstance(value, FunctionType | property):
            yield of_function(method, value, "###")


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name in motley.__all__:
        value = getattr(motley, name)
        if isinstance(value, type):
            parts += of_class(f"motley.{name}", value)
        elif inspect.isfunction(value):
            parts.append(of_function(f"motley.{name}", value))
    parts.append(of_function("motley.records.load", records.load))
    parts += of_class("motley.records.Run", records.Run)
    return "".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
