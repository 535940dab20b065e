"""Reads what a run leaves behind: records of every number, told as one history."""
