"""The state of runs in Slurm's queue."""
