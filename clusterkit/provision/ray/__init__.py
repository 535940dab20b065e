"""Ray in containers: what runs on each host, starting it in order, asking whether it is ready, taking it away."""
