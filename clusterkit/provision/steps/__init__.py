"""Provisioning as desired state: each step compares a host's facts with the wish and says what has to be done."""
