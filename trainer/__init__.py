"""The node side of clusterkit: the reinforcement-learning loop for memory agents."""
