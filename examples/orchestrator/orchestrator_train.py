r"""The orchestrator: owns TinyToyModel and its data, and trains it on workers that connect.

python orchestrator_train.py --master-ip 0.0.0.0 --master-port 29500 --gpus 2 --train-batches 100 \
    --val-interval 20
"""

import argparse
import sys

import torch
from tiny_toy_model import TinyToyModel, toy_loader

from smolcluster import DistributedConfig, Orchestrator
from smolcluster.errors import SmolclusterError


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--master-ip", default="0.0.0.0", help="address to listen on")  # noqa: S104
    parser.add_argument("--master-port", type=int, default=29500)
    parser.add_argument("--gpus", type=int, default=1, help="workers to wait for, in total")
    parser.add_argument("--train-batches", type=int, default=100, help="batches an epoch")
    parser.add_argument("--val-interval", type=int, default=20, help="steps; 0: no validation")
    parser.add_argument("--worker-timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=101)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--n-layers", type=int, default=2)
    parser.add_argument("--n-heads", type=int, default=4)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    return parser.parse_args()


def main() -> None:
    args = parse()
    cfg = DistributedConfig.from_env()
    cfg.master_ip = args.master_ip
    cfg.master_port = args.master_port
    cfg.num_workers = args.gpus
    cfg.batch_size = args.batch_size
    cfg.vocab_size = args.vocab_size
    cfg.d_model = args.d_model
    cfg.n_layers = args.n_layers
    cfg.n_heads = args.n_heads
    cfg.data_parallel = True
    cfg.checkpoint_dir = args.checkpoint_dir
    print(f"orchestrator on {cfg.master_ip}:{cfg.master_port}, waits for {cfg.num_workers} workers")
    step = cfg.batch_size * (1 if cfg.spreads_layers else cfg.num_workers)
    print(f"batch size {cfg.batch_size}, {step} samples a step")

    torch.manual_seed(cfg.seed)
    orch = Orchestrator(cfg)
    orch.register_model(
        TinyToyModel(
            vocab_size=cfg.vocab_size,
            d_model=cfg.d_model,
            n_layers=cfg.n_layers,
            n_heads=cfg.n_heads,
        )
    )
    here = orch.wait_for_workers(timeout=args.worker_timeout)
    print(f"{here} workers are here: training begins")
    num_held_out = max(1, args.train_batches // 10)
    orch.start_training(
        train_loader=toy_loader(args.train_batches, cfg.batch_size, cfg.vocab_size, seed=1),
        val_loader=toy_loader(num_held_out, cfg.batch_size, cfg.vocab_size, seed=2)
        if args.val_interval
        else None,
        num_epochs=args.epochs,
        val_interval=args.val_interval,
    )
    print(f"saved {orch.save_checkpoint(f'{cfg.checkpoint_dir}/orchestrator_final.pt')}")


if __name__ == "__main__":
    try:
        main()
    except SmolclusterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
