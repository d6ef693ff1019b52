"""Train any model on all ranks with torch.distributed: DDP or FSDP.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train.py --task text --epochs 2
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train.py --task text --strategy fsdp
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train.py --task examples/my_task.py
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train.py --resume auto

Without --task it is torch_dist/train_vit.py. Options of another task are listed with
--task NAME --help-all.
"""

from motley.engines.strategies import TORCH
from motley.train.train_model import train_script

if __name__ == "__main__":
    train_script(TORCH, str(__doc__))
