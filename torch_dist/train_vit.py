"""Train a model on all ranks with torch.distributed: DDP or FSDP. The default is a small ViT.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh --task examples/my_task.py
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --shares 5,4,3,2,1
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --strategy fsdp
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --resume auto
"""

from motley.engines.strategies import TORCH
from motley.train.train_model import train_script

if __name__ == "__main__":
    train_script(TORCH, str(__doc__))
