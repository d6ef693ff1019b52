"""The start of a rank, by ``python -m motley.launch``.

entry_cn.sh runs ``python -m motley.launch SCRIPT.py [ARGS...]``, and the command ``motley`` runs
``python -m motley.launch -m MODULE [ARGS...]``.

mpi4py's runner runs the script, and ends all ranks when a rank raises an error. Importing torch and
timm makes hundreds of thousands of objects, none of them garbage. Python collects garbage whenever
the number of objects has grown by a quarter, which took a fifth of a short run. Garbage collection
is therefore off until ``motley.launch.world.run``, which excludes these objects from collection.
The objects are not freed at the end.

Open MPI binds a rank to few cores by default. The rank leaves this binding before it imports a
library that starts threads. OpenMP's pool then has a thread for each core.
"""

import contextlib
import faulthandler
import gc
import os
import runpy
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType


def report_failed_import(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught exception. For a failed import, also print the host and a remedy.

    An error that the user can correct is printed as one line. The registry of datasets, tasks and
    other parts raises such an error during an import, if an added file has the wrong form.
    """
    from motley.errors import MotleyError

    if isinstance(error, MotleyError):
        from motley.launch.process import stop_usage

        stop_usage(str(error))
    sys.__excepthook__(kind, error, trace)
    if isinstance(error, ImportError):
        from motley.text import typed_command

        where = f" (found at {error.path})" if error.path else ""
        again = typed_command("bash setup/make_env.sh")
        print(
            f"motley: {error.name or 'a package'} cannot be imported on "
            f"{os.uname().nodename}{where}: {error}; install it there with {sys.prefix}/bin/pip "
            f"install {error.name or 'NAME'}, or make the environment again with: {again}",
            file=sys.stderr,
            flush=True,
        )


def shadowed_packages(folders: Iterable[str]) -> list[str]:
    """Return the paths of packages in ``folders`` that the Python environment also contains."""
    own = Path(sysconfig.get_path("purelib")).resolve()
    result = []
    for folder in map(Path, folders):
        if folder.resolve() == own:
            continue
        with contextlib.suppress(OSError):  # a folder that is not there
            result += [
                str(path)
                for path in sorted(folder.iterdir())
                if path.stem != "__pycache__"
                and ((own / path.stem).is_dir() or (own / f"{path.stem}.py").exists())
            ]
    return result


def shadowed_note(folders: Iterable[str]) -> str:
    """Return a note on packages of PYTHONPATH that are not used, because the environment has them.

    Args:
        folders: the folders of the user's PYTHONPATH.
    """
    from motley.text import name_some

    if not (names := shadowed_packages(folders)):
        return ""
    return (
        f"PYTHONPATH on {os.uname().nodename} has {name_some(names)}, which are also in the "
        "environment, and Python imports the environment's; remove them from PYTHONPATH, or "
        "install your own versions into the environment with pip"
    )


def main() -> None:
    """Run the script that the command line names."""
    # Imported here, so that report_failed_import() names the host of a failure.
    from motley.cluster.account import cache_note, temporary_note
    from motley.cluster.launcher import (
        Launcher,
        cores_per_rank,
        few_cores_note,
        leave_default_binding,
        read_launch,
    )
    from motley.errors import MotleyError
    from motley.launch.environment import LAST_FOLDERS
    from motley.launch.process import (
        die_with_parent,
        end_at_once,
        keep_caches_local,
        stop_usage,
    )
    from motley.launch.ranks import finalize_mpi
    from motley.launch.start_watch import watch_imports
    from motley.text import escape_unprintable, typed_command

    if len(sys.argv) < 2:
        example = typed_command("./entry_cn.sh torch_dist/train_vit.py -h")
        sys.exit(f"motley: the script is missing; name one, as in: {example}")
    if sys.argv[1] != "-m" and sys.flags.safe_path:
        sys.path.insert(0, "")  # the place of the script's folder
    escape_unprintable()
    folders = [each for each in os.environ.get(LAST_FOLDERS, "").split(":") if each]
    sys.path += folders
    watch = watch_imports()  # noqa: F841  (it lives as long as this process)
    die_with_parent()  # first: a launcher that ends during the imports would leave this rank behind
    try:
        keep_caches_local(os.environ)
    except MotleyError as error:
        stop_usage(str(error))
    leave_default_binding()
    ranks_here = read_launch().local_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if read_launch().local_rank == 0 or read_launch().size == 1:
        notes = (temporary_note(os.environ), cache_note(), few_cores_note(ranks_here),
                 shadowed_note(folders))  # fmt: skip
        for note in filter(None, notes):
            print(f"motley: {note}", file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_per_rank(ranks_here)))
    if read_launch().by is Launcher.MPI:
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    else:  # where there may be no MPI
        sys.argv = sys.argv[1:]
        if sys.argv[0] == "-m":
            sys.argv = sys.argv[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    end_at_once(finalize_mpi)


if __name__ == "__main__":
    sys.excepthook = report_failed_import
    faulthandler.enable()
    gc.disable()
    main()
