"""Which slots a text reads, which are chosen to learn it, and which are pruned: against a recount by hand."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

import mnemic
from mnemic.analysis.pruning import chosen
from mnemic.analysis.slots import tf_idf, token_ids
from mnemic.data import Corpus, Document, train_tokenizer
from mnemic.errors import UsageError
from mnemic.memories.product_keys.layer import ProductKeyLayer

TOKENIZER = train_tokenizer([], "byte")
KEYS = {"layers": [0, 1], "slots": 64, "heads": 2, "k": 4, "key_dim": 8}
NEW = "Mnemosyne, MNEMOSYNE: a titan of memory"
OLD = [Document(str(n), f"return self.value[{n}] + {n} " * 3) for n in range(6)]
CORPUS = Corpus("old", {"train": lambda: OLD, "valid": lambda: [Document("v", "x = y[3] * len(z)")]})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": len(TOKENIZER)}
    if kind == "gpt2":
        shape = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 256, "eos_token_id": 256}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model: Any = GPT2LMHeadModel(GPT2Config(**size, **shape, **still))
    else:
        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        made = {"masked": BertForMaskedLM, "classifier": BertForSequenceClassification}[kind]
        model = made(BertConfig(max_position_embeddings=64, pad_token_id=257, **shape, **size))
    return mnemic.augment(model, mnemic.ProductKeys(**KEYS | settings)).eval()


class Recount:
    """Every read of every call, in the order of the layers: lists of slots and weights of each token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[list, list]] = []
        find = ProductKeyLayer.find

        def kept(layer: ProductKeyLayer, x: torch.Tensor) -> Any:
            slots, weights = find(layer, x)
            self.calls.append((slots.flatten(1).tolist(), weights.flatten(1).tolist()))
            return slots, weights

        monkeypatch.setattr(ProductKeyLayer, "find", kept)

    def layer(self, number: int) -> tuple[list, list]:
        """What two layers that take turns read, all batches together."""
        slots, weights = zip(*self.calls[number::2], strict=True)
        return [row for part in slots for row in part], [row for part in weights for row in part]


def expected_rows(recount: Recount, tokens: list[int]) -> dict[tuple[int, int], tuple[int, float, Counter]]:
    found: dict = defaultdict(lambda: [0, 0.0, Counter()])
    for number in (0, 1):
        slots, weights = recount.layer(number)
        assert len(slots) == len(tokens)
        for token, row, shares in zip(tokens, slots, weights, strict=True):
            for slot, weight in zip(row, shares, strict=True):
                one = found[number, slot]
                one[0], one[1] = one[0] + 1, one[1] + weight
                one[2][token] += 1
    return found


@pytest.mark.parametrize("kind", ["gpt2", "masked", "classifier"])
def test_slots_of_a_text_are_those_of_a_recount(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = model_of(kind), "abcab abcab! zabz"
    with monkeypatch.context() as patch:
        recount = Recount(patch)
        with torch.no_grad():
            tokens = [256, *text.encode()]
            model(input_ids=torch.tensor([tokens]))
    expected = expected_rows(recount, tokens)
    found = mnemic.find_slots(model, TOKENIZER, text, most=12)
    heaviest = sorted(expected, key=lambda key: -expected[key][1])[:12]
    assert [(slot.layer, slot.slot) for slot in found] == heaviest
    for slot in found:
        reads, weight, counts = expected[slot.layer, slot.slot]
        assert slot.reads == reads
        assert slot.weight == pytest.approx(weight, rel=1e-5)
        best = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:5]
        assert slot.tokens == [(TOKENIZER.decode([token]), times) for token, times in best]
    assert not model.memory.product_keys._counting


@pytest.mark.parametrize("kind", ["gpt2", "masked"])
def test_windows_and_padding_change_no_token(kind: str) -> None:
    """With the keys of one token each, a slot belongs to its token wherever that stands."""
    model = model_of(kind, layers=[0], k=1, heads=1)
    with (
        torch.no_grad()
    ):  # the query is what the feed-forward gets, and that the token alone: no attention, no position
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("attn.c_proj", "wpe", "attention.output.dense", "position_embeddings")):
                parameter.zero_()
    corpus = Corpus("two", {"train": lambda: [Document("a", "aaab" * 5), Document("b", "ab" * 3)]})
    found = mnemic.find_slots(model, TOKENIZER, corpus, window=7, batch_size=3)
    tokens = Counter()
    for slot in found:
        tokens.update(dict(slot.tokens))
    assert tokens == {"a": 18, "b": 8, "<eos>": 2}
    assert sum(slot.reads for slot in found) == 28


def test_tokens_of_another_memory_are_named_as_such() -> None:
    model = mnemic.augment(model_of("gpt2", layers=[1]), mnemic.MemoryTokens(count=3)).eval()
    documents = [Document("a", "some text"), Document("b", "and a longer text")]
    found = mnemic.find_slots(model, TOKENIZER, Corpus("two", {"train": lambda: documents}), most=64)
    seen: Counter = Counter()
    for slot in found:
        if slot.reads == sum(times for _, times in slot.tokens):  # nothing is left out of the five that are shown
            seen.update(dict(slot.tokens))
    assert seen["[mem]"] > 0
    assert {text for slot in found for text, _ in slot.tokens} <= {"[mem]", "<eos>", *"some text and a longer text"}
    assert sum(slot.reads for slot in found) == (2 * 3 + 2 + 9 + 17) * 8


def test_what_another_memory_puts_before_a_row_has_no_token() -> None:
    ids, mask = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": mask}
    assert token_ids(batch, 4).tolist() == [5, 6, 7, 8]
    assert token_ids(batch, 8).tolist() == [-1, -1, 5, 6, 7, -1, -1, 8]
    assert token_ids(batch, 7).tolist() == [-1] * 7  # nobody knows which is which


# Chosen to learn


def test_tf_idf_by_hand() -> None:
    scores = tf_idf(torch.tensor([6, 3, 1, 0]), torch.tensor([3, 1, 0, 0]), count=3)
    expected = [0.0, 0.3 * math.log(4 / 2), 0.1 * math.log(4 / 1), 0.0]
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("shared", [False, True], ids=["own-tables", "shared-table"])
def test_slots_that_only_the_new_text_reads_are_chosen(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt2", shared=shared, slots=256)
    with monkeypatch.context() as patch:
        recount = Recount(patch)
        found = mnemic.choose_slots(model, TOKENIZER, NEW, CORPUS, most=9, window=16, batch_size=2)
    rows = math.ceil((1 + len(NEW)) / 16)  # windows of the new text, two in a batch
    new, old = 2 * math.ceil(rows / 2), len(recount.calls)
    for number in (0, 1):
        members = (0, 1) if shared else (number,)
        reads: Counter = Counter()
        batches: Counter = Counter()
        for first in range(0, old, 2):
            here = [slot for m in members for row in recount.calls[first + m][0] for slot in row]
            if first < new:
                reads.update(here)
            else:
                batches.update(set(here))
        count, total = (old - new) // 2, sum(reads.values())
        score = {slot: reads[slot] / total * math.log((count + 1) / (batches[slot] + 1)) for slot in reads}
        expected = sorted((slot for slot in score if score[slot] > 0), key=lambda slot: (-score[slot], slot))[:9]
        assert found[number] == expected
        assert len(expected) == 9


def test_slots_that_were_pruned_are_not_chosen() -> None:
    model, how = model_of("gpt2", layers=[1], slots=256), {"most": 256, "batch_size": 2}
    first, *others = mnemic.choose_slots(model, TOKENIZER, NEW, CORPUS, **how)[1]
    model.memory.product_keys.keep_only({1: [slot for slot in range(256) if slot != first]})
    assert mnemic.choose_slots(model, TOKENIZER, NEW, CORPUS, **how)[1] == others
    assert others


def test_a_new_text_is_learned_by_the_slots_chosen_for_it(tmp_path: Path) -> None:
    """And not at all by slots that it does not read."""
    lesson = Corpus("new", {"train": lambda: [Document("new", NEW)]})

    def loss(model: Any) -> float:
        found = mnemic.evaluate(model, TOKENIZER, lesson, split="train", window=64)
        return found["nll"] / found["tokens"]

    def after(learn: Any) -> float:
        model = model_of("gpt2", slots=256)
        model.memory.product_keys.learn_only(learn(model))
        how = {"steps": 20, "batch_size": 1, "segment_length": 64, "warmup": 1, "learning_rate": 0.02}
        mnemic.train(model, TOKENIZER, lesson, **how, out=str(tmp_path / learn.__name__), trainable="slots")
        return loss(model)

    def best(model: Any) -> Any:
        return mnemic.choose_slots(model, TOKENIZER, lesson, CORPUS, most=16, batch_size=2)

    def unread(model: Any) -> Any:
        read = {(slot.layer, slot.slot) for slot in mnemic.find_slots(model, TOKENIZER, NEW, most=512)}
        return {layer: [slot for slot in range(256) if (layer, slot) not in read] for layer in (0, 1)}

    start = loss(model_of("gpt2", slots=256))
    assert after(best) < start - 0.05
    assert after(unread) == start


# Pruned


def test_the_slots_that_stay_by_hand() -> None:
    reads = torch.tensor([5, 0, 2, 1, 3])
    weights = torch.tensor([1.0, 0.0, 4.0, 0.5, 2.5], dtype=torch.float64)

    def stay(rows: list[int] | None = None, **options: Any) -> list[int]:
        config = mnemic.PruneSlotsConfig(**options)
        mask = chosen(reads, weights, config, None if rows is None else torch.tensor(rows))
        return mask.nonzero().flatten().tolist()

    assert stay() == [0, 2, 3, 4]
    assert stay(reads=3) == [0, 4]
    assert stay(weight=0.5) == [2]  # 4 of 8
    assert stay(weight=0.51) == [2, 4]
    assert stay(weight=0.9) == [0, 2, 4]
    assert stay(weight=0.95) == [0, 2, 3, 4]
    assert stay(weight=0.51, reads=3) == [4]
    assert stay(rows=[0, 1, -1, 2, 3], weight=0.6) == [4]  # 2.5 of the 4 that are left
    with pytest.raises(UsageError, match="no slot was read 6 times"):
        stay(reads=6)


@pytest.mark.parametrize("kind", ["gpt2", "masked", "classifier"])
def test_pruning_keeps_what_the_corpus_reads_and_says_what_it_costs(kind: str, tmp_path: Path) -> None:
    model = model_of(kind, slots=1024)
    handle, before = model.memory.product_keys, {}
    windows = torch.tensor([[256, *document.text.encode()][:40] for document in OLD])
    if kind != "masked":  # whose text is counted with hidden tokens
        before["logits"] = model(input_ids=windows).logits
    how = {"metrics": ["masked_loss" if kind == "masked" else "perplexity"], "window": 40}
    if kind != "classifier":
        before["train"] = mnemic.evaluate(model, TOKENIZER, CORPUS, **how, split="train")
        before["valid"] = mnemic.evaluate(model, TOKENIZER, CORPUS, **how, split="valid")
    report = mnemic.prune_slots(model, TOKENIZER, CORPUS, window=40)
    assert report["slots_before"] == 2048
    assert report["slots_after"] == sum(handle.config.kept) < 2048
    assert {name: sizes["after"] for name, sizes in report["tables"].items()} == dict(
        zip(("0", "1"), handle.config.kept, strict=True)
    )
    assert report["bytes_before"] == 2048 * 16 * 4
    assert report["bytes_after"] == report["slots_after"] * 16 * 4 + 2048 * 4
    if kind != "masked":
        assert torch.equal(model(input_ids=windows).logits, before["logits"])
    if kind == "classifier":
        assert report["loss_before"] is report["loss_after"] is None
        return
    figure = "masked_loss" if kind == "masked" else "nll"
    assert mnemic.evaluate(model, TOKENIZER, CORPUS, **how, split="train")[figure] == before["train"][figure]
    after = mnemic.evaluate(model, TOKENIZER, CORPUS, **how, split="valid")
    count = 1 if kind == "masked" else after["tokens"]
    assert report["loss_before"] == before["valid"][figure] / count
    assert report["loss_after"] == after[figure] / count
    assert report["loss_after"] != report["loss_before"]
    again = mnemic.prune_slots(model, TOKENIZER, CORPUS, window=40, held_out=None)
    assert again["slots_after"] == report["slots_after"]
    assert again["loss_after"] is None


# What cannot be


def test_what_cannot_be_is_told() -> None:
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENIZER), n_embd=16, n_layer=2, n_head=2))
    with pytest.raises(UsageError, match="slots are those of product keys"):
        mnemic.find_slots(plain, TOKENIZER, "text")
    model = model_of("gpt2")
    for call in (mnemic.find_slots, mnemic.choose_slots):
        more = [CORPUS] if call is mnemic.choose_slots else []
        with pytest.raises(UsageError, match=r"most=0\): expected 1 or more"):
            call(model, TOKENIZER, "text", *more, most=0)
    with pytest.raises(UsageError, match="window = 65"):
        mnemic.find_slots(model, TOKENIZER, "text", window=65)
    with pytest.raises(UsageError, match="either a PruneSlotsConfig or options"):
        mnemic.prune_slots(model, TOKENIZER, CORPUS, mnemic.PruneSlotsConfig(), reads=2)
    shape = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": len(TOKENIZER)}
    bart = BartForConditionalGeneration(BartConfig(**shape, **heads, pad_token_id=257, max_position_embeddings=64))
    with pytest.raises(UsageError, match="reads pairs of texts"):
        mnemic.find_slots(mnemic.augment(bart, mnemic.ProductKeys(**KEYS | {"layers": [0]})), TOKENIZER, "text")


@pytest.mark.parametrize(
    "wrong",
    [
        {"reads": 0},
        {"weight": 0.0},
        {"weight": 1.1},
        {"held_out": "train"},
        {"held_out": "valid", "split": "all"},
        {"window": 0},
    ],
)
def test_settings_of_pruning_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"PruneSlotsConfig.{next(iter(wrong))}"):
        mnemic.PruneSlotsConfig(**wrong)
