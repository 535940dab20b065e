"""Models and data sets: fetched, read, and made from the user's own files."""
