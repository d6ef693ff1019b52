"""What the records of a run say of its end, whoever writes it: a rank, or what outlives it."""

import time

from motley.faults import Fault, FaultKind
from motley.records.run_folder import RunFolder

_STOPPED = (FaultKind.STOPPED, FaultKind.LEFT, FaultKind.PAUSED)


def record_fault(folder: RunFolder, fault: Fault) -> None:
    """Record the first cause of the end, where this process sees the run's records."""
    if not (folder.path / "run.json").exists():
        return
    fields = {
        "rank": fault.rank, "host": fault.host, "step": fault.step, "kind": fault.kind,
        "phase": fault.phase, "error": fault.error,
    }  # fmt: skip
    status = "stopped" if fault.kind in _STOPPED else "failed"
    try:  # first what others go by, whatever else fails
        folder.update_run(status=status, failure=fields, ended=time.time())
    finally:
        folder.event("fault", **fields, details=fault.details)
