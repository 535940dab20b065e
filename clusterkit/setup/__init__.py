"""The engine of `clusterkit setup`: hosts in parallel, steps and stages, one log a host, one summary."""
