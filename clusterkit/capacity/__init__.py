"""The arithmetic of a run before any GPU is touched: GPUs, tokens, memory, disk, hours; and a preset on fewer hosts."""
