"""Train a Vision Transformer on all ranks with torch.distributed: DDP or FSDP.

mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --shares 5,4,3,2,1
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --strategy fsdp
mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --resume auto
"""

from motley.engines.strategy import TORCH, chosen_strategy, engines_of, known_strategies
from motley.launch.world import run
from motley.train.command_line import read_config, training_parser
from motley.train.loop import train

if __name__ == "__main__":
    strategies = known_strategies(TORCH)
    config = read_config(training_parser(str(__doc__), strategies))
    run(
        lambda world: train(world, config, engines_of(config, strategies)),
        packages=chosen_strategy(config, strategies).packages,
    )
