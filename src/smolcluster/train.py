"""`python src/smolcluster/train.py` is `smolcluster train`."""

import sys

from smolcluster.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
