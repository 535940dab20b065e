"""Who answers questions from a memory and judges what was written into it: a frozen model, or a few rules."""
