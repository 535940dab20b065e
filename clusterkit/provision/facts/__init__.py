"""What a host is like, read in one round trip."""
