"""See whether hosts can open connections to each other, as MPI and NCCL must; needs no MPI.

python setup/cn_talk.py listen ADDRESS...   # prints a port for each, and a token, until it is ended
python setup/cn_talk.py connect             # prints "NAME ok", or "NAME why not"
python setup/cn_talk.py measure             # prints bytes a second, or why there are none

To connect and measure, stdin has JSON: [[NAME, ADDRESS, PORT, TOKEN], ...].
"""

import json
import signal
import sys
import threading

from motley.cluster import network


def connect(name: str, address: str, port: int, token: str) -> None:
    """Print how a connection to a host fares."""
    found = network.connect(address, port, token)
    result = found if isinstance(found, str) else "ok"
    print(f"{name} {result}\n", end="", flush=True)


def main(words: list[str]) -> None:
    """Listen, measure, or connect to all at once."""
    if words[0] == "listen":
        with network.Receiver(words[1:]) as receiver:
            print(*receiver.ports, receiver.token, flush=True)
            signal.pause()
    peers = json.load(sys.stdin)
    if words[0] == "measure":
        targets = [(address, port) for _, address, port, _ in peers]
        print(json.dumps(network.measure(targets, peers[0][-1])))
        return
    threads = [threading.Thread(target=connect, args=peer) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
