"""Train a segmentation model in a plain loop on all machines, with the exact mean IoU.

python examples/segmentation.py                                           # in one process
mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh examples/segmentation.py

``weight=`` is the number of pixels that have a label. For each pair of a label and a prediction,
``lab.reduce`` adds up the number of pixels over all machines, so the IoU is that of one machine.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset

import motley

CLASSES, NO_LABEL = 2, 255


class Squares(Dataset[tuple[Tensor, Tensor]]):
    """Noisy pictures of 32 x 32 pixels with a square, whose rim has no label."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        dice, places = torch.Generator().manual_seed(index), torch.arange(32)
        x, y = torch.randint(6, 26, (2,), generator=dice)
        distance = torch.maximum((places - x).abs()[None], (places - y).abs()[:, None])
        label = (distance < 3 + index % 4).long()
        picture = label + 0.8 * torch.randn(1, 32, 32, generator=dice)
        return picture, label.masked_fill(distance == 3 + index % 4, NO_LABEL)


lab, data = motley.join(), Squares()
torch.manual_seed(0)
layers = [nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()]
layers += [nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.GroupNorm(4, 16), nn.SiLU()]
model = nn.Sequential(*layers, nn.Conv2d(16, CLASSES, 1))  # logits of each pixel
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
lab.prepare(model, optimizer)
loader = lab.loader(DataLoader(Subset(data, range(60, 316)), batch_size=32, shuffle=True))
held_out = lab.loader(DataLoader(Subset(data, range(60)), batch_size=16), train=False)

for epoch in lab.epochs(3):
    for pictures, label in loader:
        label, logits = label.to(lab.device), model(pictures.to(lab.device))
        loss = cross_entropy(logits, label, ignore_index=NO_LABEL)
        lab.backward(loss, weight=(label != NO_LABEL).sum())
        optimizer.step()
        optimizer.zero_grad()
    pairs = torch.zeros(CLASSES * CLASSES)
    with torch.no_grad():
        for pictures, label in held_out:
            predicted, known = model(pictures.to(lab.device)).argmax(1).cpu(), label != NO_LABEL
            pairs += (label * CLASSES + predicted)[known].bincount(minlength=len(pairs))
    counts = torch.tensor(lab.reduce(pairs.tolist())).view(CLASSES, CLASSES)
    iou = counts.diag() / (counts.sum(0) + counts.sum(1) - counts.diag())
    lab.print(f"epoch {epoch}: mean IoU {iou.mean():.4f}")
