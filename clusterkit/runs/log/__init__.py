"""Reads what a run leaves behind, as one history: records of every number, or the lines of a log (reader.read_log)."""
