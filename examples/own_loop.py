"""Train a model in a plain PyTorch loop on all machines. Only the lines with ``lab`` are new.

python examples/own_loop.py                                               # in one process
mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh examples/own_loop.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import motley


def make_waves(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    waves = torch.sin((labels[:, None] + 1) * torch.linspace(0, 6.28, 64))
    return TensorDataset(waves + torch.randn(count, 64, generator=generator), labels)


lab = motley.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
model, optimizer = lab.prepare(model, optimizer)
train = lab.loader(DataLoader(make_waves(2000, 1), batch_size=128, shuffle=True))
held_out = make_waves(500, 2)
criterion = nn.CrossEntropyLoss()

for epoch in range(3):
    for waves, labels in train:
        loss = criterion(model(waves.to(lab.device)), labels.to(lab.device))
        lab.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        waves, labels = held_out.tensors
        right = (model(waves.to(lab.device)).argmax(1).cpu() == labels).float().mean()
    lab.print(f"epoch {epoch}: accuracy {right:.3f}")
