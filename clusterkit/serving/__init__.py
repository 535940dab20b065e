"""Engine servers and judges of a run, seen from the operator."""
