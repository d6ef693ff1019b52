"""Train a Vision Transformer on all ranks with torch.distributed: DDP or FSDP.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --shares 5,4,3,2,1
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --strategy fsdp
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --resume auto
"""

from torch_engines import TorchEngines

from motley import launch
from motley.options import read_config, training_parser
from motley.train import train

if __name__ == "__main__":
    parser = training_parser(str(__doc__))
    group = parser.add_argument_group("torch.distributed")
    group.add_argument(
        "--strategy",
        choices=("ddp", "fsdp"),
        default="ddp",
        help="ddp (default): each rank keeps the whole model; fsdp: a part of it, so that larger "
        "ones fit, and sends more",
    )
    group.add_argument(
        "--offload",
        choices=("none", "parameters"),
        default="none",
        help="with fsdp, what is kept in the host's memory: parameters, and with them gradients "
        "and the optimizer; default: none",
    )
    config = read_config(parser)
    launch.run(lambda world: train(world, config, TorchEngines(config)))
