"""Rewards and metrics: text of a final answer plus gold answers in, numbers out."""
