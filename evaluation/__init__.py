"""Scores of checkpoints. Runs on the node side."""
