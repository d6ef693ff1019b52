"""Train a task from a script, and read the records.

mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh examples/my_script.py
mpirun -np 2 motley run examples/my_script.py --epochs 5        # if motley is installed by pip
"""

import os

from my_task import Sums

import motley

if __name__ == "__main__":
    folder = motley.train_model(Sums(digits=3), epochs=1, batch_size=256, lr=3e-3)
    if os.environ.get("RANK") == "0":
        run = motley.records.load(folder)
        print(f"loss {run.epochs['loss'][-1]:.2f}, records in {folder}")
