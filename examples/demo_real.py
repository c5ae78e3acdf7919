"""Draws the machines of a hetero_config.json, their layers, devices and links; it trains nothing.

    python examples/demo_real.py --config hetero_config.json                     # architecture.png
    python examples/demo_real.py --format mmd --output architecture.mmd          # without Graphviz

`smolcluster diagram` does the same. `demo_llama8b4bit_distributed.py` trains, and draws it as it starts.
"""

import argparse
import sys
from pathlib import Path

from smolcluster.errors import SmolclusterError
from smolcluster.launch.diagram import drawn, of_hetero
from smolcluster.launch.hetero.file import read_hetero


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("hetero_config.json"), metavar="FILE")
    parser.add_argument("--format", default="png", choices=("png", "svg", "pdf", "mmd"))
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: architecture, and the format"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    target = args.output or Path(f"architecture.{args.format}")
    target.write_bytes(drawn(of_hetero(read_hetero(args.config), args.config.stem), args.format))
    print(f"drew {target}")


if __name__ == "__main__":
    try:
        main()
    except SmolclusterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
