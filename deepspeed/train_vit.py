"""Train a Vision Transformer on all ranks with DeepSpeed, ZeRO stage 0 to 3.

    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py --stage 1 --epochs 9
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py --resume auto

The options are those of torch_dist/train_vit.py, but for --strategy. Every number of the JSON
configuration that is "auto" comes from the plan.
"""

from motley.config.options import read_config, training_parser
from motley.engines.zero import ZeroEngines
from motley.engines.zero_config import add_options
from motley.launch.world import run
from motley.train.loop import train

if __name__ == "__main__":
    parser = training_parser(str(__doc__))
    add_options(parser)
    config = read_config(parser)
    run(lambda world: train(world, config, ZeroEngines(config)))
