"""A stage of a worker that is a pipeline: some of the layers, on a machine of its own or the worker's.

What it does: `PipelineParallel/worker.py`; the worker: `PipelineParallel/head.py`. Which machines have one:
`stages` of a node in the cluster file.
By hand: `uv run stage.py pi5`.
"""

if __name__ == "__main__":  # before the imports that take seconds: see entry.py
    from smolcluster.algorithms.entry import main

    raise SystemExit(main("diloco", "stage"))
