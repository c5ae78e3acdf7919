"""Trains a small GPT on eight ranks of this machine, each layer on 2 of them, the layers in 4 stages.

    python examples/tuning_demo/train_simple.py                       # starts all ranks by itself
    python examples/tuning_demo/train_simple.py --batch-size 16 --seq-len 64
    python examples/tuning_demo/train_simple.py --instruction-log /tmp/trace
    smolcluster mesh trace /tmp/trace --svg step.svg                  # what each rank computed when

Flags are those of `python -m smolcluster.distributed_training`, and win: `--world-size 4 --pp 2`, say.
"""

import sys

from smolcluster.distributed_training import main

MESH = ("--world-size", "8", "--tp", "2", "--pp", "4", "--schedule", "1f1b", "--microbatches", "8")

if __name__ == "__main__":
    sys.exit(main([*MESH, *sys.argv[1:]]))
