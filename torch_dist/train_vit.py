"""Train a Vision Transformer on all ranks with torch.distributed: DDP or FSDP.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --shares 5,4,3,2,1
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --strategy fsdp
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --resume auto
"""

from motley.config.options import read_config, training_parser
from motley.engines.torch_engines import TorchEngines, add_options
from motley.launch.world import run
from motley.train.loop import train

if __name__ == "__main__":
    parser = training_parser(str(__doc__))
    add_options(parser)
    config = read_config(parser)
    run(lambda world: train(world, config, TorchEngines(config)))
