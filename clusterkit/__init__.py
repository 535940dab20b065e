"""The operator side of clusterkit: what runs on a laptop. Imports nothing heavy."""
