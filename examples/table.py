"""Predict one column of a CSV file from the others, in a plain loop on all machines.

python examples/table.py [FILE.csv]                                       # in one process
mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh examples/table.py [FILE.csv]

The model predicts the last column. Without a file, the script generates a table.
"""

import csv
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import motley


def read_table(path: Path) -> Tensor:
    """Return the rows of a CSV file with a header, as numbers."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return torch.tensor([[float(value) for value in row] for row in rows])


def make_table(rows: int) -> Tensor:
    """Return a table whose last column depends on the others."""
    columns = torch.randn(rows, 5, generator=torch.Generator().manual_seed(1))
    last = columns[:, 0] * columns[:, 1] + columns[:, 2].sin() - columns[:, 3]
    return torch.cat([columns, last[:, None]], 1)


lab = motley.join()
torch.manual_seed(0)
table = read_table(Path(sys.argv[1])) if len(sys.argv) > 1 else make_table(1000)
table = (table - table.mean(0)) / table.std(0)
data = TensorDataset(table[:, :-1], table[:, -1:])
train_rows, held_out_rows = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(table.shape[1] - 1, 64), nn.SiLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
lab.prepare(model, optimizer, schedule)
train = lab.loader(DataLoader(train_rows, batch_size=64, shuffle=True))
held_out = lab.loader(DataLoader(held_out_rows, batch_size=64), train=False)

for epoch in lab.epochs(6):
    for inputs, target in train:
        loss = nn.functional.mse_loss(model(inputs.to(lab.device)), target.to(lab.device))
        lab.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    errors = count = 0.0
    with torch.no_grad():
        for inputs, target in held_out:
            errors += float((model(inputs.to(lab.device)) - target.to(lab.device)).square().sum())
            count += len(target)
    errors, count = lab.reduce((errors, count))
    lab.print(f"epoch {epoch}: explained variance {1 - errors / count:.3f}")
