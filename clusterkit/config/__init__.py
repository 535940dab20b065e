"""Presets, overrides and what they resolve to."""
