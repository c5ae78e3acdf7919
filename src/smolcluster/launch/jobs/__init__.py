"""Groups that a scheduler starts: Slurm, Kubernetes."""
