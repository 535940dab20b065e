"""Training and evaluation files from question-answering sets, books and problems; see docs/memalpha.md."""
