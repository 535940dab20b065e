"""Ray in containers: plan and start nodes, wait until they are ready, look at them, remove them."""
