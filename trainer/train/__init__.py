"""Packing, log-probs and the optimizer step."""
