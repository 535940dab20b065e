"""Runs as processes of this machine."""
