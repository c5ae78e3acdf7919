"""Training on one machine: replica, schedule, evaluation, and the single-process loop."""
