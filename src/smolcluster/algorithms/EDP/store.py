"""A store of EDP: a slice of the weights with its optimizer, on a machine that need not be the server's.

What it does: `server/stepping_slice.py`. Which machines have one: `servers` in the cluster file.
By hand: `uv run store.py win`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("edp", "store"))

from smolcluster.server.stepping_slice import SteppingSlice as Held

__all__ = ["Held"]
