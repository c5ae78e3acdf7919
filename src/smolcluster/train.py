"""`python src/smolcluster/train.py` is `smolcluster train`, with the GPT of `gpt_config.yaml` unless told."""

import sys

from smolcluster.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--default-config", "gpt", *sys.argv[1:]]))
