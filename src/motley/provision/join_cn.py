"""Have a host that was away take part in training again; see leave_cn.sh.

  bash setup/join_cn.sh ecetesla1
  bash setup/join_cn.sh ecetesla1 ecetesla3 --dry-run

A run under setup/keep_training.sh checks for returned hosts once a minute. The run stops at a step
boundary and starts again with the host, if the host saves more time than the new start costs. Other
runs use the host when they are started again.

Options:
  --hostfile FILE   all hosts of the cluster; default: the repository's
                    hosts.txt (command motley: the current folder's)
  --dry-run         print which hosts are away, and change nothing

Exit status: 0 all hosts take part, 1 some host could not be asked, 2 nothing was begun.
"""

from collections.abc import Sequence

from motley.cluster.ssh import split
from motley.provision import setup_command
from motley.provision.leave_cn import ASK_S, ask_agent, chosen
from motley.text import typed_command


def main(words: Sequence[str]) -> int:
    """Remove the mark of absence on each host, and print which hosts were away.

    Return the exit code.
    """
    parser = setup_command.Parser("join_cn", __doc__)
    parser.add_argument("hosts", nargs="+", metavar="HOST")
    options = parser.parse_args(words)
    order = "ranks" if options.dry_run else "join"
    result, troubles = split(
        setup_command.ask_all(chosen(options), lambda host: ask_agent(host, order), ASK_S)
    )
    for host, answer in result.items():
        if not answer["away"]:
            print(f"{host} takes part already")
        elif options.dry_run:
            print(
                f"{host} is away{answer['away']['words']}; this command would let it take part "
                "again"
            )
        else:
            keep = typed_command("keep_training.sh")
            print(f"{host} takes part again; a run under {keep} looks for it once a minute")
    setup_command.print_troubles(troubles)
    return int(bool(troubles))


if __name__ == "__main__":
    setup_command.run(main)
