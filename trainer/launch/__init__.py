"""Starting the trainer's ranks."""
