"""One verified, multiplexed SSH connection per host."""
