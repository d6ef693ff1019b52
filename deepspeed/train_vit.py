"""Train a model on all ranks with DeepSpeed, ZeRO stage 0 to 3. The default is a small ViT.

    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py --stage 1 --epochs 9
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py --resume auto

The options are those of torch_dist/train_vit.py, but for --strategy. Every number of the JSON
configuration that is "auto" comes from the plan.
"""

from motley.engines.strategies import ZERO
from motley.train.train_model import train_script

if __name__ == "__main__":
    train_script(ZERO, str(__doc__))
