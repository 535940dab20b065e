"""Provisioning steps: each compares a host's facts with the desired state and returns actions."""
