"""A task that adds two numbers, digit by digit.

mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh --task examples/my_task.py --digits 3
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from motley import Task


@dataclass
class Sums(Task):
    digits: int = 2  # an option: --digits
    width: int = 128

    def model(self):
        answers = 10 * (self.digits + 1)
        return nn.Sequential(
            nn.Linear(20 * self.digits, self.width), nn.GELU(), nn.Linear(self.width, answers)
        )

    def data(self, held_out):  # anything with len() and [index]
        return range(20_000, 21_000) if held_out else range(20_000)

    def sample(self, item, training):  # input of the model: tensors by name
        dice = torch.Generator().manual_seed(item)
        a, b = torch.randint(10**self.digits, (2,), generator=dice).tolist()
        numbers = [int(digit) for n in (a, b) for digit in str(n).zfill(self.digits)]
        answer = [int(digit) for digit in str(a + b).zfill(self.digits + 1)]
        x = functional.one_hot(torch.tensor(numbers), 10).flatten().float()
        return {"x": x, "y": torch.tensor(answer)}

    def losses(self, net, batch):  # [n]: the loss of each sample, a sum over its digits
        logits = net(batch["x"]).unflatten(1, (-1, 10)).transpose(1, 2)
        return functional.cross_entropy(logits, batch["y"], reduction="none").sum(dim=1)
