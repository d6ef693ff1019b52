"""Trains with DeepSpeed, and says how much of the model each rank has held while it was built.

    mpirun -np 2 ./entry_cn.sh tests/support/drivers/built.py --stage 3 --task text --build blocks

It prints "rank R held at most B bytes of parameters" in the end.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from motley.engines.strategies import ZERO, known_strategies, list_engines
from motley.launch.world import World, run
from motley.tasks.model import TaskModel
from motley.train.command_line import read_config, training_parser
from motley.train.start import train


def held(net: nn.Module) -> Iterator[Tensor]:
    """What there is in memory of its parameters: whole ones, and parts."""
    for parameter in net.parameters():
        yield from (parameter.data, getattr(parameter, "ds_tensor", None))


class Watched(TaskModel):
    """Looks whenever some parameters have got their numbers: then they are whole, and most is
    there."""

    most = 0

    def fill(self, *parts: nn.Module) -> None:
        """See TaskModel."""
        super().fill(*parts)
        found = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in held(self.net) if tensor is not None and not tensor.is_meta
        }  # fmt: skip
        self.most = max(self.most, sum(found.values()))


if __name__ == "__main__":
    strategies = known_strategies(ZERO)
    config = read_config(training_parser(str(__doc__), strategies))
    models: list[Watched] = []

    def make(*given: object) -> TaskModel:
        """The model that this rank trains."""
        models.append(Watched(*given))  # type: ignore[arg-type]
        return models[-1]

    def main(world: World) -> None:
        """Train, then tell."""
        train(world, config, list_engines(config, strategies), make)
        said = f"rank {world.rank} held at most {models[-1].most} bytes of parameters"
        print(said, flush=True)

    run(main)
