"""See whether hosts can open connections to each other, as MPI and NCCL must; needs no MPI.

python setup/cn_talk.py listen ADDRESS...            # prints a port for each, until it is ended
python setup/cn_talk.py connect NAME=ADDRESS:PORT... # prints "NAME ok", or "NAME why not"
python setup/cn_talk.py measure ADDRESS:PORT...      # prints bytes a second, or why there are none
"""

import json
import signal
import sys
import threading

from motley.cluster import network_trial


def connect(peer: str) -> None:
    """Print how a connection to NAME=ADDRESS:PORT fares."""
    name, _, at = peer.partition("=")
    address, _, port = at.rpartition(":")
    found = network_trial.connect(address, int(port))
    result = found if isinstance(found, str) else "ok"
    print(f"{name} {result}\n", end="", flush=True)


def main(words: list[str]) -> None:
    """Listen, measure, or connect to all at once."""
    if words[0] == "listen":
        with network_trial.Receiver(words[1:]) as receiver:
            print(*receiver.ports, flush=True)
            signal.pause()
    if words[0] == "measure":
        at = [word.rpartition(":") for word in words[1:]]
        targets = [(address, int(port)) for address, _, port in at]
        print(json.dumps(network_trial.measure(targets)))
        return
    threads = [threading.Thread(target=connect, args=(peer,)) for peer in words[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
