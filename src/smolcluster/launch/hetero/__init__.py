"""One file for a pipeline on unequal machines, and one command that is the same on each of them."""
