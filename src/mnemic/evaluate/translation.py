"""BLEU: translations found by beam search, compared with those in the corpus by sacrebleu (arXiv:1804.08771)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mnemic.data.pair_batches import PairBatches, TokenizedPairs
from mnemic.errors import UsageError
from mnemic.evaluate.config import EvaluateConfig
from mnemic.evaluate.evaluation import PairedText, Text
from mnemic.train.seq2seq import check_pairs, decoder_start, padding_token
from mnemic.train.terminal import progress_bar


def bleu(model: Any, tokenizer: Any, text: Text | PairedText, config: EvaluateConfig) -> dict[str, Any]:
    """The BLEU of the model's translations of the sources, and the signature that says how sacrebleu counts."""
    if not isinstance(text, PairedText):
        raise UsageError(
            f"bleu is of translations, which {type(model).__name__} does not make: give a sequence-to-sequence model"
        )
    measure = _sacrebleu()
    score = measure.corpus_score(translations(model, tokenizer, text.tokens, config), [text.references])
    return {"bleu": score.score, "bleu_signature": str(measure.get_signature())}


def translations(model: Any, tokenizer: Any, pairs: TokenizedPairs, config: EvaluateConfig) -> list[str]:
    """The likeliest translation of each source that beam search finds, as text, in the order of the pairs."""
    searching = {"num_beams": config.beams, "do_sample": False, "max_new_tokens": config.max_new_tokens}
    found = [""] * len(pairs)
    with progress_bar(len(pairs), "sentence") as bar:
        for numbers, written in written_for(model, tokenizer, pairs, config.batch_size, searching):
            words = tokenizer.batch_decode(written, skip_special_tokens=True)
            for number, text in zip(numbers, words, strict=True):
                found[number] = text.strip()
            bar.update(len(numbers))
    return found


def written_for(
    model: Any, tokenizer: Any, pairs: TokenizedPairs, batch_size: int, decoding: dict[str, Any]
) -> Iterator[tuple[list[int], Tensor]]:
    """The numbers of some pairs and the tokens that generate(), with these arguments, writes for their sources."""
    check_pairs(model, pairs)
    positions = getattr(model.config, "max_position_embeddings", None) or decoding["max_new_tokens"] + 1
    padding = padding_token(model, tokenizer)
    decoding = {
        **decoding,
        "max_new_tokens": min(decoding["max_new_tokens"], positions - 1),
        "decoder_start_token_id": decoder_start(model),
        "eos_token_id": pairs.end_token,
        "pad_token_id": padding,
    }
    device = next(model.parameters()).device
    for batch in PairBatches(pairs, batch_size, int(pairs.lengths.max()), shuffle=False, epochs=1):
        real = batch["pair"] >= 0
        sources, mask, numbers = (batch[name][real] for name in ("input_ids", "attention_mask", "pair"))
        sources = sources.masked_fill(mask == 0, padding)
        yield numbers.tolist(), model.generate(input_ids=sources.to(device), attention_mask=mask.to(device), **decoding)


def _sacrebleu() -> Any:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise UsageError("bleu needs the package sacrebleu: pip install 'mnemic[tasks]'") from None
    return BLEU()
