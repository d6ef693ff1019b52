"""What a host is: asked by one sh script, so that it works with no Python there.

    with token_file() as token:
        reports = probe_all(["ecetesla0", "ecetesla1"], token=token)

An idle host answers within 1 to 2 s.
"""

import contextlib
import functools
import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from cn import ROOT, VENV, ask_all
from cn_report import Asked, HostReport, Python, parse, printable

from motley.cluster.shell import Finished
from motley.cluster.ssh import Remote, connect
from motley.errors import HostTrouble

__all__ = ["HostReport", "Python", "probe", "probe_all", "token_file"]

_SCRIPT = Path(__file__).with_suffix(".sh")


@contextlib.contextmanager
def token_file() -> Iterator[str]:
    """An empty file in the repository while we ask: who sees it has the same folder.

    Yields its name; "" where this user may not write.
    """
    path = ROOT / f".motley-token-{secrets.token_hex(8)}"
    try:
        path.touch(exist_ok=False)
    except OSError:
        yield ""
        return
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def probe(remote: Remote, *, token: str = "", next_host: str = "", limit: float = 8) -> HostReport:
    """Ask a host what it is.

    Args:
        token: from :func:`token_file`.
        next_host: a host that it tries to ssh to.
        limit: seconds that it may take.

    Raises:
        HostTrouble: it took longer, hung up, or runs no script.
    """
    first: list[float] = []

    def tell(line: str) -> None:
        if not first:  # the clock's line
            first.append(time.time())

    sent = time.time()
    name = f".motley-probe-{secrets.token_hex(8)}"
    done = remote.run(
        _SCRIPT.read_text(), ROOT, VENV, token, name, next_host, limit=limit, tell=tell
    )
    try:
        asked = Asked(remote.host, remote.here, sent, first[0], token, _own_tree())
        return parse(done.output, done.chatter, asked)
    except (LookupError, ValueError, TypeError):
        raise HostTrouble(
            "no shell",
            f"{remote.host} lets us in but does not run our script ({_last(done)})",
            f"see what its login shell does: ssh -- {remote.host} echo hello",
        ) from None


def _last(done: Finished) -> str:
    """What a script that failed said last."""
    lines = (done.chatter + done.output + done.errors).strip().splitlines()
    return printable(lines[-1]) if lines else "it says nothing"


@functools.cache
def _own_tree() -> str:
    """As cn_probe.sh tells it: device, inode, hash of the scripts in setup/."""
    setup, status = ROOT / "setup", ROOT.stat()
    content = hashlib.sha256()
    for path in [*sorted(setup.glob("*.sh")), *sorted(setup.glob("*.py"))]:
        content.update(path.read_bytes())
    return f"{status.st_dev} {status.st_ino} {content.hexdigest()}"


def probe_all(
    hosts: Iterable[str],
    *,
    token: str = "",
    ring: bool = False,
    limit: float = 9.5,
) -> dict[str, HostReport | HostTrouble]:
    """Connect to all hosts at once and probe them.

    Args:
        ring: each also tries to ssh to the next.
        limit: seconds for all of them together.
    """
    names = list(hosts)
    after = dict(zip(names, names[1:] + names[:1], strict=True)) if ring and len(names) > 1 else {}
    end = time.monotonic() + limit

    def one(host: str) -> HostReport:
        with connect(host) as remote:
            left = end - time.monotonic() - 0.3
            return probe(remote, token=token, next_host=after.get(host, ""), limit=left)

    return ask_all(names, one, limit)
