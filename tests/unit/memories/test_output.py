"""The output memory in models: what it computes against naive versions, its long-term state, and stores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import mnemic
from mnemic.data import Document
from mnemic.data.documents import Corpus
from mnemic.errors import UsageError
from mnemic.hf.keys import Ear
from mnemic.hf.losses import IGNORED, token_losses
from tests.contract.architectures import VOCABULARY, build

LENGTH = 9


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def augmented(architecture: str = "gpt2", **options: Any) -> Any:
    torch.manual_seed(0)
    return mnemic.augment(build(architecture).double(), mnemic.OutputMemory(**options)).eval()


def keys_and_logits(model: Any, ids: Tensor, key: str = "ffn") -> tuple[Tensor, Tensor]:
    """The keys and logits of the model without its memory."""
    ear = Ear.at_key(model.memory._places, key)
    with ear.listening() as heard, model.memory.disabled(), torch.no_grad():
        logits = model(ids).logits
    ear.close()
    return heard[-1].reshape(*ids.shape, -1), logits


def mixture(logits: Tensor, normaliser: float, pairs: list[tuple[float, int]], config: mnemic.OutputMemory) -> Tensor:
    """P_final over the vocabulary from log-probabilities, by Eq. 6, 8 and 9 as they stand."""
    masses = (logits.log_softmax(-1) + normaliser).exp()
    if config.joint:
        for score, value in pairs:
            masses[value] += math.exp(score / config.temperature)
        normaliser = math.log(math.exp(normaliser) + sum(math.exp(s / config.temperature) for s, _ in pairs))
    result = masses / math.exp(normaliser)
    if config.weight and pairs:
        own = torch.zeros_like(result)
        for score, value in pairs:
            own[value] += math.exp(score / config.mix_temperature)
        result = (1 - config.weight) * result + config.weight * own / own.sum()
    return result


def score(query: Tensor, key: Tensor, config: mnemic.OutputMemory) -> float:
    if config.similarity == "dot":
        return float(query @ key) / math.sqrt(len(query))
    return -float((query - key).square().sum())


def naive_local(model: Any, ids: Tensor, config: mnemic.OutputMemory) -> Tensor:
    """The distribution at each place of one text, (T, V)."""
    keys, logits = keys_and_logits(model, ids[None], config.key)
    rows = []
    for t in range(len(ids)):
        pairs = [(score(keys[0, t], keys[0, j], config), int(ids[j + 1])) for j in range(t)]
        rows.append(mixture(logits[0, t], float(logits[0, t].logsumexp(-1)), pairs, config))
    return torch.stack(rows)


SETTINGS = {
    "trime": {},
    "with temperature": {"temperature": 0.5},
    "and mixed": {"weight": 0.3, "mix_temperature": 2.0},
    "continuous cache": {"joint": False, "training": "none", "weight": 0.2},
    "by distance": {"similarity": "distance"},
    "by output": {"key": "output"},
}


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "opt", "falcon", "mnemic-rotary"])
def test_the_distribution_is_that_of_the_equations(architecture: str, options: dict[str, Any]) -> None:
    model, ids = augmented(architecture, **options), tokens(2, LENGTH)
    config = model.memory.configs[0]
    with torch.no_grad():
        found = model(ids).logits.softmax(-1)
        losses = token_losses(model, ids.roll(-1, 1), input_ids=ids)[0]
    torch.testing.assert_close(found.sum(-1), torch.ones(2, LENGTH, dtype=found.dtype))
    for row in range(2):
        wanted = naive_local(model, ids[row], config)
        torch.testing.assert_close(found[row], wanted, rtol=1e-5, atol=1e-7)
        following = wanted.gather(1, ids[row].roll(-1)[:, None]).squeeze(1)
        torch.testing.assert_close(losses[row], -following.log(), rtol=1e-5, atol=1e-6)


def test_an_adaptive_softmax_keeps_the_mass_of_its_clusters() -> None:
    torch.manual_seed(0)
    config = mnemic.models.MnemicDecoderConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, adaptive_cutoffs=[5, 12]
    )
    base = mnemic.models.MnemicDecoderForCausalLM(config).double().eval()
    model = mnemic.augment(base, mnemic.OutputMemory(weight=0.2)).eval()
    ids = torch.randint(0, 30, (1, 12), generator=torch.Generator().manual_seed(1))
    keys, plain = keys_and_logits(model, ids)
    hidden = keys_and_logits(model, ids, "output")[0]
    head = base.lm_head
    with torch.no_grad():
        found = model(ids).logits
        losses = token_losses(model, ids.roll(-1, 1), input_ids=ids)[0][0]
        for t in range(12):
            choice = hidden[0, t] @ torch.cat([head.tables[0], head.clusters]).t()
            pairs = [(score(keys[0, t], keys[0, j], model.memory.configs[0]), int(ids[0, j + 1])) for j in range(t)]
            wanted = mixture(plain[0, t], float(choice.logsumexp(-1)), pairs, model.memory.configs[0])
            assert float(wanted.sum()) == pytest.approx(1)
            torch.testing.assert_close(found[0, t].softmax(-1), wanted, rtol=1e-6, atol=1e-9)
            assert float(losses[t]) == pytest.approx(-math.log(wanted[int(ids[0, (t + 1) % 12])]), rel=1e-6)


def test_padding_is_neither_a_target_nor_a_memory() -> None:
    model, ids = augmented(), tokens(1, LENGTH)
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], 1)
    mask = torch.cat([torch.ones(1, LENGTH), torch.zeros(1, 4)], 1).long()
    targets = torch.cat([ids[:, 1:], torch.full((1, 5), IGNORED)], 1)
    for training in (False, True):
        model.train(training)
        whole = token_losses(model, targets, input_ids=padded, attention_mask=mask)[0]
        short = token_losses(model, targets[:, :LENGTH], input_ids=ids)[0]
        torch.testing.assert_close(whole[:, :LENGTH], short)
        assert (whole[:, LENGTH - 1 :] == 0).all()


# Training


def naive_training(model: Any, ids: Tensor, targets: Tensor, seen: Any) -> Tensor:
    """-log P of Eq. 5 for each target, with the pairs (row, place) that `seen(row, t)` lists."""
    keys, logits = keys_and_logits(model, ids)
    losses = torch.zeros(targets.shape, dtype=torch.float64)
    for row in range(len(ids)):
        for t in range(ids.shape[1]):
            target = int(targets[row, t])
            if target == IGNORED:
                continue
            pairs = [
                (score(keys[row, t], keys[r, j], mnemic.OutputMemory()), int(targets[r, j]))
                for r, j in seen(row, t)
                if int(targets[r, j]) != IGNORED
            ]
            top = math.exp(logits[row, t, target]) + sum(math.exp(s) for s, value in pairs if value == target)
            bottom = float(logits[row, t].exp().sum()) + sum(math.exp(s) for s, _ in pairs)
            losses[row, t] = math.log(bottom) - math.log(top)
    return losses


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = tokens(rows, LENGTH, seed=3) % 7 + 3  # few tokens: memories meet targets
    targets = ids.roll(-1, 1)
    starts = torch.zeros(rows, LENGTH, dtype=torch.bool)
    starts[1, 4] = True
    targets[1, 3] = IGNORED
    return ids, targets, starts


def test_training_with_local_memory() -> None:
    model = augmented(training="local").train()
    ids, targets, starts = batch(3)
    with torch.no_grad():
        found = token_losses(model, targets, input_ids=ids, document_starts=starts)[0]
        model.eval()
        torch.testing.assert_close(found, token_losses(model, targets, input_ids=ids, document_starts=starts)[0])
        for row, part in ((0, slice(0, LENGTH)), (1, slice(0, 4)), (1, slice(4, LENGTH)), (2, slice(0, LENGTH))):
            alone = naive_training(
                model, ids[row : row + 1, part], targets[row : row + 1, part], lambda r, t: [(r, j) for j in range(t)]
            )
            torch.testing.assert_close(found[row : row + 1, part], alone, rtol=1e-6, atol=1e-8)


def test_training_with_consecutive_segments() -> None:
    model = augmented(training="consecutive").train()
    ids, targets, _ = batch(4)
    targets = ids.roll(-1, 1)
    streams = torch.tensor([0, 0, 1, 1])

    def seen(row: int, t: int) -> list[tuple[int, int]]:
        before = [(row - 1, j) for j in range(LENGTH)] if row % 2 else []
        return before + [(row, j) for j in range(t)]

    found = token_losses(model, targets, input_ids=ids, streams=streams)[0]
    torch.testing.assert_close(found.detach(), naive_training(model, ids, targets, seen), rtol=1e-6, atol=1e-8)
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[1, 0] = True
    apart = token_losses(model, targets, input_ids=ids, streams=streams, document_starts=starts)[0]
    alone = token_losses(model, targets[1:2], input_ids=ids[1:2])[0]
    torch.testing.assert_close(apart[1:2], alone)
    torch.testing.assert_close(apart[[0, 2, 3]], found[[0, 2, 3]])


@pytest.mark.parametrize("dropped", [0.0, 1.0])
def test_training_with_the_whole_batch(dropped: float) -> None:
    model = augmented(training="batch", local_dropout=dropped).train()
    ids, targets, _ = batch(3)

    def seen(row: int, t: int) -> list[tuple[int, int]]:
        others = [(r, j) for r in range(3) if r != row for j in range(LENGTH)]
        return others + ([(row, j) for j in range(t)] if not dropped else [])

    found = token_losses(model, targets, input_ids=ids)[0]
    values = torch.where(targets == IGNORED, ids.roll(-1, 1), targets)
    wanted = naive_training(model, ids, values, seen).masked_fill(targets == IGNORED, 0)
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("training", ["local", "consecutive", "batch"])
def test_gradients_flow_into_the_memory_unless_they_should_not(training: str) -> None:
    ids, targets, _ = batch(2)
    gradients = []
    for through in (True, False):
        model = augmented(training=training, local_dropout=0.0, memory_gradient=through).train()
        loss = token_losses(model, targets, input_ids=ids, streams=torch.zeros(2, dtype=torch.long))[0].sum()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        if through:
            parameter = model.transformer.h[-1].attn.c_proj.weight
            direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)).double()
            slopes = []
            with torch.no_grad():
                for step in (1e-6, -1e-6):
                    parameter += step * direction
                    slopes.append(
                        token_losses(model, targets, input_ids=ids, streams=torch.zeros(2, dtype=torch.long))[0].sum()
                    )
                    parameter -= step * direction
            slope = float(slopes[0] - slopes[1]) / 2e-6
            assert slope == pytest.approx(float((parameter.grad * direction).sum()), rel=1e-4)
    assert not torch.allclose(*gradients)


def test_training_starts_without_memory() -> None:
    model = augmented(training="local", plain_start=0.05).train()
    ids, targets, _ = batch(2)
    with torch.no_grad():
        with model.memory.disabled():
            plain = token_losses(model, targets, input_ids=ids)[0]
        for step, same in ((1, True), (5, True), (6, False), (100, False)):
            model.memory.begin_step(step, 100)
            assert torch.equal(token_losses(model, targets, input_ids=ids)[0], plain) == same
        model.memory.begin_step(1, 100)
        model.eval()
        assert not torch.equal(token_losses(model, targets, input_ids=ids)[0], plain)


# Long-term memory


def test_only_testing_carries_a_long_term_memory() -> None:
    model = augmented(long=5)
    assert model.memory.new_state(2).keys() == {"output"}
    assert model.train().memory.new_state(2) == {}


def corpus(*texts: str) -> Corpus:
    return Corpus("given", {"valid": lambda: [Document(str(n), text) for n, text in enumerate(texts)]})


TEXTS = ("the cat sat on the mat and the cat sat on the hat", "a dog", "one two three one two three one two")


def naive_long(model: Any, tokenizer: Any, window: int, stride: int, config: mnemic.OutputMemory) -> float:
    """Each token with the pairs of its window before it, and of the `long` tokens before its window."""
    total = 0.0
    for text in TEXTS:
        ids = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        inputs, kept, scored, end = len(ids) - 1, {}, 0, min(window, len(ids) - 1)
        while scored < inputs:
            start = max(0, end - window)
            keys, logits = keys_and_logits(model, torch.tensor([ids[start:end]]))
            for t in range(scored, end):
                query = keys[0, t - start]
                pairs = [(keys[0, j - start], j) for j in range(start, t)] if config.local else []
                pairs += [(kept[j], j) for j in range(max(0, start - config.long), start)]
                found = [(score(query, key, config), ids[j + 1]) for key, j in pairs]
                row = logits[0, t - start]
                total -= math.log(mixture(row, float(row.logsumexp(-1)), found, config)[ids[t + 1]])
            kept |= {j: keys[0, j - start] for j in range(scored, end)}
            scored, end = end, min(end + stride, inputs)
    return total


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3), (5, 1)])
@pytest.mark.parametrize("options", [{"long": 6}, {"long": 1000, "local": False, "weight": 0.2}])
def test_each_token_counts_in_one_memory_and_batches_do_not_matter(
    byte_model: Any, window: int, stride: int, options: dict[str, Any]
) -> None:
    model, tokenizer = byte_model
    mnemic.augment(model, mnemic.OutputMemory(**options))
    wanted = naive_long(model, tokenizer, window, stride, model.memory.configs[0])
    for size in (1, 2, 3, 7):
        found = mnemic.evaluate(model, tokenizer, corpus(*TEXTS), window=window, stride=stride, batch_size=size)
        assert found["nll"] == pytest.approx(wanted, rel=1e-6)
    model.memory.detach()


@pytest.fixture
def byte_model() -> tuple[Any, Any]:
    torch.manual_seed(0)
    tokenizer = mnemic.data.byte_tokenizer() if hasattr(mnemic.data, "byte_tokenizer") else None
    if tokenizer is None:
        from tests.unit.stores.building import BYTES

        tokenizer = BYTES
    config = mnemic.models.MnemicDecoderConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return mnemic.models.MnemicDecoderForCausalLM(config).double().eval(), tokenizer


def test_a_large_vocabulary() -> None:
    torch.manual_seed(0)
    config = mnemic.models.MnemicDecoderConfig(
        vocab_size=70_000, hidden_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = mnemic.augment(mnemic.models.MnemicDecoderForCausalLM(config), mnemic.OutputMemory()).eval()
    ids = torch.tensor([[69_999, 66_000, 69_999, 66_000, 69_999]])
    with torch.no_grad(), model.memory.disabled():
        plain = model(ids).logits.softmax(-1)
    found = model(ids).logits.softmax(-1)
    assert found[0, 2, 66_000] > 5 * plain[0, 2, 66_000]
    assert found[0, 2, 66_000 - 65_536] < 2 * plain[0, 2, 66_000 - 65_536]
    with mnemic.open_store("ram:", mnemic.StoreConfig(dim=8, metric="ip", keys="float32")) as store:
        store.add(torch.zeros(4, 8).numpy(), np.full(4, 69_998), mnemic.stores.References.of("d", range(4)))
        store.commit()
        mnemic.augment(model, mnemic.OutputMemory(external=store, local=False, weight=0.5, k=4))
        found = model(ids).logits.softmax(-1)
    assert found[0, 2, 69_998].item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"long": -1}, "expected 0 or more"),
        ({"k": 0}, "expected 1 or more"),
        ({"temperature": 0.0}, "above 0"),
        ({"mix_temperature": float("inf")}, "above 0"),
        ({"weight": 1.0}, "less than 1"),
        ({"local_dropout": 1.5}, "from 0 to 1"),
        ({"joint": False}, "set training = none"),
        ({"key": "ffn:9"}, "a block from 0 to 1"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        augmented(**options)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_memories_that_outweigh_the_model_leave_its_words_a_chance(temperature: float) -> None:
    """The keys of a wide model are long: all the mass is the memory's, and float32 must not lose the rest."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=1280, n_layer=1, n_head=4, n_positions=64)).eval()
    mnemic.augment(model, mnemic.OutputMemory(temperature=temperature))
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
    output = model(input_ids=ids, labels=ids)
    losses, _ = token_losses(model, F.pad(ids[:, 1:], (0, 1), value=IGNORED), input_ids=ids)
    torch.testing.assert_close(output.loss, losses.sum() / (ids.numel() - len(ids)), rtol=1e-4, atol=0)
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
