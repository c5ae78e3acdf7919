"""A store of SyncPS: adds up the gradients of its buckets, on a machine that need not be the server's.

What it does: `reducing_slice.py`. Which machines have one: `servers` in the cluster file.
By hand: `uv run store.py win`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("syncps", "store"))

from smolcluster.algorithms.SynchronousPS.reducing_slice import ReducingSlice as Held

__all__ = ["Held"]
