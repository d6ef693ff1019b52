"""Hosts that run other files, or other packages, are refused before they train."""

import os
import shutil
import sys
import types
from pathlib import Path

import pytest
from project import DDP, ROOT

from motley import PACKAGE
from motley.errors import MotleyError
from motley.launch import same_code
from motley.launch.same_code import Code, check_same, compare_code, read_code

ORDER, PLAN = "src/motley/data/source.py", "src/motley/plan/plan.py"


def code(host: str, files: dict[str, str] | None = None, **versions: str) -> Code:
    return host, {ORDER: "0", PLAN: "0", **(files or {})}, {"torch": "2.14.0", **versions}


def refusal(*found: object) -> str:
    with pytest.raises(MotleyError) as error:
        check_same(found)
    return str(error.value)


def test_the_same_code_passes_and_what_only_some_have_is_not_compared() -> None:
    check_same([code("a")])
    check_same([code("a"), code("b", {"torch_dist/scratch.py": "1"}), code("c", deepspeed="0.19")])


def test_who_differs_from_most_is_named_with_the_files_and_the_fix() -> None:
    edited = {ORDER: "1"}
    text = refusal(code("a"), code("b", edited), code("b", edited), code("c"))
    assert f"on b (ranks 1, 2), these files differ from the other hosts': {ORDER}" in text
    assert (
        "this machine's files to all hosts with: bash setup/sync_cn.sh" in text and PLAN not in text
    )
    assert "on b (rank 1), these files differ" in refusal(
        code("a"), code("b", edited)
    )  # not rank 0
    text = refusal(code("a", edited), code("b"), code("c"))
    assert (
        "on a (rank 0), these files differ" in text
        and "the right files to this machine, then to all" in text
    )
    many = {f"src/motley/{number}.py": "1" for number in range(9)}
    text = refusal(code("a", dict.fromkeys(many, "0")), code("b", many))
    assert "3.py and 5 more; " in text


def test_a_file_that_adds_something_on_some_hosts_alone_is_refused() -> None:
    mine = {"src/motley/data/datasets/mine.py": "1"}
    text = refusal(code("a"), code("b", mine))
    assert "datasets/mine.py is on b (rank 1) and not on the other hosts" in text
    assert (
        "remove it, or copy this machine's files to all hosts with: bash setup/sync_cn.sh" in text
    )
    check_same([code("a", mine), code("b", mine)])


def test_versions_are_named_with_their_hosts_and_the_fix() -> None:
    text = refusal(code("a", timm="1.0.31"), code("b", timm="1.0.20"), code("b", timm="1.0.20"))
    assert "versions of timm (1.0.20 on b (ranks 1, 2), 1.0.31 on a (rank 0))" in text
    assert "bash setup/install_cn.sh" in text
    text = refusal(code("a", Python="3.11"), code("b", Python="3.12", torch="2.15.0"))
    assert "of torch (2.14.0 on a (rank 0), 2.15.0 on b (rank 1)), and of Python" in text


@pytest.mark.parametrize("other", [(object(), {}), ("2.15.0", ""), None, {"host": "b"}])
def test_a_motley_that_told_none_is_another(other: object) -> None:
    text = refusal(code("a"), other)
    assert "rank 1 has another version of Motley" in text and "sync_cn.sh" in text


def test_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, config = tmp_path / "mine.py", tmp_path / "zero.json"
    for name in ("mine.py", "helper.py", "unused.py", "zero.json", "result.json"):
        (tmp_path / name).write_text("{}")
    helper = types.ModuleType("helper")
    helper.__file__ = str(tmp_path / "helper.py")
    monkeypatch.setitem(sys.modules, "helper", helper)
    real = same_code.version
    monkeypatch.setattr(
        same_code, "version", lambda name: "2.14.0+cu126" if name == "torch" else real(name)
    )
    words = ["--task=helper.py", "--deepspeed-config", config, "--json", "result.json", "x" * 5000]
    host, files, versions = read_code("a", [str(script), *map(str, words)], packages=["deepspeed"])
    assert host == "a" and versions["torch"] == "2.14.0" and versions["timm"] == real("timm")
    assert versions["deepspeed"] == real("deepspeed")
    assert "deepspeed" not in read_code("a", [str(script)])[2]  # which this script does not need
    folder = tmp_path.name  # of a script in a home, what it has loaded; others' tests load more
    of_script = {name for name in files if name.startswith(f"{folder}/") or name == str(config)}
    assert of_script == {f"{folder}/mine.py", f"{folder}/helper.py", str(config)}
    ours = read_code("a", [str(ROOT / DDP)])[1]
    assert {"torch_dist/plan_vit.py", "torch_dist/train_vit.py", ORDER} <= ours.keys()
    with monkeypatch.context() as moved:  # others read the files of this repository meanwhile
        moved.setattr(same_code, "ROOT", tmp_path)
        moved.setattr(same_code, "PACKAGE", shutil.copytree(PACKAGE, tmp_path / "src" / "motley"))
        ours = read_code("a", [str(script)])[1]
        assert ORDER in ours
        lock = tmp_path / "src" / "motley" / ".#plan.py"  # as Emacs makes one
        lock.symlink_to(f"somebody@somewhere.{os.getpid()}")
        assert read_code("a", [str(script)])[1] == ours
    before = read_code("a", [str(script)])[1][f"{folder}/mine.py"]
    script.write_text("{} ")
    assert read_code("a", [str(script)])[1][f"{folder}/mine.py"] != before


def test_little_travels_where_all_is_the_same() -> None:
    # A network may drop large packets, which is said later.
    sent: list[object] = []

    def allgather(value: object) -> list[object]:
        sent.append(value)
        return [value, value]

    compare_code("a", allgather)
    assert len(sent) == 1 and len(str(sent[0])) == 64


def test_an_older_motley_that_sends_something_else_is_said() -> None:
    with pytest.raises(MotleyError, match="rank 1 has another version"):
        compare_code("a", lambda value: [value, ("node", {})])


def test_an_installed_package_is_made_the_same_with_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_code, "ROOT", None)
    text = refusal(code("a"), code("b", {ORDER: "1"}), code("c"))
    assert text.endswith("install one version of motley-train on all hosts with pip")
