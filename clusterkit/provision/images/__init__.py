"""The runtime image: built or pulled once, pinned, and the same on every host."""
