"""Memory tokens: trainable vectors in the input (Memory Transformer, arXiv 2006.11527)."""
