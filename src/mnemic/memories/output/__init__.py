"""Output memory: contexts and the tokens that followed them, at the softmax (TRIME, arXiv 2205.12674)."""
