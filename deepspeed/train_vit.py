"""Train a Vision Transformer on all ranks with DeepSpeed, ZeRO stage 0, 1 or 2.

    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py --stage 1 --epochs 9
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py --resume auto

The options are those of torch_dist/train_vit.py, and two more. Every number of the JSON
configuration that is "auto" comes from the plan.
"""

from zero_config import STAGES
from zero_engine import ZeroEngines

from motley import launch
from motley.options import read_config, training_parser
from motley.train import train

if __name__ == "__main__":
    parser = training_parser(str(__doc__))
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--stage", type=int, choices=STAGES, help="ZeRO stage, default 0")
    group.add_argument(
        "--deepspeed-config", metavar="FILE", help="default: deepspeed/zero<stage>.json"
    )
    config = read_config(parser)
    launch.run(lambda world: train(world, config, ZeroEngines(config)))
