"""Train a small diffusion model with an Accelerate loop like those in diffusers' scripts.

python examples/diffusion.py                                              # in one process
mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh examples/diffusion.py

Needs: pip install accelerate. Only the lines with ``lab`` are new. The data set draws noise and
time step in ``__getitem__``, so that they do not depend on the rank that computes the row.
"""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import motley

STEPS = 100


class Discs(Dataset[tuple[Tensor, Tensor, Tensor]]):
    def __len__(self) -> int:
        return 192

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        radii = torch.linspace(-1, 1, 16).square() + torch.linspace(-1, 1, 16).square()[:, None]
        picture = (radii[None] < 0.05 + 0.03 * (index % 24)).float() * 2 - 1
        return picture, torch.randn_like(picture), torch.randint(STEPS, ())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(2, 16, 3, padding=1), nn.Conv2d(32, 1, 3, padding=1)
        inner = nn.GroupNorm(4, 16), nn.SiLU(), nn.ConvTranspose2d(16, 16, 2, 2)
        self.middle = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), *inner)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        times = (time / STEPS).view(-1, 1, 1, 1).expand_as(noisy)
        first = functional.silu(self.down(torch.cat([noisy, times], 1)))
        return self.up(torch.cat([first, self.middle(first)], 1))


lab = motley.join()
accelerator = lab.accelerate(Accelerator(gradient_accumulation_steps=2))
model, loader = UNet(), DataLoader(Discs(), batch_size=16, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
kept = torch.cos(torch.arange(STEPS, device=accelerator.device) / STEPS * 1.5)

for epoch in range(3):
    for pictures, noise, time in loader:
        with accelerator.accumulate(model):
            part = kept[time].view(-1, 1, 1, 1)
            noisy = part * pictures + (1 - part**2).sqrt() * noise
            loss = functional.mse_loss(model(noisy, time), noise)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    lab.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean'):.3f}")
