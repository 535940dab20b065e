"""The history of a run, from metrics.jsonl (metrics.read_history) or from a log (reader.read_log)."""
