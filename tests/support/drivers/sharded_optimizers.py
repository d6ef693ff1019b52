"""Which of timm's optimizers do the same where each rank has a part of each tensor.

mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh tests/support/drivers/sharded_optimizers.py
"""

import timm.optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from motley.engines.fsdp import FsdpEngine
from motley.engines.optimizer import Sharding, try_optimizer
from motley.errors import MotleyError
from motley.launch.world import World, run
from motley.measure.process_group import join_process_group, leave_process_group
from motley.plan.precision import read_precisions
from motley.train.command_line import read_config, training_parser

if __name__ == "__main__":

    def main(world: World) -> None:
        """Try each, but those that the whole tensor's test tries slowly, or cannot."""
        group = join_process_group(world, read_precisions("fp32"))
        engine = object.__new__(FsdpEngine)
        mesh = init_device_mesh("cpu", (group.size,))
        sharding = Sharding(
            "--strategy fsdp", group.size, lambda net: fully_shard(net, mesh=mesh), engine._share
        )
        for name in [*timm.optim.list_optimizers(), "lookahead_radamlegacy"]:
            if name.startswith(("bnb", "fused", "kron", "adahessian")):
                continue
            config = read_config(training_parser(""), ["--opt", name])
            try:
                said = f"fused={try_optimizer(config, group.device, sharding).fused}"
            except MotleyError as error:
                said = str(error)
            if world.rank == 0:
                print(f"{name}: {said}", flush=True)
        leave_process_group()

    run(main)
