"""The door of setup/sync_cn.sh; its -h explains it."""

from collections.abc import Sequence

from cn import ROOT, Parser, ask_all, many, print_troubles, read_hostfile, run, table
from cn_files import differing, send, tracked_files
from cn_probe import probe, token_file

from motley.cluster.ssh import connect, split
from motley.errors import HostTrouble

LIMIT_S = 600


def main(words: Sequence[str]) -> int:
    """Send what differs; 1 if some host could not be brought up to date."""
    options = Parser("sync_cn").parse_args(words)
    names = tracked_files()

    def one(host: str) -> str:
        with connect(host) as remote:
            if probe(remote, token=token).same_folder:
                return "this machine" if remote.here else "shares this folder"
            if options.dry_run:
                missing = differing(remote, ROOT, names, ROOT)
                return f"would send {_count(missing)}" if missing else "already the same"
            sent = send(remote, ROOT, names, ROOT)
            return f"sent {_count(sent)}" if sent else "already the same"

    with token_file() as token:
        found = ask_all([host.name for host in read_hostfile(options)], one, LIMIT_S)
    troubles = split(found)[1]
    rows = [(h, each.kind if isinstance(each, HostTrouble) else each) for h, each in found.items()]
    print(table(("host", f"files of {ROOT}"), rows))
    print_troubles(troubles)
    return 1 if troubles else 0


def _count(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return many(len(names), "file") + (f": {shown}" if len(names) <= 3 else f": {shown}, ...")


if __name__ == "__main__":
    run(main)
