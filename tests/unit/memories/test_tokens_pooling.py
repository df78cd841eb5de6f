"""Whole texts labelled by the memory: every encoder against a naive version, and the rules of a memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf

import mnemic
from mnemic.errors import UnsupportedModel, UsageError
from tests.contract.architectures import ARCHITECTURES, PAD, VOCABULARY, build
from tests.unit.tasks import colours, counts, make_encoder, questions, word_tokenizer

ENCODERS = ["bert", "distilbert", "roberta", "electra", "modernbert"]
COUNT, LENGTH = 3, 9

every_encoder = pytest.mark.parametrize("architecture", ENCODERS)


def encoder(architecture: str, labels: int = 3, seed: int = 0, **options: Any) -> Any:
    """A tiny random encoder with a head for whole texts."""
    config = ARCHITECTURES[architecture][1]
    torch.manual_seed(seed)
    names = {"id2label": {number: str(number) for number in range(labels)}, "label2id": None}
    settings = {**config.to_dict(), **names, **options}
    model = hf.AutoModelForSequenceClassification.from_config(type(config).from_dict(settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model.eval()


def pooled(architecture: str, labels: int = 3, **options: Any) -> Any:
    """One with memory tokens that take the place of that head."""
    model = encoder(architecture, labels, **options)
    torch.manual_seed(1)
    return mnemic.augment(model, mnemic.MemoryTokens(count=COUNT, pool=True)).eval()


def ids(batch: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, given: torch.Tensor | None = None, **inputs: Any) -> torch.Tensor:
    return model(input_ids=ids() if given is None else given, **inputs).logits


@every_encoder
def test_logits_are_those_of_the_maximum_and_the_mean_of_the_memory(architecture: str) -> None:
    """Table 5's +pool number by number, in float64, over what the plain base gives for [mem] and text."""
    options = {"local_attention": 64} if architecture == "modernbert" else {}  # the plain base's window is no wider
    model, base = pooled(architecture, **options).double(), encoder(architecture, **options).double().base_model
    vectors, head = model.memory.tokens.layer.vectors, model.memory.tokens.head.classifier
    before, start = [0] * COUNT, 0
    if architecture == "modernbert":
        before = list(range(-COUNT, 0))
    elif architecture == "roberta":  # whose table begins behind the padding's row
        before, start = [PAD + 1] * COUNT, PAD + 1
    with torch.no_grad():
        states = base(
            inputs_embeds=torch.cat([vectors.expand(2, -1, -1), base.get_input_embeddings()(ids())], dim=1),
            position_ids=torch.tensor([[*before, *range(start, start + LENGTH)]]).expand(2, -1),
            attention_mask=torch.ones(2, COUNT + LENGTH, dtype=torch.long),
        ).last_hidden_state
    expected = torch.empty(2, 3, dtype=torch.float64)
    for row in range(2):
        columns = [[states[row, j, d].item() for j in range(COUNT)] for d in range(states.shape[2])]
        features = [max(column) for column in columns] + [sum(column) / COUNT for column in columns]
        for label in range(3):
            weighted = [w.item() * x for w, x in zip(head.weight[label], features, strict=True)]
            expected[row, label] = sum(weighted) + head.bias[label].item()
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)


@every_encoder
def test_disabled_and_detached_are_the_base_bit_for_bit(architecture: str) -> None:
    base, model = encoder(architecture), pooled(architecture)
    before, with_memory = logits(base), logits(model)
    assert (with_memory - before).abs().max() > 1e-2
    with model.memory.disabled():
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), with_memory)
    model.memory.detach()
    assert type(model) is type(base)
    assert set(model.state_dict()) == set(base.state_dict())
    assert torch.equal(logits(model), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@every_encoder
@pytest.mark.parametrize("base_trained", [False, True], ids=["base-elsewhere", "base-included"])
def test_a_saved_model_comes_back_with_its_head(architecture: str, base_trained: bool, tmp_path: Any) -> None:
    base = encoder(architecture)
    if not base_trained:
        base.save_pretrained(tmp_path / "base")
        base = type(base).from_pretrained(tmp_path / "base")
    model = mnemic.augment(base, mnemic.MemoryTokens(count=COUNT, pool=True)).eval()
    model.save_pretrained(tmp_path / "saved")
    loaded = mnemic.load(tmp_path / "saved").eval()
    assert (tmp_path / "saved" / "config.json").exists() == base_trained
    assert torch.equal(logits(loaded), logits(model))


@every_encoder
def test_the_old_head_takes_no_part_and_everything_else_learns(architecture: str) -> None:
    model = pooled(architecture)
    model(input_ids=ids(), labels=torch.tensor([0, 2])).loss.backward()
    unused = {id(parameter) for parameter in model.memory.tokens.unused()}
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    named = {name for name, parameter in model.named_parameters() if id(parameter) in unused}
    assert any(name.startswith("classifier") for name in named)
    assert without == named
    assert all(parameter.grad.abs().max() > 0 for parameter in model.memory.parameters())
    everything = sum(parameter.numel() for parameter in model.parameters())
    old = sum(parameter.numel() for name, parameter in model.named_parameters() if name in named)
    assert model.memory.count_parameters() == everything - old


@every_encoder
def test_only_the_memory_learns_when_only_it_may_and_its_gradient_is_right(architecture: str) -> None:
    model = pooled(architecture).double()
    model.requires_grad_(False)
    model.memory.requires_grad_(True)

    def value() -> torch.Tensor:
        return model(input_ids=ids(), labels=torch.tensor([0, 2])).loss

    value().backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    parts = ("layer.vectors", "head.classifier.weight", "head.classifier.bias")
    assert learned == {f"memory.tokens.{part}" for part in parts}
    near = 1e-3 if architecture == "modernbert" else 1e-5  # it computes its rotations in float32
    for name, parameter in model.memory.named_parameters():
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)).double()
        with torch.no_grad():
            parameter += 1e-5 * direction
            above = value()
            parameter -= 2e-5 * direction
            slope = (above - value()) / 2e-5
            parameter += 1e-5 * direction
        assert slope.item() == pytest.approx((parameter.grad * direction).sum().item(), rel=near), name


@every_encoder
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(architecture: str, side: str) -> None:
    model = pooled(architecture)
    padding, real = torch.full((2, 4), PAD), torch.ones(2, LENGTH, dtype=torch.long)
    order = (lambda a, b: torch.cat([a, b], 1)) if side == "left" else (lambda a, b: torch.cat([b, a], 1))
    padded, mask = order(padding, ids()), order(torch.zeros_like(padding), real)
    where = {} if architecture == "roberta" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    torch.testing.assert_close(logits(model, padded, attention_mask=mask, **where), logits(model), rtol=1e-4, atol=1e-4)


@every_encoder
def test_rows_do_not_see_each_other_and_one_token_is_enough(architecture: str) -> None:
    model = pooled(architecture)
    together = logits(model)
    for row in range(2):
        torch.testing.assert_close(together[row : row + 1], logits(model, ids()[row : row + 1]), rtol=1e-4, atol=1e-4)
    assert logits(model, ids()[:1, :1]).isfinite().all()


def test_the_loss_is_what_the_base_would_make_of_the_logits() -> None:
    labels = torch.tensor([0, 2])
    outputs = pooled("bert")(input_ids=ids(), labels=labels)
    torch.testing.assert_close(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, labels))
    score, wanted = pooled("bert", labels=1), torch.tensor([0.5, 3.0])
    outputs = score(input_ids=ids(), labels=wanted)
    torch.testing.assert_close(outputs.loss, (outputs.logits[:, 0] - wanted).square().mean())
    assert score.config.problem_type == "regression"
    several = torch.tensor([[1.0, 0, 1], [0, 1, 0]])
    outputs = pooled("bert")(input_ids=ids(), labels=several)
    by_hand = torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, several)
    torch.testing.assert_close(outputs.loss, by_hand)


@every_encoder
def test_what_else_the_model_gives_stays(architecture: str) -> None:
    model = pooled(architecture)
    asked = {"input_ids": ids(), "labels": torch.tensor([0, 2]), "output_hidden_states": True}
    outputs = model(**asked)
    assert list(outputs) == ["loss", "logits", "hidden_states"]
    assert {state.shape[1] for state in outputs.hidden_states} == {LENGTH}
    loss, found, *_ = model(**asked, return_dict=False)
    assert torch.equal(loss, outputs.loss)
    assert torch.equal(found, outputs.logits)
    assert len(model(ids(), return_dict=False)) == 1


def test_the_new_head_begins_as_the_base_would_begin_it() -> None:
    for architecture in ENCODERS:
        option = {"distilbert": "seq_classif_dropout"}.get(architecture, "classifier_dropout")
        head = pooled(architecture, initializer_range=0.5, **{option: 0.3}).memory.tokens.head
        assert head.dropout.p == 0.3
        assert head.classifier.weight.shape == (3, 64)
        assert 0.4 < head.classifier.weight.std() < 0.6
        assert not head.classifier.bias.any()
        assert not head.training
    assert mnemic.augment(encoder("bert").train(), mnemic.MemoryTokens(pool=True)).memory.tokens.head.training


def test_in_half_precision_it_gives_logits_of_that_precision() -> None:
    model = mnemic.augment(encoder("bert").to(torch.bfloat16), mnemic.MemoryTokens(count=COUNT, pool=True))
    assert logits(model).dtype == torch.bfloat16
    model = pooled("bert")
    with torch.autocast("cpu", torch.bfloat16):
        assert logits(model).isfinite().all()


@every_encoder
def test_it_works_beside_product_keys(architecture: str) -> None:
    keys = mnemic.ProductKeys(layers=[1], slots=16, k=4, heads=2, key_dim=8)
    model = mnemic.augment(encoder(architecture), keys.neutral(), mnemic.MemoryTokens(count=COUNT, pool=True)).eval()
    other = pooled(architecture)
    other.memory.tokens.load_state_dict(model.memory.tokens.state_dict())
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-4)
    model.memory.product_keys.requires_grad_(True)
    model(input_ids=ids(), labels=torch.tensor([0, 2])).loss.backward()
    assert any(p.grad is not None and p.grad.coalesce().values().any() for p in tables(model))


def tables(model: Any) -> list[Any]:
    """The values of product keys, which learn by rows."""
    return list(model.memory.product_keys.tables.parameters())


def test_copies_are_independent() -> None:
    model = pooled("bert")
    before, twin = logits(model), copy.deepcopy(model)
    with torch.no_grad():
        twin.memory.tokens.head.classifier.bias += 1
        twin.memory.tokens.layer.vectors += 1
    assert torch.equal(logits(model), before)
    assert (logits(twin) - before).abs().min() > 1e-3
    with twin.memory.disabled():
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: build("bert"), "no head for that on BertModel: load"),
        (lambda: build("gpt2"), "GPT2Model is of a causal model, not an encoder"),
        (lambda: build("t5"), "T5Stack is of a seq2seq model, not an encoder"),
        (lambda: hf.GPT2ForSequenceClassification(ARCHITECTURES["gpt2"][1]), "GPT2Model is of a causal model"),
        (lambda: hf.BertForTokenClassification(ARCHITECTURES["bert"][1]), "no head for that on BertModel"),
        (lambda: hf.BertModel(ARCHITECTURES["bert"][1]), "no head for that on BertModel"),
    ],
    ids=["masked", "causal", "seq2seq", "causal-classifier", "words", "no-head"],
)
def test_other_models_are_refused_and_left_as_they_were(model: Any, sentence: str) -> None:
    base = model()
    kind = type(base)
    with pytest.raises(UnsupportedModel, match=sentence):
        mnemic.augment(base, mnemic.MemoryTokens(pool=True))
    assert type(base) is kind
    assert not hasattr(base, "memory")


def test_a_neutral_start_keeps_the_base_s_head() -> None:
    model = mnemic.augment(encoder("bert"), mnemic.MemoryTokens(count=COUNT, pool=True).neutral())
    torch.testing.assert_close(logits(model), logits(encoder("bert")), rtol=1e-4, atol=1e-4)


def test_for_another_task_the_tokens_go_along_and_the_head_is_new() -> None:
    first = mnemic.with_head(make_encoder("bert", word_tokenizer(), "ForMaskedLM"), colours())
    model = mnemic.augment(first, mnemic.MemoryTokens(count=COUNT, pool=True))
    vectors = model.memory.tokens.layer.vectors.detach().clone()
    kept = mnemic.with_head(model, colours())
    assert kept is model
    moved = mnemic.with_head(model, counts())
    assert torch.equal(moved.memory.tokens.layer.vectors, vectors)
    assert moved.memory.tokens.head.classifier.weight.shape == (1, 32)
    with pytest.raises(UnsupportedModel, match="no head for that"):
        mnemic.with_head(moved, questions())


@pytest.mark.parametrize("task", [colours(), counts()], ids=["labels", "scores"])
@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta"])
def test_tasks_are_learned_by_the_memory(name: str, task: Any, tmp_path: Any) -> None:
    tokenizer = word_tokenizer()
    model = mnemic.with_head(make_encoder(name, tokenizer, "ForMaskedLM"), task)
    mnemic.augment(model, mnemic.MemoryTokens(count=COUNT, pool=True))
    how = {"segment_length": 16, "batch_size": 12, "learning_rate": 1e-2, "weight_decay": 0.0, "log_every": 1}
    config = mnemic.fine_tuning(task, steps=150, out=str(tmp_path / "run"), **how)
    losses = [loss for _, loss in mnemic.train(model, tokenizer, task, config).losses]
    assert losses[-1] < 0.5 * losses[0]
    figures = mnemic.evaluate(mnemic.load(tmp_path / "run" / "model"), tokenizer, task)
    assert figures["accuracy" if task.labels else "pearson"] > 0.9


def test_a_pooled_memory_has_a_controller_for_the_last_layer_too() -> None:
    model = mnemic.augment(encoder("bert"), mnemic.MemoryTokens(count=COUNT, variant="control", pool=True))
    assert len(model.memory.tokens.controllers) == 2
    model(input_ids=ids(), labels=torch.tensor([0, 1])).loss.backward()
    assert all(p.grad.abs().max() > 0 for p in model.memory.parameters())


def test_a_pooled_memory_keeps_a_token() -> None:
    with pytest.raises(UsageError, match="no memory to label a text by"):
        pooled("bert").memory.change("tokens", count=0)
