"""One rank of the trial in motley.provision.keep_training. The last rank is killed, and each other
one prints a line if it lives on.

    mpirun -np 3 ./entry_cn.sh setup/trial_rank.py
"""

import os
import signal
import time

from motley.launch.ranks import check_size
from motley.launch.world import ranks_of_launch

# Open MPI 4.1 sends SIGCONT at once and SIGTERM after 1 s. Slurm's PMIx plugin kills after 1 s.
_WAIT_S = 2.0
# For the other ranks to finish an exchange, or a line: the launcher may end the job with the first.
_LEAVE_S = 0.3


def main() -> None:
    """Kill this process if it is the last of several ranks; else print a line if it lives on."""
    for number in (signal.SIGCONT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(1))
    launched = ranks_of_launch()
    rank, size = launched.rank, launched.size
    check_size(size, os.environ)
    print(f"trial: rank {rank} of {size} began", flush=True)
    if size > 1:
        launched.allgather(None)
        if rank == size - 1:
            time.sleep(_LEAVE_S)  # the others may still read what this rank has sent
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_WAIT_S)
        print(f"trial: rank {rank} of {size} lives on", flush=True)
        time.sleep(_LEAVE_S)
    os._exit(0)  # MPI would wait for the killed rank


if __name__ == "__main__":
    main()
