"""Train a generator and a discriminator in a plain loop, with two optimizers, on all machines.

python examples/gan.py                                                    # in one process
mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh examples/gan.py

The data set draws the latent vector of each row, so that the vector does not depend on the machine
that computes the row. Each ``step()`` adds up the gradients of its optimizer over all machines.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as judge
from torch.utils.data import DataLoader, Dataset

import motley


class Ring(Dataset[tuple[Tensor, Tensor]]):
    """Points on a circle, each with a latent vector."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        angle = torch.rand(()) * 6.2832
        point = torch.stack([angle.cos(), angle.sin()]) + 0.02 * torch.randn(2)
        return point, torch.randn(4)


lab = motley.join()
torch.manual_seed(0)
generator = nn.Sequential(
    nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
)
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
make = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
check = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
lab.prepare(generator, critic, make, check)
loader = lab.loader(DataLoader(Ring(), batch_size=64, shuffle=True))

for epoch in lab.epochs(5):
    for points, latents in loader:
        points, latents = points.to(lab.device), latents.to(lab.device)
        false = generator(latents)

        check.zero_grad()
        real, made = critic(points), critic(false.detach())
        lab.backward(judge(real, torch.ones_like(real)) + judge(made, torch.zeros_like(made)))
        check.step()

        make.zero_grad()
        critic.requires_grad_(False)  # the critic's gradient is not needed in this step
        made = critic(false)
        lab.backward(judge(made, torch.ones_like(made)))
        critic.requires_grad_(True)
        make.step()
    with torch.no_grad():
        radius = generator(torch.randn(256, 4, device=lab.device)).norm(dim=1)
    lab.print(f"epoch {epoch}: radius of generated points {radius.mean():.2f}, wanted 1.00")
