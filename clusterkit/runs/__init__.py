"""What a run's folder holds, read: status, logs, traces, diagnoses."""
