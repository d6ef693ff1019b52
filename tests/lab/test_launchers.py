"""Motley under the launchers that people have: Debian's Open MPI 4.1, Slurm, and not as root."""

import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from jobs import needs, wait_until
from project import DDP, LIMIT_S, ROOT, environment, venv
from slurm import PROGRAMS, write_conf

from motley.records.run_folder import RunFolder

pytestmark = pytest.mark.mpi

WHO = """
import os
import torch.distributed
from motley.launch.world import run
from motley.measure.process_group import join_process_group, leave_process_group

def main(world):
    group = join_process_group(world)
    who = f"rank {group.rank} of {group.size}, local {os.environ['LOCAL_RANK']}"
    print(f"{who}, {world.network.address}", flush=True)
    torch.distributed.barrier()  # who leaves while others still connect breaks their group
    leave_process_group()

run(main)
"""


@pytest.fixture
def who(tmp_path: Path) -> Path:
    """A script in which each rank says who it is, over a process group."""
    tmp_path.chmod(0o755)
    script = tmp_path / "who.py"
    script.write_text(WHO)
    return script


def said(output: str) -> set[str]:
    # Two ranks' lines may run together in the launcher's pipe.
    return set(re.findall(r"rank \d+ of \d+, local \d+, [\d.]+", output))


def expected(size: int) -> set[str]:
    return {f"rank {rank} of {size}, local {rank}, 127.0.0.1" for rank in range(size)}


def test_debians_open_mpi_4(who: Path) -> None:
    needs("mpirun.openmpi", "Open MPI 4.1")
    done = subprocess.run(
        ["mpirun.openmpi", "--oversubscribe", "-np", "2", "./entry_cn.sh", who], cwd=ROOT,
        text=True, capture_output=True, timeout=LIMIT_S, check=False,
        env=environment(**AS_ROOT),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert said(done.stdout) == expected(2)


CORES = """
import os
from motley.cluster.launcher import cores_per_rank
ranks = int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
print(f"cores {sorted(os.sched_getaffinity(0))} own {cores_per_rank(ranks)}"
      f" threads {os.environ['OMP_NUM_THREADS']}", flush=True)
"""


@pytest.mark.parametrize(
    ("before", "words", "cores", "own"),
    [
        ((), ("-np", "1"), [[0, 1]], 2),  # Open MPI's default is one core, for the loaders too
        ((), ("-np", "2"), [[0, 1]], 1),
        ((), ("-np", "2", "--bind-to", "core"), [[0], [1]], 1),  # somebody asked for it
        ((), ("-np", "1", "--mca", "hwloc_base_binding_policy", "core"), [[0]], 1),
        (("taskset", "-c", "1"), ("-np", "1"), [[1]], 1),  # Open MPI's default is core 0
    ],
    ids=["default", "two", "asked", "by variable", "outside"],
)
def test_a_rank_has_the_cores_of_its_launcher_unless_somebody_asked_for_fewer(
    tmp_path: Path,
    before: tuple[str, ...],
    words: tuple[str, ...],
    cores: list[list[int]],
    own: int,
) -> None:
    needs("mpirun.openmpi", "Open MPI 4.1")
    script = tmp_path / "cores.py"
    script.write_text(CORES)
    done = subprocess.run(
        ["taskset", "-c", "0,1", *before, "mpirun.openmpi", *words, "./entry_cn.sh", script],
        cwd=ROOT, text=True, capture_output=True, timeout=LIMIT_S, check=False,
        env=environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = set(re.findall(r"cores [^]]*. own \d threads \d", done.stdout))  # lines run together
    assert found == {f"cores {each} own {own} threads {own}" for each in cores}
    idle = "--mca" in words  # one rank on one of two cores
    assert ("binds each rank" in done.stderr and "to 1 of 2 cores" in done.stderr) is idle


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A real Slurm of one node on free ports; gives the variables that its commands need."""
    for program in PROGRAMS:
        needs(program, "Slurm")
    if os.getuid() != 0:
        pytest.skip("slurmd needs root")
    # munge refuses a socket in a folder that others could replace.
    folder = Path(tempfile.mkdtemp(prefix="motley-slurm-", dir="/var/tmp"))
    folder.chmod(0o755)
    ports = [free_port() for _ in range(2)]
    host = socket.gethostname().partition(".")[0]
    configuration = folder / "slurm.conf"
    write_conf(
        configuration, SlurmctldHost=host, SlurmctldPort=ports[0], SlurmdPort=ports[1],
        SlurmUser="root", AuthInfo=f"socket={folder}/munge.socket",
        StateSaveLocation=f"{folder}/state", SlurmdSpoolDir=f"{folder}/spool",
        SlurmctldPidFile=f"{folder}/slurmctld.pid", SlurmdPidFile=f"{folder}/slurmd.pid",
        SlurmctldLogFile=f"{folder}/slurmctld.log", SlurmdLogFile=f"{folder}/slurmd.log",
        NodeName=f"{host} CPUs=2 State=UNKNOWN",
    )  # fmt: skip
    (folder / "munge.key").write_bytes(secrets.token_bytes(64))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    environ = environment(SLURM_CONF=str(configuration))
    munge = [
        "munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
        f"--key-file={folder}/munge.key", f"--pid-file={folder}/munge.pid",
        f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
    ]  # fmt: skip
    started = []
    try:
        started.append(subprocess.Popen(munge, env=environ))
        wait_until((folder / "munge.socket").exists, 10)
        started.append(subprocess.Popen(["slurmctld", "-D"], env=environ))
        started.append(subprocess.Popen(["slurmd", "-D", "-N", host], env=environ))
        wait_until(lambda: "idle" in sinfo(environ), 30)
        yield environ
    finally:
        for daemon in reversed(started):
            daemon.terminate()
            daemon.wait(20)
        shutil.rmtree(folder)


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def sinfo(environ: dict[str, str]) -> str:
    done = subprocess.run(
        ["sinfo", "-h", "-o", "%t"], env=environ, capture_output=True, text=True, check=False
    )
    return done.stdout


def test_slurm(who: Path, slurm: dict[str, str]) -> None:
    def srun(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["srun", *options, "-n", "2", "--overcommit", "./entry_cn.sh", who], cwd=ROOT,
            env=slurm, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    for mpi in ("pmix", "none"):
        done = srun(f"--mpi={mpi}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert said(done.stdout) == expected(2)

    shell = f"srun -n 2 --overcommit --pty bash -c './entry_cn.sh {who}; true'"
    done = subprocess.run(
        ["script", "-qec", shell, "/dev/null"], cwd=ROOT, env=slurm, capture_output=True,
        text=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert said(done.stdout) == expected(1), done.stdout
    assert "this shell was started by srun --pty" in done.stdout


KILLED = "a rank is killed under keep_training.sh"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
FAILING = "tests/support/drivers/failing.py"
WORDS = ("--batch-size", "96", "--precision", "fp32", "--eval-samples", "60", "--shares", "equal")


def keep(
    launcher: Sequence[object], *words: object, **extra: str
) -> subprocess.CompletedProcess[str]:
    """A training of three ranks under keep_training.sh."""
    line = ("bash", "setup/keep_training.sh", *launcher, "-n", 3, "./entry_cn.sh", *words, *WORDS)
    return subprocess.run(
        [str(word) for word in line], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
        env=environment(**{"OMP_NUM_THREADS": "1", **AS_ROOT, **extra}),
    )  # fmt: skip


def loses_no_step(logs: Path, launcher: Sequence[object], **extra: str) -> None:
    """Rank 2 is killed in its eighth step of twelve, and the others go on in their processes.

    They take 2.5 s for it: Open MPI 4.1 may end them after 2 s, Slurm's PMIx plugin after 1 s.
    """
    fault = (FAILING, "--fail", "killed", "--step", 7, "--on", 2, "--pace", 0.5)
    done = keep(launcher, *fault, "--max-steps", 12, "--logs", logs, "--run", "kept", **extra)
    assert done.returncode == 0 and "2 of 3 ranks continue" in done.stdout, done.stdout
    assert "keep_training:" not in done.stdout, done.stdout
    folder = RunFolder(logs / "kept")
    assert [step["step"] for step in folder.read_steps()[0]] == list(range(12))
    (lost,) = [event for event in folder.read_events() if event["event"] == "lost"]
    assert lost["step"] == 7 and folder.read_run()["status"] == "finished"


def unsettled_open_mpi_5(folder: Path) -> Path:
    """The environment's mpirun without the configuration of setup/make_env.sh."""
    (folder / "etc").mkdir()
    (folder / "bin").mkdir()
    for name in ("mpiexec", "ompirun_wrapper", "prterun", "prted", "prte"):
        shutil.copy2(venv() / "bin" / name, folder / "bin")
    for name in ("lib", "share"):
        (folder / name).symlink_to(venv() / name)
    return folder / "bin" / "mpiexec"


@pytest.mark.turns(KILLED)
@pytest.mark.parametrize("mpi", ["Debian's 4.1", "5 without our configuration", "ours"])
def test_a_killed_rank_costs_no_step(mpi: str, tmp_path: Path) -> None:
    launcher: Path | str = "mpirun"
    if mpi == "Debian's 4.1":
        needs("mpirun.openmpi", "Open MPI 4.1")
        launcher = "mpirun.openmpi"
    elif mpi != "ours":
        launcher = unsettled_open_mpi_5(tmp_path)
    loses_no_step(tmp_path / "logs", (launcher, "--oversubscribe"))


@pytest.mark.turns(KILLED)
def test_a_killed_rank_costs_no_step_under_srun_with_pmix(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    loses_no_step(tmp_path, ("srun", "--mpi=pmix", "--overcommit"), **slurm)


@pytest.mark.turns(KILLED)
def test_where_all_ranks_end_with_one_the_start_warns_and_the_run_saves_often(
    tmp_path: Path,
) -> None:
    launcher = ("mpirun", "--oversubscribe", "--prtemca", "state_base_recoverable", 0)
    words = (DDP, "--max-steps", 2, "--logs", tmp_path, "--run", "kept")
    done = keep(launcher, *words)
    assert done.returncode == 0, done.stdout
    first = done.stdout.splitlines()[0]
    assert re.match(r"keep_training: .*Open MPI.* ended all ranks of a trial", first), done.stdout
    assert "up to a minute of steps, because this run saves every 50s" in first
    assert RunFolder(tmp_path / "kept").read_run()["config"]["save_every"] == "50s"


@pytest.mark.turns(KILLED)
def test_ranks_that_the_launcher_ends_after_a_lost_one_are_not_stopped_by_the_user(
    tmp_path: Path,
) -> None:
    needs("mpirun.openmpi", "Open MPI 4.1")
    line = (
        "mpirun.openmpi", "--oversubscribe", "-n", 3, "./entry_cn.sh", FAILING, "--survive",
        "--fail", "killed", "--step", 7, "--pace", 0.5, "--epochs", 9, *WORDS, "--logs", tmp_path,
        "--run", "ended",
    )  # fmt: skip
    done = subprocess.run(
        [str(word) for word in line],
        cwd=ROOT, text=True, capture_output=True, timeout=LIMIT_S, check=False,
        env=environment(OMP_NUM_THREADS="1", **AS_ROOT),
    )  # fmt: skip
    run = RunFolder(tmp_path / "ended").read_run()
    assert run["status"] == "failed" and run["failure"]["kind"] == "killed", done.stderr


def test_torchrun_and_nobody(who: Path) -> None:
    line = ["torchrun", "--nproc-per-node", "2", "--no-python", "--", "./entry_cn.sh", str(who)]
    for words, size in ((line, 2), (line[-2:], 1)):
        done = subprocess.run(
            words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert said(done.stdout) == expected(size)


def test_not_as_root(who: Path) -> None:
    """The plain line of the README, as an ordinary user, from a copy of the repository."""
    if os.getuid() != 0:
        pytest.skip("this whole test run is not as root")
    home = Path(tempfile.mkdtemp(prefix="motley-user-", dir="/var/tmp"))
    home.chmod(0o755)
    own = home / "venv"  # the environment may lie in a folder that others cannot enter
    own.mkdir()
    subprocess.run(["mount", "--bind", venv(), own], check=True)
    try:
        copy = home / "motley"
        shutil.copytree(ROOT, copy, ignore=copied_only)
        for path in [home, copy, *copy.rglob("*")]:
            shutil.chown(path, "nobody")
        done = subprocess.run(
            ["mpirun", "-np", "2", "--hostfile", "hosts.txt", "./entry_cn.sh", DDP,
             "--max-steps", "2"],
            cwd=copy, user="nobody", group="nogroup", extra_groups=[], check=False,
            capture_output=True, text=True, timeout=LIMIT_S,
            env={"PATH": f"{own / 'bin'}:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home),
                 "MOTLEY_VENV": str(own)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step 2/2" in done.stdout
    finally:
        subprocess.run(["umount", own], check=True)
        shutil.rmtree(home)


def copied_only(folder: str, names: list[str]) -> set[str]:
    """What a copy of the work tree leaves out."""
    made = ("logs", "data") if Path(folder) == ROOT else ()
    return {name for name in names if name[0] == "." or name in made}
