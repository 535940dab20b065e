"""Reports, the dashboard and alerts of runs."""
