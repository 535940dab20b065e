"""Hosts and clusters: how they are named, where they are kept, which of them is the head node."""
