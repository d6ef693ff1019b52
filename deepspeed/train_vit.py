"""Train a Vision Transformer on all ranks with DeepSpeed, ZeRO stage 0 to 3.

    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py --stage 1 --epochs 9
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py --resume auto

The options are those of torch_dist/train_vit.py, but for --strategy. Every number of the JSON
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
    group.add_argument(
        "--offload",
        choices=("none", "optimizer", "parameters"),
        default="none",
        help="keep in the host's memory: the optimizer (stage 1 to 3), or the parameters too "
        "(stage 3); default: none",
    )
    config = read_config(parser)
    launch.run(lambda world: train(world, config, ZeroEngines(config)))
