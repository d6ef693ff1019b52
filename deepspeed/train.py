"""Train any model on all ranks with DeepSpeed, ZeRO stage 0 to 3.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train.py --task text --epochs 2
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train.py --task text --stage 1
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train.py --task examples/my_task.py
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train.py --resume auto

Without --task it is deepspeed/train_vit.py. Options of another task are listed with
--task NAME --help-all.
"""

from motley.engines.strategies import ZERO
from motley.train.train_model import train_script

if __name__ == "__main__":
    train_script(ZERO, str(__doc__))
