"""Publishing weight versions to engines."""
