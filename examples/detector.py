"""Train an object detector in a plain loop on all machines; rows differ in their number of boxes.

python examples/detector.py                                               # in one process
mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh examples/detector.py

The loss is a mean over boxes. ``weight=`` is the number of boxes, so every box of the global batch
has the same weight, whichever machine computes it.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as judge
from torch.utils.data import DataLoader, Dataset

import motley

Row = tuple[Tensor, Tensor]  # a picture, and boxes of (x, y, size) in cells of a 4 x 4 grid


class Squares(Dataset[Row]):
    """Pictures of 32 x 32 pixels with one to four bright squares."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Row:
        picture, boxes = torch.randn(1, 32, 32) * 0.1, []
        for cell in torch.randperm(16)[: 1 + index % 4].tolist():
            x, y, size = cell % 4, cell // 4, int(torch.randint(3, 8, ()))
            picture[0, 8 * y : 8 * y + size, 8 * x : 8 * x + size] += 1.0
            boxes.append((x, y, size / 8))
        return picture, torch.tensor(boxes)


def collate(rows: list[Row]) -> tuple[Tensor, list[Tensor]]:
    return torch.stack([picture for picture, _ in rows]), [boxes for _, boxes in rows]


lab = motley.join()
torch.manual_seed(0)
layers = nn.Conv2d(1, 32, 4, 4), nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 2, 2, 2)
model = nn.Sequential(*layers)  # for each cell: the logit of a square, and its size
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
lab.prepare(model, optimizer)
loader = lab.loader(DataLoader(Squares(), batch_size=32, shuffle=True, collate_fn=collate))

for epoch in lab.epochs(4):
    for pictures, boxes in loader:
        output = model(pictures.to(lab.device))
        present, sizes = torch.zeros(2, len(pictures), 4, 4, device=lab.device)
        for row, each in enumerate(boxes):
            x, y = each[:, 0].long(), each[:, 1].long()
            present[row, y, x], sizes[row, y, x] = 1.0, each[:, 2].to(lab.device)
        cells = judge(output[:, 0], present, reduction="sum")
        errors, count = ((output[:, 1] - sizes).abs() * present).sum(), present.sum()
        lab.backward((cells + errors) / count, weight=count)
        optimizer.step()
        optimizer.zero_grad()
    lab.print(f"epoch {epoch}: loss per box {lab.loss:.3f}")
