"""torch_dist/train_vit.py on a paced host, one of which may change; replan_lab.py starts it.

    ... ./entry_cn.sh benchmarks/paced_train.py --speeds 7:5:3:2:1 --slow 1:2:40:80 [OPTIONS]

--slow RANK:FACTOR:FROM:TO makes one rank FACTOR times slower from step FROM to step TO.
"""

import argparse
from typing import Any

import mixed  # noqa: F401 - finds the engines
from ddp_engine import DdpEngine
from paced import Pace, Paced

from motley import launch, planning
from motley.options import read_config, training_parser
from motley.train import train


def main() -> None:
    """Put a paced model and a schedule of its pace where training would have its own."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--speeds", type=lambda text: [float(word) for word in text.split(":")])
    parser.add_argument("--fastest-s", type=float)
    parser.add_argument("--slow", type=lambda text: [float(word) for word in text.split(":")])
    given, rest = parser.parse_known_args()
    config = read_config(training_parser(str(__doc__)), rest)

    def run(world: launch.World) -> None:
        pace = Pace(given.fastest_s * max(given.speeds) / given.speeds[world.rank])
        slow_rank, factor, first, end = given.slow

        class Changing(DdpEngine):
            """Changes the pace between two steps."""

            taken = 0

            def accumulate(self, batch: Any, n_global: int, last: bool) -> Any:
                """See motley.engine.Engine."""
                slow = world.rank == slow_rank and first <= self.taken < end
                pace.factor = factor if slow else 1.0
                self.taken += last
                return super().accumulate(batch, n_global, last)

        planning.Classifier = (  # type: ignore[assignment, misc]
            lambda net, images, size, _precision, _device: Paced(net, images, size, pace)
        )
        train(world, config, Changing)

    launch.run(run)


if __name__ == "__main__":
    main()
