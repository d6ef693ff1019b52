"""``python -m motley`` says what there is: Motley is started by its scripts."""

import sys

_SAID = """motley: there is no such command; from the repository's folder:

    bash setup/quickstart.sh                         a trained model on this machine
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh  train on all hosts (-h: options)
    bash setup/test_cn_connection.sh                 are all hosts of hosts.txt reached?
    python plots/plot_training.py logs/              pictures of the runs

README.md shows the way to your lab."""

if __name__ == "__main__":
    print(_SAID, file=sys.stderr)
    sys.exit(2)
