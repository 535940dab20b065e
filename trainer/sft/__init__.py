"""Supervised fine-tuning on examples with answers."""
