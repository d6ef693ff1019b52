"""A wrong file among those that add a dataset, a wire mode or a tracker is one line to the user."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from motley.errors import MotleyError
from motley.registry import entries


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "ITEMS has to be a tuple of str; .*short.py is a complete example"),
        ("ITEMS = 'one'", "ITEMS has to be a tuple of str; .*short.py is a complete example"),
        ("ITEMS = ('one', 2)", "ITEMS has to be a tuple of str; .*short.py is a complete example"),
        ("\nimport nonesuch", ", line 2: ModuleNotFoundError: No module named 'nonesuch'"),
        ("ITEMS = (", r", line 1: SyntaxError: '\(' was never closed"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    package = tmp_path / f"added_{abs(hash(text))}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "short.py").write_text("ITEMS = ('one',)")
    monkeypatch.syspath_prepend(tmp_path)
    of = package.name, "ITEMS", lambda item: isinstance(item, str), "str", "short"
    assert entries(*of) == ["one"]
    (package / "wrong.py").write_text(text)
    with pytest.raises(MotleyError, match=f"^{re.escape(str(package / 'wrong.py'))}(:|,) ?") as e:
        entries(*of)
    assert re.search(says, str(e.value))


def test_a_rank_that_fails_in_its_imports_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from motley.errors import MotleyError\nraise MotleyError('mine.py: this is wrong')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "motley.launch", tmp_path / "script.py"], capture_output=True,
        text=True, env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "motley: mine.py: this is wrong\n")
