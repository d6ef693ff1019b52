"""The environment variables of a rank, for the command ``motley`` and for entry_cn.sh.

Settings are NAME=VALUE lines of a file named .deepspeed_env, which DeepSpeed reads too. One of
these files may be in the cloned repository, or in the current folder without a clone. Another file
may be in the user's home. ``DS_ENV_FILE`` gives another name, or the path of a file.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from motley import PACKAGE, ROOT
from motley.errors import MotleyError

SETTINGS = ".deepspeed_env"
LAST_FOLDERS = "MOTLEY_LAST_FOLDERS"  # the user's PYTHONPATH, for motley.launch
# Variables of another Python, which a module or .bashrc sets, would break the start of this one.
_FOREIGN = ("PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONOPTIMIZE", "PYTHONSAFEPATH", "PYTHONINSPECT")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK", "MPI_LOCALRANKID")
# A shell that srun --pty has started, and every process in it, has these variables of a rank.
_OF_PTY = ("SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "PMI")
_QUOTED = re.compile(r"""("[^"]*"|'[^']*')(\s+#.*)?""")


def start_rank(words: Sequence[str]) -> NoReturn:
    """Replace this process by ``python -m motley.launch WORDS...`` in a rank's environment."""
    try:
        environ = rank_environment(os.environ)
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        sys.exit(2)
    # The rank stays the launcher's direct child, since it asks the kernel to die with its parent.
    # With -P a folder named motley in the current folder is not taken for the package.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "motley.launch", *words], environ)


def rank_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a rank, and print a note on each variable left out.

    Args:
        given: environment variables of this process. They override the variables in files.

    Raises:
        MotleyError: the file that DS_ENV_FILE names is missing, or a line has another form than
            NAME=VALUE.
    """
    result = dict(given)
    for path in _settings_files(given):
        result = {**read_settings(path), **result}
    _leave_out_foreign(result)
    _leave_out_shell(result)
    # Turns for which a thread spins before it sleeps. With OpenMP's default of 300000, some
    # milliseconds, a rank beside other jobs wastes its time slices on waiting.
    if not result.get("OMP_WAIT_POLICY"):
        result["GOMP_SPINCOUNT"] = result.get("GOMP_SPINCOUNT") or "10000"
    folders = [str(Path(sys.executable).parent), *filter(None, [result.get("PATH", "")])]
    result["PATH"] = os.pathsep.join(folders)
    # Packages of the user's PYTHONPATH would come before the environment's. motley.launch adds
    # these folders last.
    others = result.pop("PYTHONPATH", "")
    result[LAST_FOLDERS] = result.get(LAST_FOLDERS) or others
    if not PACKAGE.is_relative_to(sys.prefix):  # of a clone
        result["PYTHONPATH"] = str(PACKAGE.parent)
    result["PYTHONUNBUFFERED"] = "1"
    # torch's warnings are about hosts without a name in DNS and the like. Errors still appear.
    result["TORCH_CPP_LOG_LEVEL"] = result.get("TORCH_CPP_LOG_LEVEL") or "ERROR"
    return result


def _settings_files(given: Mapping[str, str]) -> Iterator[Path]:
    """Yield the paths of possible settings files. Settings of an earlier file override later ones.

    Raises:
        MotleyError: DS_ENV_FILE is the path of a file that does not exist.
    """
    name = given.get("DS_ENV_FILE") or SETTINGS
    if not name.startswith("/"):
        yield (ROOT or Path()) / name
        if home := given.get("HOME"):
            yield Path(home) / name
    elif Path(name).is_file():
        yield Path(name)
    else:
        raise MotleyError(
            f"DS_ENV_FILE names {name}, which does not exist on {os.uname().nodename}; create it "
            "there, or unset DS_ENV_FILE"
        )


def read_settings(path: Path) -> dict[str, str]:
    """Return the settings in a file, by name. A line is NAME=VALUE, blank, or a comment.

    The result is empty if the file does not exist.

    Raises:
        MotleyError: a line has another form.
    """
    result = dict[str, str]()
    if not path.is_file():
        return result
    for line in path.read_text(encoding="utf-8", errors="surrogateescape").split("\n"):
        plain = line.removeprefix("\ufeff").strip()
        if not plain or plain.startswith("#"):
            continue
        name, value = split_setting(plain)
        if "=" not in plain or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise MotleyError(
                f"{path} on {os.uname().nodename} has the line {plain!r}; write it as NAME=VALUE"
            )
        quoted = _QUOTED.fullmatch(value)
        value = quoted[1][1:-1] if quoted else re.split(r"\s#", value, maxsplit=1)[0].strip()
        result.setdefault(name, value if quoted or not value.startswith("#") else "")
    return result


def split_setting(line: str) -> tuple[str, str]:
    """Return the name and the value of a line NAME=VALUE. Quotes in the value stay."""
    name, _, value = line.removeprefix("\ufeff").partition("=")
    return re.sub(r"^export\s", "", name.strip()).strip(), value.strip()


def _leave_out_foreign(found: dict[str, str]) -> None:
    speaks = next((found[name] for name in _LOCAL_RANKS if found.get(name)), "0") == "0"
    for name in [name for name in _FOREIGN if name in found]:
        if speaks:  # one rank reports for its machine
            print(
                f"motley: {name}={found[name]} on {os.uname().nodename} is ignored, because the "
                f"environment has its own Python; find where it is set with: grep -n {name} "
                "~/.bashrc ~/.profile /etc/profile.d/*",
                file=sys.stderr,
            )
        del found[name]


def _leave_out_shell(found: dict[str, str]) -> None:
    is_rank = found.get("OMPI_COMM_WORLD_RANK") or found.get("ROLE_RANK")
    if not found.get("SLURM_PTY_PORT") or is_rank:
        return
    comm = Path(f"/proc/{os.getppid()}/comm")
    if comm.exists() and comm.read_text().strip() == "slurmstepd":
        return
    for name in [name for name in found if name.startswith(_OF_PTY)]:
        del found[name]
    print(
        "motley: this shell was started by srun --pty, so the script runs as one process. For "
        "several ranks, put mpirun -np N before it, or start it with srun --mpi=none outside of "
        "that shell",
        file=sys.stderr,
    )
