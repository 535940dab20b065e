"""A resolved configuration onto a cluster: code and configuration to the shared storage, a job to its Ray."""
