"""A store of DiLoCo: a slice of the weights with the outer optimizer, on a machine of its own or a worker's.

What it does: `outer_slice.py`. Which machines have one: `servers` in the cluster file.
By hand: `uv run store.py win`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("diloco", "store"))

from smolcluster.algorithms.DiLoCo.outer_slice import OuterSlice as Held

__all__ = ["Held"]
