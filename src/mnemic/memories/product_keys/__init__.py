"""Product keys: a very large table of trainable slots in the feed-forward layers (arXiv 1907.05242, 2010.03881)."""
