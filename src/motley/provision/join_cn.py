"""Has hosts take part in training again; the .sh beside it says how to call it."""

from collections.abc import Sequence

from motley.cluster.ssh import split
from motley.provision import setup_command
from motley.provision.leave_cn import ASK_S, chosen, tell


def main(words: Sequence[str]) -> int:
    """Remove the marks, and say which there were."""
    parser = setup_command.Parser("join_cn")
    parser.add_argument("hosts", nargs="+", metavar="HOST")
    options = parser.parse_args(words)
    order = "ranks" if options.dry_run else "join"
    found, troubles = split(
        setup_command.ask_all(chosen(options), lambda host: tell(host, order), ASK_S)
    )
    for host, answer in found.items():
        if not answer["away"]:
            print(f"{host} takes part already")
        elif options.dry_run:
            print(f"{host} is away{answer['away']['words']}; would have it take part again")
        else:
            print(f"{host} takes part again: a run under keep_training.sh asks once a minute")
    setup_command.print_troubles(troubles)
    return int(bool(troubles))


if __name__ == "__main__":
    setup_command.run(main)
