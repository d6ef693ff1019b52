"""How a fork of a process that has imported all ends: as a Python that ran the same would."""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def end_with(body: Callable[[], object]) -> NoReturn:
    """Call what this fork is for, say what it raises, and exit with the status that Python would;
    nothing of the process that was forked is cleaned up here."""
    atexit._clear()
    gc.freeze()  # a million objects that are not this fork's: to look at each takes half a second
    code = 1
    try:
        body()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
