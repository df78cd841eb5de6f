"""Tokenizers: any of Hugging Face's, or one trained here on a corpus (byte-level BPE, words, bytes)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from mnemic.data.documents import Document
from mnemic.data.local import missing, present
from mnemic.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END, UNKNOWN, PADDING, MASK = "<eos>", "<unk>", "<pad>", "<mask>"
BPE_VOCABULARY = 16_384


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a local folder if there is one of that name, else from the hub."""
    from transformers import AutoTokenizer

    name = str(name_or_path)
    local = Path(name).expanduser()
    is_path = isinstance(name_or_path, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1
    is_local = present(local)
    if is_path and not is_local:
        raise missing(local)
    try:
        return AutoTokenizer.from_pretrained(local if is_local else name)
    except Exception as error:  # what the hub and the formats raise has no common base class
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        where = "the folder" if is_local else "the hub or its cache"
        raise UsageError(
            f"no tokenizer {name!r} could be loaded from {where} ({reason}): "
            f"give a folder written by save_pretrained, or the name of one on the hub"
        ) from error


def train_tokenizer(
    documents: Iterable[Document], kind: str = "bpe", vocab_size: int | None = None
) -> PreTrainedTokenizerFast:
    """Makes a tokenizer from documents; the same documents give the same tokenizer.

    "bpe": byte-level BPE of `vocab_size` tokens, decodes to exactly the text it encoded.
    "word": words between spaces, a line end is <eos>, rare words are <unk>, as in WikiText; ids by falling frequency.
        Lossy outside of text that is tokenised already. `vocab_size` keeps the most frequent words; default: all.
    "byte": one token a byte (its id is the byte), exact; nothing is trained and `documents` is not read.
    """
    if kind not in _KINDS:
        raise unknown_name("kind of tokenizer", kind, _KINDS)
    return _KINDS[kind](documents, vocab_size)


def _bpe(documents: Iterable[Document], vocab_size: int | None) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    vocab_size = BPE_VOCABULARY if vocab_size is None else vocab_size
    specials = [END, PADDING, MASK]
    if vocab_size < 256 + len(specials):
        raise UsageError(f"vocab_size = {vocab_size}: byte-level BPE needs at least {256 + len(specials)}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((document.text for document in documents), trainer)
    return _fast(backend, eos_token=END, pad_token=PADDING, mask_token=MASK)


def _byte(documents: Iterable[Document], vocab_size: int | None) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {BYTE_CHARACTERS[byte]: byte for byte in range(256)}
    vocabulary |= {END: 256, PADDING: 257, MASK: 258}
    if vocab_size not in (None, len(vocabulary)):
        raise UsageError(f"vocab_size = {vocab_size}: the byte tokenizer always has {len(vocabulary)}; leave it out")
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _fast(backend, eos_token=END, pad_token=PADDING, mask_token=MASK)


def _word(documents: Iterable[Document], vocab_size: int | None) -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    counts: Counter[str] = Counter()
    for document in documents:
        for line in document.text.split("\n"):
            counts.update(filter(None, line.split(" ")))
        counts[END] += document.text.count("\n")
    if not counts:
        raise UsageError("there are no documents to take words from: give a corpus with text")
    counts[UNKNOWN] += 0
    words = sorted(counts, key=lambda word: (-counts[word], word))
    if vocab_size is not None:
        if vocab_size < 3:
            raise UsageError(
                f"vocab_size = {vocab_size}: a word tokenizer needs {END}, {UNKNOWN} and at least one word"
            )
        others = [word for word in words if word not in (END, UNKNOWN)][: vocab_size - 2]
        kept = {END, UNKNOWN, *others}
        words = [word for word in words if word in kept]
    backend = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=UNKNOWN))
    backend.normalizer = normalizers.Replace("\n", f" {END} ")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    # WikiText's own spacing: a space before each word and each line end.
    spaced, line_ends = decoders.Replace(Regex("^"), " "), decoders.Replace(END, "\n")
    backend.decoder = decoders.Sequence([spaced, line_ends, decoders.Fuse()])
    return _fast(backend, eos_token=END, unk_token=UNKNOWN, pad_token=END)


_KINDS: dict[str, Callable[[Iterable[Document], int | None], Any]] = {"bpe": _bpe, "word": _word, "byte": _byte}


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers (the convention of GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()


def _fast(backend: Tokenizer, **specials: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **specials)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A checksum of everything that decides which ids a text gets; the same after saving and loading."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        for passing in ("padding", "truncation"):  # set anew by each call
            state.pop(passing, None)
    else:
        state = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    ends = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    state["ends"] = [getattr(tokenizer, end) for end in ends]
    return xxhash.xxh3_128_hexdigest(json.dumps(state, sort_keys=True).encode())
