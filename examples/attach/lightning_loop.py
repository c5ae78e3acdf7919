"""Lightning in a cluster: a module unchanged, and one callback more.

smolcluster serve cluster.yaml
SMOLCLUSTER_NAME=pi5 python lightning_loop.py cluster.yaml   # on each machine, with its name there
"""

import sys
import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from smolcluster.api.callbacks import lightning_callback


class Line(lightning.LightningModule):
    """Learns a line."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], _number: int) -> Tensor:
        inputs, targets = batch
        return functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch: list[Tensor], _number: int) -> None:
        inputs, targets = batch
        self.log("val_loss", functional.mse_loss(self.net(inputs), targets))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def main(cluster_file: str, folder: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(320, 3)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[lightning_callback(cluster_file)],
    )
    trainer.fit(Line(), loader, DataLoader(data, batch_size=64))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else "cluster.yaml", folder)
