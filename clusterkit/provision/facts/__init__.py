"""Facts about a host, read in one round trip."""
