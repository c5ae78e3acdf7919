"""Writes hetero_config.json: which machines a pipeline has, and which layers are whose.

    python examples/init_config.py                                               # asks, on a terminal
    python examples/init_config.py --server 192.168.1.10 --worker 192.168.1.20 --layers 32

It is `smolcluster init --hetero`, whose flags it takes: `--help` lists them.
"""

import sys

from smolcluster.cli import main

if __name__ == "__main__":
    sys.exit(main(["init", "--hetero", *sys.argv[1:]]))
