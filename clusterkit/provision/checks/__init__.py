"""Checks of hosts: verdicts on their facts, and the few probes that need several hosts at once."""
