"""Alerts about failures, stalls and the end of a run to a webhook or a command, each once."""
