"""The provisioning engine: hosts in parallel, steps as desired state, one log a host, one summary."""
