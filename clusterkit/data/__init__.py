"""Models and data sets: fetched into the cache, or made from the user's files."""
