"""Two networks and two losses in a loop of one's own: a GAN that learns a ring of points.

smolcluster serve cluster.yaml
SMOLCLUSTER_NAME=pi5 python gan.py cluster.yaml     # on each machine, with its name in cluster.yaml
"""

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import smolcluster


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def ring(num_points: int) -> TensorDataset:
    angle = torch.rand(num_points) * 2 * math.pi
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))


def judged(logits: Tensor, *, is_real: bool) -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        logits, torch.full_like(logits, float(is_real))
    )


def main(cluster_file: str) -> None:
    torch.manual_seed(0)
    data = ring(2000)
    gan = nn.ModuleDict({"draw": mlp(4, 2), "judge": mlp(2, 1)})
    optimizer = torch.optim.Adam(gan.parameters(), lr=1e-3, betas=(0.5, 0.999))
    with smolcluster.attach(gan, optimizer, cluster_file) as cluster:
        for (real,) in DataLoader(data, batch_sampler=cluster.sampler(data)):
            optimizer.zero_grad()
            fake = gan["draw"](torch.randn(len(real), 4))
            judge = gan["judge"].requires_grad_(requires_grad=False)
            judged(judge(fake), is_real=True).backward()  # the judge stays as it is
            judge.requires_grad_(requires_grad=True)
            both = judged(judge(real), is_real=True) + judged(judge(fake.detach()), is_real=False)
            both.backward()
            cluster.loss = both
            optimizer.step()
    with torch.no_grad():
        radius = gan["draw"](torch.randn(500, 4)).norm(dim=1).mean().item()
    sys.stdout.write(f"mean radius of what is drawn: {radius:.2f}\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cluster.yaml")
