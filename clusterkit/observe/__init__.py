"""What people look at: reports, the dashboard, alerts."""
