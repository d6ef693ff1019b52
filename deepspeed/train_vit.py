"""Train a Vision Transformer on all ranks with DeepSpeed, ZeRO stage 0 to 3.

    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py --stage 1 --epochs 9
    mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py --resume auto

The options are those of torch_dist/train_vit.py, but for --strategy. Every number of the JSON
configuration that is "auto" comes from the plan.
"""

from motley.engines.strategy import ZERO, chosen_strategy, engines_of, known_strategies
from motley.launch.world import run
from motley.train.command_line import read_config, training_parser
from motley.train.loop import train

if __name__ == "__main__":
    strategies = known_strategies(ZERO)
    config = read_config(training_parser(str(__doc__), strategies))
    run(
        lambda world: train(world, config, engines_of(config, strategies)),
        packages=chosen_strategy(config, strategies).packages,
    )
