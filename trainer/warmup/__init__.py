"""Supervised warm-up of a model that starts from nothing."""
