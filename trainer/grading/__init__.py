"""Whether an answer is right, and why: extraction, mathematical comparison in killable workers, QA metrics."""
