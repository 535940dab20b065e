"""The rollout controller."""
