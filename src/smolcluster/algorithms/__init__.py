"""The distributed algorithms, and what their processes have in common."""
