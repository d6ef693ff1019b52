"""A matrix of ways to train: its cells, its failures, its table."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from matrices import KNOWN, matrix_file, measure
from project import LIMIT_S, ROOT

from motley.cluster.hostfile import Host
from motley.errors import MotleyError, NoMemoryError, NotFiniteError
from motley.faults import Fault, FaultKind, make_fault
from motley.provision import baselines
from motley.records.costs import joules, leak
from motley.records.run_folder import RunFolder
from motley.sweep.matrix import PRESETS, read_matrix
from motley.sweep.results import BaselineFolder, judge
from motley.sweep.table import markdown, read_rows

HOSTS = (Host("a", 2), Host("b"), Host("c"))


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What baseline_measure.py says of words that it does not take, without a Python of its own."""

    def say(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["baseline_measure.py", *map(str, words)])
        try:
            assert baselines.main() == 2
        except SystemExit as error:  # argparse's
            assert error.code == 2
        return capsys.readouterr().err

    return say


def test_a_matrix_is_multiplied_out_and_each_kind_of_sample_has_one_reference(
    tmp_path: Path,
) -> None:
    path = matrix_file(
        tmp_path,
        'options = ["--model", "vit_digits"]\n[matrix]\nstrategy = ["ddp", "zero3"]\n'
        'checkpointing = [false, "mlp"]\nbatch = [64, 128]\n[[cell]]\nname = "x"\n'
        'options = "--lr 1"',
    )
    matrix = read_matrix(path, HOSTS, KNOWN, options=("--img-size", "8"), steps=None)
    assert [cell.name for cell in matrix.cells] == [
        "ddp_batch64", "ddp_batch128", "ddp_mlp_batch64", "ddp_mlp_batch128", "zero3_batch64",
        "zero3_batch128", "zero3_mlp_batch64", "zero3_mlp_batch128", "x",
    ]  # fmt: skip
    assert [cell.batch for cell in matrix.references] == [64, 128]
    assert all(cell.precision == "fp32" for cell in matrix.references)
    words = matrix.cells[6].words
    assert words[0] == "deepspeed/train_vit.py" and words[-2:] == ["--stage", "3"]
    assert "--grad-checkpointing mlp" in " ".join(words)
    assert matrix.cells[-1].options == ("--lr", "1") and matrix.cells[-1].hosts == 3
    assert matrix.options == ("--model", "vit_digits", "--img-size", "8")


def test_options_are_swept_over_lists_and_ranges(tmp_path: Path) -> None:
    text = """
        seed = "each"
        [matrix]
        strategy = ["ddp", "fsdp"]
        [matrix.sweep]
        lr = {from = 1e-4, to = 1e-2, count = 3, log = true}
        weight_decay = {from = 0.0, to = 0.1, count = 2}
        opt = "sgd"
    """
    matrix = read_matrix(matrix_file(tmp_path, text), HOSTS, KNOWN)
    assert len(matrix.cells) == 12 and matrix.get_seed(2) == 2
    assert matrix.cells[0].name == "ddp_lr0.0001_weight-decay0"
    assert matrix.cells[-1].name == "fsdp_lr0.01_weight-decay0.1"
    words = " ".join(matrix.cells[3].words)
    assert words.endswith("--lr 0.001 --weight-decay 0.1 --opt sgd")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('lr = {from = 0, to = 1, count = 3, log = true}', "lr is not a range; write {from = 1e-4"),
        ('lr = {from = 1, to = 2, step = 3}', "the key matrix.sweep.lr.step is unknown"),
        ("batch_size = [1, 2]", "matrix.sweep sets batch_size; use batch of the matrix instead"),
    ],
)  # fmt: skip
def test_a_sweep_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = matrix_file(tmp_path, f"[matrix]\n[matrix.sweep]\n{text}\n")
    with pytest.raises(MotleyError, match=re.escape(says)):
        read_matrix(path, HOSTS, KNOWN)
    with pytest.raises(MotleyError, match='write seed = "each"'):
        read_matrix(matrix_file(tmp_path, "seed = 3\n[matrix]\n"), HOSTS, KNOWN)


def test_the_presets_can_be_read_and_weak_scaling_grows_with_the_hosts() -> None:
    for path in PRESETS.values():
        assert read_matrix(path, HOSTS, KNOWN).cells
    cells = read_matrix(PRESETS["weak"], HOSTS, KNOWN).cells
    assert [(cell.hosts, cell.batch, round(cell.fraction, 3)) for cell in cells] == [
        (1, 64, 0.333), (2, 128, 0.667), (3, 192, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[matrix]\nstrategy = "fdsp"', r"strategy fdsp is unknown \(nearest: fsdp"),
        ('[matrix]\nstrategi = "ddp"', r"matrix.strategi is unknown \(nearest: strategy"),
        ("[matrix]\nhosts = 4", "is for 4 hosts, and hosts.txt names 3"),
        ('[matrix]\nprecision = "bf61"', r"bf61 is unknown \(nearest: bf16"),
        ('[matrix]\nprecision = "bf16,fp32"', "2 precisions are given for the 4 ranks of 3 hosts"),
        ("[matrix]\nfraction = 2", "a fraction above 0 and at most 1"),
        ('[[cell]]\nname = "../x"', "use letters, digits"),
        ('[[cell]]\nname = "reference2"', "is reserved for runs in fp32"),
        ('options = "--lr \'1"\n[matrix]', "No closing quotation"),
        (
            'options = "--batch-size 9"\n[matrix]',
            "--batch-size: Motley sets this option for each cell; use batch instead",
        ),
        ('steps = "30"\n[matrix]', "steps is '30'; give a number of 6 or more"),
        ('[[cell]]\nname = "x"\n[[cell]]\nname = "x"', "two cells have the name x"),
        ('[[cell]]\nname = "x"\nbatch = "many"', "cell x: invalid literal"),
        ("", "has no cell"),
        ("[matrix", "not a readable TOML file"),
    ],
)
def test_an_impossible_matrix_is_refused_before_anything_starts(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(MotleyError, match=says):
        read_matrix(matrix_file(tmp_path, text), HOSTS, KNOWN)


STEPS = {0: [{"step": 6, "epoch": 1}], 1: [{"step": 7, "epoch": 1}]}


@pytest.mark.parametrize(
    ("status", "output", "told", "kind"),
    [
        (3, "", FaultKind.OUT_OF_MEMORY, FaultKind.OUT_OF_MEMORY),
        (2, "", FaultKind.NOT_FINITE, FaultKind.NOT_FINITE),
        (1, "node x exited on signal 11 (Segmentation fault)", FaultKind.KILLED,
         FaultKind.SEGFAULT),
        (1, "node x exited on signal 6 (Aborted)", FaultKind.KILLED, FaultKind.ABORTED),
        (137, "node x exited on signal 9 (Killed)", FaultKind.KILLED, FaultKind.KILLED),
        (1, "", FaultKind.HOST_LOST, FaultKind.HOST_LOST),
        (2, "", FaultKind.REFUSED, FaultKind.REFUSED),
        (3, "motley: cpu has no room", None, FaultKind.OUT_OF_MEMORY),  # before it had records
        (2, "motley: argument --lr: nan is not a number above 0", None, FaultKind.REFUSED),
        (1, "Segmentation fault (core dumped)", None, FaultKind.SEGFAULT),
        (1, "ValueError: something new", None, FaultKind.ERROR),
    ],
)  # fmt: skip
def test_a_failure_is_told_by_what_it_left(
    status: int, output: str, told: FaultKind | None, kind: FaultKind
) -> None:
    fields = {"rank": 1, "host": "b", "step": 7, "kind": told, "phase": "data", "error": "words"}
    run = {"status": "failed", "failure": fields} if told else {}
    found = judge(status, output, json.loads(json.dumps(run)), STEPS, 60.0)
    assert found.kind == kind and found.error == ("words" if told else output[-len(found.error) :])
    if told:
        assert (found.host, found.rank, found.epoch, found.step) == ("b", 1, 1, 7)
        assert found.phase == "data"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate"), FaultKind.OUT_OF_MEMORY),
        (MemoryError(), FaultKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"), FaultKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), FaultKind.CUBLAS),
        (RuntimeError("CUDA error: an illegal memory access was met"), FaultKind.ILLEGAL_ACCESS),
        (RuntimeError("NCCL error in: x.cpp"), FaultKind.DEVICE),
        (NoMemoryError("cpu has no room for one sample"), FaultKind.OUT_OF_MEMORY),
        (NotFiniteError("the loss of 3 samples is not finite"), FaultKind.NOT_FINITE),
        (MotleyError("--wire powersgd:0: powersgd needs a rank of 1"), FaultKind.REFUSED),
        (ValueError("something new"), FaultKind.ERROR),
    ],
)
def test_an_exception_is_of_a_kind(error: Exception, kind: FaultKind) -> None:
    fault = make_fault(error, 1, "b", 7)
    assert fault.kind is kind and Fault.read(json.loads(json.dumps(asdict(fault)))) == fault
    assert fault.code == {"refused": 2, "not finite": 2, "out of memory": 3}.get(kind, 1)


@pytest.mark.parametrize(
    ("status", "output", "says"),
    [
        (
            2,
            "motley: rank 0 on a, before the first step: --model vitt is unknown\n---\n",
            "--model",
        ),
        (1, "ssh: connect to host b port 22: No route to host\n-----\n\n", "No route to host"),
        (9, "", "ended with status 9 and without a message"),
        (0, "lost communication with a remote daemon", "lost communication"),
    ],
)
def test_an_error_is_never_empty(status: int, output: str, says: str) -> None:
    found = judge(status, output, {}, {})
    assert found.kind != "done" and says in found.error


def test_who_was_told_to_stop_is_not_to_blame() -> None:
    fields = {
        "rank": 0,
        "host": "a",
        "step": 7,
        "kind": FaultKind.KILLED,
        "phase": "forward",
        "error": "stopped by SIGTERM",
    }
    found = judge(None, "", {"status": "failed", "failure": fields}, STEPS, 60.0)
    assert (found.kind, found.rank, found.host, found.when) == (
        "hang",
        None,
        None,
        "epoch 1, step 8",
    )


def test_a_death_before_the_first_beat_of_training_is_dated_by_the_records() -> None:
    fields = {"rank": 1, "host": "b", "step": None, "kind": FaultKind.KILLED,
              "phase": "build", "error": "died without a message"}  # fmt: skip
    found = judge(137, "", {"status": "failed", "failure": fields}, STEPS, 9.0)
    assert (found.kind, found.when) == ("killed", "epoch 1, step 9")


def test_memory_that_grows_to_the_end_is_a_leak_and_a_buffer_is_not() -> None:
    def steps(mib: list[float]) -> dict[int, list[dict[str, float]]]:
        return {0: [{"mem_peak_mib": each} for each in mib]}

    assert leak(steps([100.0 + 3 * step for step in range(30)])) == pytest.approx(3.0)
    assert leak(steps([100.0] * 15 + [400.0] * 15)) is None
    assert leak(steps([100.0] * 30)) is None
    assert leak(steps([9000.0 + 0.1 * step for step in range(30)])) is None  # noise
    assert leak(steps([700.0 + 0.7 * step for step in range(20)])) is None  # too few


def test_energy_is_that_of_the_gpus_that_trained(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.create()
    workers = [
        {"rank": 0, "host": "a", "uuid": "GPU-1"},
        {"rank": 1, "host": "b", "uuid": "GPU-2"},
    ]
    run.write_run({"ranks": workers})
    steps = {
        0: [
            {"step": n, "n_global": 100, "samples_per_s": 50.0, "time": 1000.0 + 2 * n}
            for n in range(5)
        ]
    }
    for host, uuid, watt in (("a", "GPU-1", 300.0), ("a", "GPU-9", 999.0), ("b", "GPU-2", 100.0)):
        if host == "b":
            assert joules(run, steps) is None  # one of them has said nothing
        log = run.gpu_log(host)
        for second in (999.0, 1003.0, 1100.0):  # the last is of later
            log.write({
                "Timestamp": second, "Rank": 0, "GPU_ID": 0, "Host": host, "GPU_UUID": uuid,
                "Power_W": watt if second < 1100 else 0.0,
            })  # fmt: skip
        log.close()
    assert joules(run, steps) == pytest.approx((300 + 100) * 10 / 500)


def test_a_folder_is_one_commands_at_a_time(tmp_path: Path) -> None:
    matrix = read_matrix(PRESETS["strong"], HOSTS, KNOWN)
    held = BaselineFolder(tmp_path / "b").claim(matrix)
    with pytest.raises(MotleyError, match="is in use by another"):
        BaselineFolder(tmp_path / "b").claim(matrix)
    held.close()
    BaselineFolder(tmp_path / "b").claim(matrix).close()
    others = (Host("a", 2), Host("b"), Host("d"))
    with pytest.raises(MotleyError, match="another matrix, which differs in hosts"):
        BaselineFolder(tmp_path / "b").claim(read_matrix(PRESETS["strong"], others, KNOWN))


def test_several_measure_each_a_cell_of_their_own(tmp_path: Path) -> None:
    matrix = read_matrix(PRESETS["strong"], HOSTS, KNOWN)
    folder, first, second = BaselineFolder(tmp_path / "b"), *matrix.all_cells[:2]
    with pytest.raises(MotleyError, match=r"not prepared for Slurm tasks.*slurm_job.sh --array"):
        folder.join(matrix)
    folder.claim(matrix).close()
    folder.join(matrix)
    held = folder.take_cell(first)
    folder.take_cell(second).close()
    with pytest.raises(MotleyError, match=f"{first.name} in .* is being measured by another"):
        folder.take_cell(first)
    held.close()
    folder.take_cell(first).close()
    with pytest.raises(MotleyError, match="another matrix, which differs in steps"):
        folder.join(replace(matrix, steps=matrix.steps + 1))
    more = replace(matrix, cells=(*matrix.cells, replace(matrix.cells[0], name="new")))
    with pytest.raises(MotleyError, match="a matrix that lacks new"):
        folder.join(more)


def test_a_table_is_written_by_one_at_a_time(tmp_path: Path) -> None:
    matrix = read_matrix(PRESETS["strong"], HOSTS, KNOWN)
    folder = BaselineFolder(tmp_path / "b")
    folder.claim(matrix).close()
    code = (
        "import sys; from motley.sweep.results import BaselineFolder\n"
        "with BaselineFolder(sys.argv[1]).writing_table(): print('in')"
    )
    with folder.writing_table():
        other = subprocess.Popen(
            [sys.executable, "-c", code, folder.path], stdout=subprocess.PIPE,
            env={"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(2.0)
    assert other.communicate(timeout=LIMIT_S)[0] == b"in\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--nodes", "2x0"),
            "'2x0': give the number of nodes and the ranks of each node, as in 2x4",
        ),
        (
            ("--nodes", "2x1", "--mpirun", "true"),
            "--nodes needs an allocation of Slurm, and this shell is",
        ),
        (("--task", "-1"), "--task -1: give 0 or more"),
    ],
)
def test_a_task_outside_of_slurm_is_refused(
    tmp_path: Path, words: tuple[str, ...], says: str, refused: Callable[..., str]
) -> None:
    assert says in refused("--matrix", "strong", "--out", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (
            'strategy = "fsdp"\noptions = "--wire powersgd:4"',
            "cell x: --wire powersgd:4 works only with ddp",
        ),
        (
            'options = "--wire powersdg:4"',
            "cell x: --wire powersdg:4 is unknown (nearest: powersgd",
        ),
        ('options = "--epochs 0"', "cell x: argument --epochs: 0 is not a whole number"),
    ],
)
def test_options_that_no_run_could_take_are_refused_before_the_first(
    tmp_path: Path, cell: str, says: str, refused: Callable[..., str]
) -> None:
    path = matrix_file(tmp_path, f'[[cell]]\nname = "x"\n{cell}\n')
    assert says in refused("--matrix", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_refused_is_one_line_and_status_2(tmp_path: Path) -> None:
    path = matrix_file(tmp_path, '[[cell]]\nname = "x"\noptions = "--epochs 0"\n')
    done = measure("--matrix", path, "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("motley: cell x: argument --epochs: 0 is not a whole number")


def test_the_table_says_what_failed(tmp_path: Path) -> None:
    assert markdown([]).count("|") > 10
    with pytest.raises(MotleyError, match="does not exist"):
        read_rows(BaselineFolder(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MotleyError, match="not results of a matrix"):
        BaselineFolder(tmp_path).claim(read_matrix(PRESETS["strong"], HOSTS, KNOWN))
