"""Runs of a module of the library on a host, in the environment there."""

from collections.abc import Callable

from motley import ROOT
from motley.cluster.ssh import connect
from motley.errors import HostTrouble
from motley.provision.host_report import printable
from motley.provision.setup_command import VENV

_NO_PYTHON = 66
_SCRIPT = f"""
root=$1 venv=$2 module=$3; shift 3
[ -x "$venv/bin/python" ] || exit {_NO_PYTHON}
PYTHONPATH=$root/src "$venv/bin/python" -m "$module" "$@"
"""


def run_module(
    host: str,
    module: str,
    *words: object,
    limit: float,
    tell: Callable[[str], None] | None = None,
) -> str:
    """What ``python -m MODULE WORDS...`` prints there.

    Args:
        limit: seconds that it may take. tell: called with each line as it comes.

    Raises:
        HostTrouble: the host does not answer, or has no environment, or that fails.
    """
    with connect(host) as remote:
        done = remote.run(_SCRIPT, ROOT, VENV, module, *words, limit=limit, tell=tell)
    if done.code == _NO_PYTHON:
        raise HostTrouble(
            "no environment",
            f"there is no environment at {VENV} to look with",
            "make it with: bash setup/install_cn.sh",
        )
    if done.code:
        last = (done.errors.strip().splitlines() or ["no message"])[-1]
        raise HostTrouble(
            "cannot look",
            f"the environment there fails: {printable(last)}",
            "see what is wrong with: bash setup/test_cn_connection.sh",
        )
    return done.output
