"""Attention memory: keys and values of past tokens, found by kNN (Memorizing Transformers, arXiv 2203.08913)."""
