"""The house's own rules: who may import whom, and where files may lie."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from project import ROOT

LIBRARY = ROOT / "src" / "motley"
SCRIPTS = ("setup", "torch_dist", "deepspeed", "plots", "lab", "benchmarks", "tests")

# Every module of the library, by its room. A room imports those above it, and nothing below.
# In a folder with a star each file adds one thing, and needs no place of its own.
ROOMS = {
    "root": "__init__ __main__ child errors extras faults registry signals text",
    "cluster": (
        "account hostfile binding device_facts amd_smi gpus facts network network_trial slurm "
        "partitions launcher login shell ssh fan_out orphans processes presence"
    ),
    "records": (
        "lines json_file folder_lock gpu_formats gpu_csv training trace run_folder one_run "
        "rank_groups rates costs gpu_logger columns"
    ),
    "plan": (
        "per_rank precision speed_table split evidence back_off links wire engine_traits forecast "
        "advice replan plan ramp length take_back memory"
    ),
    "live": (
        "tail track follow every_record waiting words headline rows snapshot runs collect training "
        "verdict"
    ),
    "publish": "series tracker trackers/* publisher",
    "sweep": "cells matrix_file outcome results rows table",
    "launch": (
        "cache_folder process ports own_folder mpi same_code compile_archive messages handshakes "
        "job_faults watchdog dead_links unheard waited_for fault_record job_files leftovers "
        "ssh_sessions launcher_reaper survivors away pause own_rank regroup first_cause "
        "save_before_end background_writer job_end fault_handler stop_signals start_clock "
        "start_watch tcp_ranks ranks watch_first watch_all watching supervisor world give_way "
        "__main__"
    ),
    "config": "option numbers optimization options parser",
    "data": (
        "import_timm batch source images image_folder shards packed_file packer dataset "
        "datasets/* mixing transforms order slots loader_memory keyed batches loader"
    ),
    "tasks": (
        "ghost_batch_norm recording deferred block_by_block compiled blocks task net classifiers "
        "image_options corpus gpt hf_model hf_tokens lora hf_text states netcdf aurora_net "
        "builtin/* find model build fingerprint forward_changes sometimes_unused check scores"
    ),
    "comm": "abandon collectives reducer slow_rank power_sgd modes/*",
    "engines": (
        "named_state average strategy rows adamw8bit local_shards optimizer optimizer_state "
        "optimizer_trial gradients memory step_timer protocol base synchronous reducing no_overlap "
        "ddp fsdp local_sgd zero_config zero_state zero_at_once zero_cut zero_engine zero3_engine "
        "import_deepspeed strategies/*"
    ),
    "checkpoint": (
        "idle_thread tensor_file part_files store read transfer resume find_run run initial verify"
    ),
    "measure": "kernels device all_reduce links loader",
    "planner": (
        "worker process_group speed_cache wire_cache profile refine compile_trial advise "
        "measured_plan foresee open_model planner"
    ),
    "train": (
        "progress budget first_steps loader_growth loss_scale schedule summary recorder profiler "
        "overflow ready setup agreement recovery rescue survivor compile_keeper evaluate "
        "save_timer command_line resume_line loop start script"
    ),
    "infer": "leases shards predictor export",
}
# These load neither torch nor mpi4py.
PURE = ("root", "cluster", "records", "plan", "live", "publish", "sweep")
HEAVY = {"torch", "timm", "torchvision", "deepspeed"}
OWNERS = {
    "mpi4py": "mpi",
    "paramiko": "ssh",
    "GPUtil": "gpus",
    "pynvml": "gpus",
    "amdsmi": "amd_smi",
    "deepspeed": "import_deepspeed",
    "timm": "import_timm",
}
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # launch sets and reads them


def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, anywhere in it; ``package.name`` for what may be one."""
    return imports_of(path.read_text())


@cache
def imports_of(text: str) -> tuple[str, ...]:
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def room_of(*names: str) -> str | None:
    """Of a module, by its path in the library; None for what has no place."""
    if names[0] in ROOMS:
        return names[0]
    return next((room for room, modules in ROOMS.items() if names[0] in modules.split()), None)


def has_place(room: str, names: Sequence[str]) -> bool:
    """Whether the table names a module of this path in the library."""
    if names[-1] == "__init__":
        return True
    path = "/".join(names[names[0] == room :])
    return any(fnmatch(path, place) for place in ROOMS[room].split())


def file_of(room: str, module: str, library: Path = LIBRARY) -> Path:
    """Where a module of the table is."""
    path = library / room / f"{module}.py"
    return path if path.exists() else library / f"{module}.py"


def violations(library: Path) -> list[str]:
    """What breaks the order of rooms, in words."""
    found, order = [], list(ROOMS)
    for path in sorted(library.rglob("*.py")):
        names = path.relative_to(library).with_suffix("").parts
        said, room = ".".join(names), room_of(*names)
        if room is None or not has_place(room, names):
            found.append(f"{said} has no place in the table of rooms")
            continue
        if room in (*PURE, "launch") and (heavy := tops(path) & HEAVY):
            found.append(f"{said}, of {room}, imports {', '.join(heavy)}")
        for package in tops(path) & set(OWNERS):
            if names[-1] != OWNERS[package]:
                found.append(f"{said} imports {package}, which is {OWNERS[package]}'s")
        for name in imports(path):
            top, *rest = name.split(".")
            other = room_of(*rest) if top == "motley" else None
            if other is not None and order.index(other) > order.index(room):
                found.append(f"{said}, of {room}, imports {name}, of {other}")
    for room, modules in ROOMS.items():
        for module in modules.split():
            if "*" not in module and not file_of(room, module, library).exists():
                found.append(f"{room} has no {module}.py")
    return found


def test_every_module_has_a_room_and_imports_only_what_is_above() -> None:
    assert not violations(LIBRARY)


@pytest.mark.parametrize(
    ("room", "module", "text", "says"),
    [
        ("plan", "stray", "", "plan.stray has no place in the table of rooms"),
        (
            "plan",
            "plan",
            "import motley.train.loop\n",
            "of plan, imports motley.train.loop, of train",
        ),
        ("plan", "wire", "def late() -> None:\n    import torch\n", "of plan, imports torch"),
        ("train", "loop", "import paramiko\n", "loop imports paramiko, which is ssh's"),
    ],
)
def test_what_breaks_the_order_is_named(
    tmp_path: Path, room: str, module: str, text: str, says: str
) -> None:
    library = shutil.copytree(LIBRARY, tmp_path / "motley")
    path = file_of(room, module, library)
    if not path.exists():
        path = library / room / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + text)
    (problem,) = violations(library)
    assert says in problem


@pytest.mark.parametrize("room", [*PURE, "launch"])
def test_a_light_room_loads_nothing_heavy(room: str) -> None:
    names = [name for name in ROOMS[room].split() if name != "__main__" and "*" not in name]
    paths = [file_of(room, name) for name in names]
    parts = [path.relative_to(LIBRARY.parent).with_suffix("").parts for path in paths]
    heavy = HEAVY if room == "launch" else HEAVY | {"mpi4py"}
    code = f"import sys, {', '.join(map('.'.join, parts))}; print(*({heavy} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout.split() == []


@pytest.mark.parametrize("path", sorted(LIBRARY.rglob("*.py")), ids=lambda path: path.stem)
def test_launch_alone_knows_the_variables_of_a_rank(path: Path) -> None:
    text = path.read_text()
    if path.stem not in ("world", "tcp_ranks"):  # the second meets where torchrun's are
        assert not [name for name in VARIABLES if f'"{name}"' in text]


@pytest.mark.parametrize("path", sorted((ROOT / "plots").glob("*.py")), ids=lambda path: path.stem)
def test_plots_need_neither_torch_nor_mpi(path: Path) -> None:
    assert not tops(path) & (HEAVY | {"mpi4py"})
    rooms = {room_of(*name.split(".")[1:]) for name in imports(path) if name.startswith("motley.")}
    assert rooms <= {"root", "records", "plan", "live", "publish", "sweep"}


def test_the_plan_reads_no_clock_environment_or_hardware() -> None:
    for name in ROOMS["plan"].split():
        assert not tops(file_of("plan", name)) & {
            "os",
            "time",
            "datetime",
            "random",
            "psutil",
            "socket",
        }


@pytest.mark.parametrize(
    ("module", "says"), [("motley", "no such command"), ("motley.launch", "no script is given")]
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


def test_script_folders_are_no_packages() -> None:
    # A deepspeed/__init__.py would hide the package of that name.
    assert not [folder for folder in SCRIPTS if list((ROOT / folder).rglob("__init__.py"))]


def test_git_ignores_folders_of_results_and_none_of_the_library() -> None:
    def ignored(path: str) -> bool:
        return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode == 0

    assert all(map(ignored, ("logs/run/run.json", "data/cifar10/x", "baselines/x")))
    assert not any(ignored(f"src/motley/{room}/new.py") for room in [*ROOMS, "logs", "baselines"])
