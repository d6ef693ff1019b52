"""The hook that checks the subject of a commit."""

import subprocess
from pathlib import Path

import pytest
from project import LIMIT_S, ROOT

SUBJECTS = {
    "Reset straggler tracking after a regroup": "",
    "Merge branch 'x'": "",
    "Pass the token by a file": "",
    "Adds a page": "Adds is not imperative",
    "Fixed the split": "Fixed is not imperative",
    "Who was waited for is forgotten once another group trains": "Who, which is no verb",
    "add a page": "small letter",
    "Add a page.": "full stop",
    f"Add {'a ' * 40}page": "72 is the most",
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_subject_is_imperative_and_short(tmp_path: Path, subject: str) -> None:
    message = tmp_path / "message"
    message.write_text(f"# a comment\n\n{subject}\n\nThe body says why. It may be long.\n")
    done = subprocess.run(
        [ROOT / ".githooks" / "commit-msg", message], capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == bool(SUBJECTS[subject])
    assert SUBJECTS[subject] in done.stderr
