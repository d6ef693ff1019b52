"""The house's own rules: who may import whom, and where files may lie."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from project import ROOT

LIBRARY = ROOT / "src" / "motley"
SCRIPTS = ("setup", "torch_dist", "deepspeed", "plots", "lab", "benchmarks", "tests")

# The rooms of the library, in order: a room imports those above it, and nothing below. Modules
# beside the rooms are of the first.
ROOMS = (
    "root", "cluster", "records", "plan", "live", "publish", "sweep", "plotting",
    "membership", "launch",
    "config", "data", "tasks", "comm", "engines", "checkpoint", "measure", "train", "infer",
    "library",
    "provision",
)  # fmt: skip
# These load neither torch nor mpi4py.
PURE = ("root", "cluster", "records", "plan", "live", "publish", "sweep", "plotting", "membership")
HEAVY = {"torch", "timm", "torchvision", "deepspeed"}
OWNERS = {
    "mpi4py": "ranks",
    "paramiko": "ssh",
    "GPUtil": "gpus",
    "pynvml": "gpus",
    "amdsmi": "gpus",
    "deepspeed": "import_deepspeed",
    "timm": "import_timm",
}
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # launch sets and reads them


def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, anywhere in it; ``package.name`` for what may be one."""
    return imports_of(path.read_text(), anywhere=True)


@cache
def imports_of(text: str, anywhere: bool) -> tuple[str, ...]:
    found: list[str] = []
    tree = ast.parse(text)
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def imports_at_once(path: Path) -> tuple[str, ...]:
    """Return the modules that a file imports when it is imported itself."""
    return imports_of(path.read_text(), anywhere=False)


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def room_of(names: Sequence[str]) -> str | None:
    """Return the room of a module, by its path in the library; None for what has no room."""
    if names[0] in ROOMS:
        return names[0]
    return "root" if (LIBRARY / f"{names[0]}.py").exists() else None


def modules_of(room: str) -> list[Path]:
    """Return the files of a room."""
    if room == "root":
        return sorted(LIBRARY.glob("*.py"))
    return sorted((LIBRARY / room).rglob("*.py"))


def violations(library: Path) -> list[str]:
    """What breaks the order of rooms, in words."""
    found, order = [], ROOMS
    for path in sorted(library.rglob("*.py")):
        names = path.relative_to(library).with_suffix("").parts
        if names == ("__init__",):  # the public API names what lies in all rooms
            continue
        said, room = ".".join(names), room_of(names)
        if room is None:
            found.append(f"{said} is in no room")
            continue
        if room in (*PURE, "launch") and (heavy := tops(path) & HEAVY):
            found.append(f"{said}, of {room}, imports {', '.join(heavy)}")
        for package in tops(path) & set(OWNERS):
            if names[-1] != OWNERS[package]:
                found.append(f"{said} imports {package}, which is {OWNERS[package]}'s")
        for name in imports(path):
            top, *rest = name.split(".")
            other = room_of(rest) if top == "motley" and rest else None
            if other is not None and order.index(other) > order.index(room):
                found.append(f"{said}, of {room}, imports {name}, of {other}")
    return found


def test_every_module_has_a_room_and_imports_only_what_is_above() -> None:
    assert not violations(LIBRARY)


def test_no_import_leads_back_to_its_module() -> None:
    parts = {
        path: path.relative_to(LIBRARY).with_suffix("").parts for path in LIBRARY.rglob("*.py")
    }
    files = {
        ".".join(("motley", *names)).removesuffix(".__init__"): path
        for path, names in parts.items() if names != ("__init__",)
    }  # fmt: skip
    graph = {
        module: {
            known for name in imports_at_once(path) for known in (name, name.rpartition(".")[0])
            if known in files and known != module
        }
        for module, path in files.items()
    }  # fmt: skip
    TopologicalSorter(graph).prepare()  # or CycleError names the circle


@pytest.mark.parametrize(
    ("module", "text", "says"),
    [
        ("attic/stray", "", "attic.stray is in no room"),
        ("plan/plan", "import motley.train.loop\n", "imports motley.train.loop, of train"),
        ("plan/wire", "def late() -> None:\n    import torch\n", "of plan, imports torch"),
        ("train/loop", "import paramiko\n", "loop imports paramiko, which is ssh's"),
    ],
)
def test_what_breaks_the_order_is_named(tmp_path: Path, module: str, text: str, says: str) -> None:
    library = shutil.copytree(LIBRARY, tmp_path / "motley")
    path = library / f"{module}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + text)
    (problem,) = violations(library)
    assert says in problem


@pytest.mark.parametrize("room", [*PURE, "launch"])
def test_a_light_room_loads_nothing_heavy(room: str) -> None:
    paths = [path for path in modules_of(room) if not path.stem.startswith("__")]
    parts = [path.relative_to(LIBRARY.parent).with_suffix("").parts for path in paths]
    heavy = HEAVY if room == "launch" else HEAVY | {"mpi4py"}
    assert loaded_of(heavy, map(".".join, parts)) == []


def test_the_process_that_packs_compiled_code_loads_nothing_heavy() -> None:
    # The process runs beside each run that compiles, on processors that the run needs.
    assert loaded_of(HEAVY | {"mpi4py"}, ["motley.train.compile_archive"]) == []


def loaded_of(packages: set[str], modules: Iterable[str]) -> list[str]:
    """The packages that are loaded by modules."""
    code = f"import sys, {', '.join(modules)}; print(*({packages} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    return done.stdout.split()


@pytest.mark.parametrize("path", sorted(LIBRARY.rglob("*.py")), ids=lambda path: path.stem)
def test_launch_alone_knows_the_variables_of_a_rank(path: Path) -> None:
    text = path.read_text()
    if path.stem not in ("world", "ranks"):  # the second meets where torchrun's are
        assert not [name for name in VARIABLES if f'"{name}"' in text]


def test_the_plan_reads_no_clock_environment_or_hardware() -> None:
    for path in modules_of("plan"):
        assert not tops(path) & {
            "os",
            "time",
            "datetime",
            "random",
            "psutil",
            "socket",
        }


@pytest.mark.parametrize(
    ("module", "says"),
    [("motley", "no command is given"), ("motley.launch", "the script is missing")],
)
def test_what_is_no_command_says_what_there_is(module: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode and says in done.stderr and "Traceback" not in done.stderr


def test_every_program_that_is_waited_for_has_a_time_limit() -> None:
    folders = ("src", "setup", "plots", "torch_dist", "deepspeed", "lab")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [
        f"{path.name}:{node.lineno}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "subprocess.run"
        and "timeout" not in {keyword.arg for keyword in node.keywords}
    ] == []


def test_each_door_of_setup_opens_a_module() -> None:
    doors = [path for path in (ROOT / "setup").glob("*.sh") if "/door.sh" in path.read_text()]
    assert len(doors) > 10
    assert not [door.name for door in doors
                if not (LIBRARY / "provision" / f"{door.stem}.py").exists()]  # fmt: skip


# These make an environment, or find one, before there is a package.
FIRST = {"door.sh", "get_python.sh", "make_env.sh", "quickstart.sh", "install_packages.py",
         "own_python.py"}  # fmt: skip


def test_what_pip_does_not_install_are_doors() -> None:
    scripts = [path for folder in ("setup", "torch_dist", "deepspeed", "plots")
               for path in (ROOT / folder).iterdir() if path.suffix in (".py", ".sh")]  # fmt: skip
    assert [path.name for path in scripts if len(path.read_text().splitlines()) > 20
            and path.name not in FIRST] == []  # fmt: skip


def test_script_folders_are_no_packages() -> None:
    # A deepspeed/__init__.py would hide the package of that name.
    assert not [folder for folder in SCRIPTS if list((ROOT / folder).rglob("__init__.py"))]


def test_git_ignores_folders_of_results_and_none_of_the_library() -> None:
    def ignored(path: str) -> bool:
        return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode == 0

    assert all(map(ignored, ("logs/run/run.json", "data/cifar10/x", "baselines/x")))
    assert not any(ignored(f"src/motley/{room}/new.py") for room in [*ROOMS, "logs", "baselines"])


def test_what_the_library_imports_is_declared_and_extras_are_tested() -> None:
    def lines(name: str) -> dict[str, str]:
        words = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
        return {re.split(r"[<>=]", word)[0]: word for word in words if word}

    declared, tested = lines("requirements.txt"), lines("requirements-dev.txt")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {line for extra in extras.values() for line in extra} <= {*tested.values()}
    modules = {
        "GPUtil": "gputil", "PIL": "pillow", "pynvml": "nvidia-ml-py", "sklearn": "scikit-learn",
        "tomli_w": "tomli-w",
    }  # fmt: skip
    known = {*sys.stdlib_module_names, "motley", *declared, *tested}
    used = {name for path in LIBRARY.rglob("*.py") for name in tops(path)}
    assert {modules.get(name, name) for name in used} <= known
