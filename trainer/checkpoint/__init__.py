"""Recover checkpoints and Hugging Face exports."""
