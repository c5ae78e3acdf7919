"""What is wrong with which machine, and what mends it."""
