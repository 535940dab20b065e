"""Evaluations on the operator side: what to evaluate, the process that does it, and pages of its results."""
