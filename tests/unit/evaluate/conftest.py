"""The same tiny models as in training."""

from tests.unit.train.conftest import corpus, make_model, one_thread, tokenizer

__all__ = ["corpus", "make_model", "one_thread", "tokenizer"]
