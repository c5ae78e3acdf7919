"""What is done with a run: its checkpoints, its model, its trace. Only `cli/` imports it."""
