"""Tell a webhook or a command what happens to a run: failures, stalls and the end, each once."""
