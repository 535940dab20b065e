"""What Slurm's queue says of runs."""
