"""Train a LightningModule on all machines. Only the strategy is new.

python examples/lightning_module.py                                       # in one process
mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh examples/lightning_module.py

Needs: pip install lightning. The batch size of a loader is that of the global batch.
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import motley
from motley.library.integrations.lightning import MotleyStrategy


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        points, labels = batch
        loss = nn.functional.cross_entropy(self.layers(points), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        points, labels = batch
        right = (self.layers(points).argmax(1) == labels).float().mean()
        self.log("accuracy", right)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    return TensorDataset(
        torch.randn(count, 20, generator=generator) + nn.functional.one_hot(labels, 20) * 2, labels
    )


lab = motley.join()
torch.manual_seed(0)
module = Classifier()
trainer = lightning.Trainer(
    strategy=MotleyStrategy(), devices=1, max_epochs=3, gradient_clip_val=1.0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
train = DataLoader(make_points(600, 1), batch_size=48, shuffle=True)
trainer.fit(module, train, DataLoader(make_points(150, 2), batch_size=48))
lab.print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")
