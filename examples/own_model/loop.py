"""The same model in a loop of one's own, which `attach` makes one of a cluster's workers.

smolcluster launch edp --local --script loop.py       # or syncps, or diloco: the same loop
"""

import sys

import torch
from torch.utils.data import DataLoader
from train import Reader, accuracy, loss, samples

import smolcluster

WIDTH = 64


def main(cluster_file: str) -> None:
    torch.manual_seed(0)  # the frozen weights are the same on all machines
    data, model = samples(), Reader(WIDTH)
    train, held_out = data[:1500], torch.utils.data.default_collate(data[1500:])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with smolcluster.attach(model, optimizer, cluster_file) as cluster:
        for batch in DataLoader(train, batch_sampler=cluster.sampler(train)):  # type: ignore[arg-type]
            optimizer.zero_grad()
            cluster.loss = loss(model, batch)
            cluster.loss.backward()
            optimizer.step()
    hits, number = accuracy(model.eval(), held_out)
    sys.stdout.write(f"accuracy {hits / number:.3f}\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cluster.yaml")
