"""Workers for `orchestrator_train.py`: one process for each GPU of this machine.

python guava_worker.py --gpu-ids 0,1 --master-ip 192.168.0.177 --master-port 29500 --world-size 2
"""

import argparse
import sys
from functools import partial

from tiny_toy_model import TinyToyModel

from smolcluster import DistributedConfig
from smolcluster.api.network_worker import run_workers
from smolcluster.errors import SmolclusterError


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu-ids", default="0", help="such as 0,1")
    parser.add_argument("--master-ip", default="127.0.0.1", help="where the orchestrator is")
    parser.add_argument("--master-port", type=int, default=29500)
    parser.add_argument("--world-size", type=int, default=1, help="workers of all machines")
    parser.add_argument("--batch-size", type=int, default=8, help="the orchestrator's counts")
    parser.add_argument("--vocab-size", type=int, default=101)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--n-layers", type=int, default=2)
    parser.add_argument("--n-heads", type=int, default=4)
    return parser.parse_args()


def main() -> int:
    args = parse()
    cfg = DistributedConfig.from_env(
        master_ip=args.master_ip,
        master_port=args.master_port,
        num_workers=args.world_size,
        batch_size=args.batch_size,
        vocab_size=args.vocab_size,
        d_model=args.d_model,
        n_layers=args.n_layers,
        n_heads=args.n_heads,
    )
    gpu_ids = [int(text) for text in args.gpu_ids.split(",")]
    print(f"workers for {cfg.master_ip}:{cfg.master_port}: GPUs {args.gpu_ids} of this machine")
    model_ctor = partial(TinyToyModel, cfg.vocab_size, cfg.d_model, cfg.n_layers, cfg.n_heads)
    return run_workers(gpu_ids, cfg, model_ctor)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SmolclusterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
