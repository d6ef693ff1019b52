"""Train a Vision Transformer on all ranks with torch.distributed.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --shares 5,4,3,2,1
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --resume auto
"""

from torch_engines import TorchEngines

from motley import launch
from motley.options import read_config, training_parser
from motley.train import train

if __name__ == "__main__":
    config = read_config(training_parser(str(__doc__)))
    launch.run(lambda world: train(world, config, TorchEngines()))
