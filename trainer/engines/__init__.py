"""Engines behind one protocol: token ids in, token ids and log-probs out."""
