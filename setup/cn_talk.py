"""See whether hosts can open connections to each other, as MPI and NCCL must; needs no MPI.

python setup/cn_talk.py listen ADDRESS               # prints its port, until it is ended
python setup/cn_talk.py connect NAME=ADDRESS:PORT... # prints "NAME ok", or "NAME why not"
"""

import socket
import sys
import threading

SECONDS = 3.0  # for a connection, and for the greeting after it
GREETING = b"motley"


def listen(address: str) -> None:
    """Greet whoever connects."""
    with socket.create_server((address, 0), backlog=128) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            connection.sendall(GREETING)
            connection.close()


def connect(peer: str) -> None:
    """Print how a connection to NAME=ADDRESS:PORT fares."""
    name, _, at = peer.partition("=")
    address, _, port = at.rpartition(":")
    try:
        with socket.create_connection((address, int(port)), SECONDS) as connection:
            said = connection.recv(len(GREETING))
        result = "ok" if said == GREETING else "is answered by another program"
    except TimeoutError:
        result = f"gets no answer within {SECONDS:.0f} s"
    except OSError as error:
        result = f"fails: {error.strerror}"
    print(f"{name} {result}\n", end="", flush=True)


def main(words: list[str]) -> None:
    """Listen, or connect to all at once."""
    if words[0] == "listen":
        listen(words[1])
    threads = [threading.Thread(target=connect, args=(peer,)) for peer in words[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
