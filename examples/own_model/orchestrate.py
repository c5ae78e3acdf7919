"""The same model, said in Python: one process owns it and its data, the others compute.

python orchestrate.py --workers 2     # first
python orchestrate.py worker          # as often as there are workers, here or with --master-ip elsewhere
"""

import argparse
import sys

import torch
from torch.utils.data import DataLoader
from train import Reader, accuracy, loss, samples

from smolcluster import DistributedConfig, NetworkWorker, Orchestrator
from smolcluster.errors import SmolclusterError

WIDTH = 64


def make_model() -> Reader:
    torch.manual_seed(0)  # the frozen weights are the same on all machines
    return Reader(WIDTH)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "role", choices=("orchestrator", "worker"), nargs="?", default="orchestrator"
    )
    parser.add_argument("--master-ip", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29500)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--gpu-id", type=int, default=0, help="another one for each worker of a host"
    )
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args(arguments)
    config = DistributedConfig(
        master_ip=args.master_ip, master_port=args.master_port, num_workers=args.workers
    )
    if args.role == "worker":
        NetworkWorker(
            gpu_id=args.gpu_id,
            config=config,
            model_ctor=make_model,
            loss=loss,
            threads=1,
        ).connect_and_train()
        return
    data = samples()
    orchestrator = Orchestrator(config)
    orchestrator.register_model(make_model(), loss=loss, metrics={"accuracy": accuracy})
    orchestrator.start_training(
        train_loader=DataLoader(data[:1500], batch_size=32, shuffle=True),  # type: ignore[arg-type]
        val_loader=DataLoader(data[1500:], batch_size=64),  # type: ignore[arg-type]
        num_epochs=args.epochs,
    )


if __name__ == "__main__":
    try:
        main()
    except SmolclusterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
