"""What hosts without a network need, collected in one folder."""
