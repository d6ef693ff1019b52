"""Show how long each kind of work took in profiled steps, and merge the traces of all ranks.

    mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh --profile 20:40 --profile-ranks all
    python plots/traces.py logs/                    # logs/<run>/trace.json.gz, every profiled run

The merged trace, trace.json.gz, can be opened at ui.perfetto.dev. All ranks have one time axis.
The exit code is 0, or 2 if there is no trace.
"""

from pathlib import Path

from motley.errors import MotleyError
from motley.plotting import command
from motley.records.run_folder import RunFolder, find_runs
from motley.records.trace import TraceSummary, merge_traces, read_trace, summarise


def describe_trace(found: TraceSummary) -> list[str]:
    """Return the lines that summarise the trace of one rank."""
    busy = "the GPU had nothing to do" if found.on_gpu else "no operator ran"
    lines = [
        f"rank {found.rank} on {found.host}: {found.steps} steps in {found.seconds:.3f} s; data "
        f"was sent for {found.wire:.0%} of this time, the rank waited for the data for "
        f"{found.waited:.0%}, and {busy} for {found.idle:.0%}"
    ]
    for name, seconds, calls in found.busiest:
        part = seconds / found.seconds
        lines.append(f"  {part:5.1%}  {seconds:8.3f} s  {calls:6,} times  {name[:80]}")
    return lines


def merge_run(run: RunFolder, out: Path | None) -> None:
    """Print a summary of each trace of a run, and merge the traces into one file."""
    traces = [read_trace(path) for path in run.traces()]
    for trace in traces:
        print("\n".join(describe_trace(summarise(trace))))
    into = run.trace_of_all()
    if out is not None:
        into = out / f"{run.path.resolve().name}.{into.name}"
        out.mkdir(parents=True, exist_ok=True)
    merge_traces(traces, into)
    print(into)


def merge_all(paths: list[Path], out: Path | None) -> int:
    """Merge the traces of every run, and return the exit code.

    After a run that cannot be merged, the remaining runs are still merged.
    """
    runs = [run for run in find_runs(paths) if run.traces()]
    if not runs:
        raise MotleyError(
            f"no trace under {', '.join(map(str, paths))}: train with --profile FROM:TO, for "
            "example: mpirun -np 2 ./entry_cn.sh --profile 20:40"
        )
    code = 2
    for run in runs:
        try:
            merge_run(run, out)
            code = 0
        except (MotleyError, OSError) as error:
            command.warn(error)
    return code


def main() -> int:
    """Merge the traces of the runs on the command line, and return the exit code."""
    return command.run_script(__doc__ or "", merge_all)
