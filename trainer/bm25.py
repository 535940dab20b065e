"""The library bm25s, imported so that it leaves the GPUs alone."""

import os

# bm25s sorts with JAX where that is installed, and tries it when it is imported: JAX then takes three quarters of a
# GPU's memory, which servers and ranks need.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bm25s

__all__ = ["bm25s"]
