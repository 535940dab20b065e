"""Verdicts on hosts: pure judgements of facts, and the few probes that need several hosts at once."""
