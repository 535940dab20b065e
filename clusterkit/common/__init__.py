"""What every room may use: records, texts, names, archives."""
