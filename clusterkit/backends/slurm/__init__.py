"""A run as a Slurm batch job that starts Ray in its allocation; run directories lie on the shared file system."""
