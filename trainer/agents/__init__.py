"""Agents: a task and an engine make a trajectory."""
