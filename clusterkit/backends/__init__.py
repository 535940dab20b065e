"""Where a run lives: this machine, the Ray of a cluster, or Slurm."""
