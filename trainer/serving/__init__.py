"""The servers of a run: started, registered in its folder, found by the trainer, kept or ended."""
