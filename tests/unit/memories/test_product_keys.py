"""Product keys inside models: against blocks written by hand, with padding, and saved, shared, copied and combined."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

import mnemic
from mnemic.errors import UsageError
from mnemic.memories.product_keys.attach import Attached
from tests.contract.architectures import EOS, PAD, VOCABULARY, build

SIZES: dict[str, Any] = {"slots": 64, "heads": 2, "k": 4, "key_dim": 8}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
WAYS = pytest.mark.parametrize("feed_forward", ["keep", "replace", "renew"])


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def remembering(architecture: str = "bert", **settings: Any) -> Any:
    """A model in which every layer's memory has learned something."""
    torch.manual_seed(1)
    model = mnemic.augment(build(architecture), mnemic.ProductKeys(**{"layers": [0, 1], **SIZES, **settings})).eval()
    with torch.no_grad():
        for layer in model.memory.product_keys.layers.values():
            layer.query.weight.normal_(0, 0.5)
            layer.keys.normal_()
            for name, tensor in layer.named_buffers():
                if name.endswith(("running_mean", "running_var")):
                    tensor.uniform_(0.5, 1.5)
    return model


def memory_of(model: Any, layer: int, x: Tensor) -> Tensor:
    """b PKM(x) of a layer."""
    handle = model.memory.product_keys
    return handle.layers[str(layer)](x.flatten(0, -2), handle.table(layer)).view_as(x)


def feed_forward_of(model: Any, layer: int, own: list[nn.Module], x: Tensor) -> Tensor | int:
    """a FFN(x) of a layer."""
    handle = model.memory.product_keys
    way = handle.config.feed_forward
    if way == "replace":
        return 0
    for part in handle.renewed[str(layer)] if way == "renew" else own:
        x = part(x)
    return x


@WAYS
@torch.no_grad()
def test_a_block_of_bert_written_by_hand(feed_forward: str) -> None:
    """x' = LN(x + a FFN(x) + b PKM(x)) (arXiv 2010.03881, section 4.2)."""
    model, ids = remembering("bert", feed_forward=feed_forward), tokens(2, 9)
    expected = build("bert")
    x = expected.bert.embeddings(ids)
    for number, block in enumerate(expected.bert.encoder.layer):
        x = block.attention(x)[0]
        ffn = feed_forward_of(model, number, [block.intermediate, block.output.dense], x)
        x = block.output.LayerNorm(x + ffn + memory_of(model, number, x))
    torch.testing.assert_close(model(ids).logits, expected.cls(x), **CLOSE)


@WAYS
@torch.no_grad()
def test_a_block_of_gpt2_written_by_hand(feed_forward: str) -> None:
    """y = LN(x), x' = x + a FFN(y) + b PKM(y)."""
    model, ids = remembering("gpt2", feed_forward=feed_forward), tokens(2, 9)
    expected = build("gpt2")
    x = expected.transformer.wte(ids) + expected.transformer.wpe(torch.arange(9))
    for number, block in enumerate(expected.transformer.h):
        x = x + block.attn(block.ln_1(x))[0]
        y = block.ln_2(x)
        x = x + feed_forward_of(model, number, [block.mlp], y) + memory_of(model, number, y)
    torch.testing.assert_close(model(ids).logits, expected.lm_head(expected.transformer.ln_f(x)), **CLOSE)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_a_replaced_feed_forward_is_not_computed_and_does_not_learn(architecture: str) -> None:
    calls: list[nn.Module] = []
    model = remembering(architecture, layers=[1], feed_forward="replace").train()
    block = model.bert.encoder.layer[1] if architecture == "bert" else model.transformer.h[1]
    inside = [block.intermediate.dense] if architecture == "bert" else [block.mlp.c_fc, block.mlp.c_proj]
    for part in inside:
        part.register_forward_hook(lambda module, given, output: calls.append(module))
    model(tokens(2, 5)).logits.sum().backward()
    assert not calls
    replaced = [*block.intermediate.parameters(), *block.output.dense.parameters()] if architecture == "bert" else None
    assert all(p.grad is None for p in replaced or block.mlp.parameters())
    with model.memory.disabled():
        model(tokens(2, 5))
    assert calls == inside


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "t5", "bart", "llama", "bloom"])
def test_a_renewed_feed_forward_has_weights_of_its_own(architecture: str) -> None:
    base = build(architecture).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    layers = [0, 3] if base.config.is_encoder_decoder else [0]
    model = mnemic.augment(base, mnemic.ProductKeys(layers=layers, feed_forward="renew", **SIZES)).train()
    handle = model.memory.product_keys
    given = {"input_ids": tokens(2, 5)} | ({"decoder_input_ids": tokens(2, 5)} if len(layers) > 1 else {})
    model(**given).logits.square().sum().backward()
    for number in layers:
        own = [p for part in model.memory._places.every_feed_forward[number] for p in part.parameters()]
        for new, old in zip(handle.renewed[str(number)].parameters(), own, strict=True):
            assert new.shape == old.shape
            assert old.grad is None
            assert new.grad is not None  # although the base was frozen
            assert new.ndim < 2 or (new - old).abs().max() > 0.01
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter += 1
    model.memory.detach()
    assert {name: tensor for name, tensor in base.state_dict().items() if not torch.equal(tensor, before[name])} == {}
    assert not any(vars(part).get("forward") for part in base.modules())


def test_a_renewed_feed_forward_is_drawn_as_the_model_draws_it() -> None:
    torch.manual_seed(0)
    model = mnemic.augment(build("gpt2"), mnemic.ProductKeys(layers=[0], feed_forward="renew", **SIZES))
    (mlp,) = model.memory.product_keys.renewed["0"]
    assert mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4**0.5, rel=0.1)  # two layers, two paths in each


def test_a_renewed_feed_forward_has_none_of_the_hooks_of_the_old_one() -> None:
    model = mnemic.augment(build("gpt2"), mnemic.OutputMemory(local=True, long=20))
    model.transformer.h[1].mlp.register_forward_hook(lambda *_: pytest.fail("a copy has called this"), prepend=True)
    before = sum(1 for _ in model.modules())
    mnemic.augment(model, mnemic.ProductKeys(layers=[1], feed_forward="renew", **SIZES))
    parts = [*model.memory.product_keys.renewed.modules()]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    assert sum(1 for _ in model.modules()) < before + 30


def test_a_forward_that_someone_else_has_put_on_a_feed_forward_stays() -> None:
    for way in ("keep", "replace", "renew"):
        model, calls = build("bert"), []
        part = model.bert.encoder.layer[0].output.dense
        plain = part.forward
        part.forward = lambda states, plain=plain, calls=calls: calls.append(1) or plain(states)  # as accelerate does
        mnemic.augment(model, mnemic.ProductKeys(layers=[0], feed_forward=way, **SIZES))
        model(tokens(1, 4))
        assert len(calls) == (way == "keep")
        with model.memory.disabled():
            model(tokens(1, 4))
        model.memory.detach()
        model(tokens(1, 4))
        assert len(calls) == 2 + (way == "keep")


# Padding


def padded(side: str, pad: int = 3) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Two rows of other lengths, padded on a side; each alone; which positions they get."""
    rows = [tokens(8, seed=1), tokens(5, seed=2)]
    ids, mask = torch.full((2, 8 + pad), PAD), torch.zeros(2, 8 + pad, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(8 + pad - len(row), None) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, 1
    return ids, mask, {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_counted_in_batch_statistics(architecture: str, side: str) -> None:
    """However much there is of it, on whichever side: the same statistics, logits and gradients in training."""
    found: list[Any] = []
    for pad in (0, 3, 9):
        model = remembering(architecture, query_norm="batch").train()
        ids, mask, positions = padded(side, pad)
        logits = model(input_ids=ids, attention_mask=mask, **positions).logits[mask.bool()]
        logits.square().sum().backward()
        buffers = {name: tensor.clone() for name, tensor in model.memory.named_buffers()}
        tables = [table.grad.coalesce() for table in model.memory.product_keys.tables.parameters()]
        found.append((logits.detach(), buffers, tables))
    for logits, buffers, tables in found[1:]:
        torch.testing.assert_close(logits, found[0][0], **CLOSE)
        torch.testing.assert_close(buffers, found[0][1])
        for one, other in zip(tables, found[0][2], strict=True):
            assert torch.equal(one.indices(), other.indices())
            torch.testing.assert_close(one.values(), other.values(), rtol=1e-3, atol=1e-4)


def test_running_statistics_are_those_of_the_real_tokens() -> None:
    model = remembering("bert", layers=[0], query_norm="batch").train()
    layer = model.memory.product_keys.layers["0"]
    queries: list[Tensor] = []
    layer.query.register_forward_hook(lambda module, given, output: queries.append(output.detach()))
    means, spreads = layer.norm.running_mean.clone(), layer.norm.running_var.clone()
    ids, mask, _ = padded("right")
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    assert len(queries[0]) == 13
    torch.testing.assert_close(layer.norm.running_mean, 0.9 * means + 0.1 * queries[0].mean(0))
    torch.testing.assert_close(layer.norm.running_var, 0.9 * spreads + 0.1 * queries[0].var(0))
    after = layer.norm.running_mean.clone()
    with torch.no_grad():
        both = model.eval()(input_ids=ids[:, :5]).logits
        torch.testing.assert_close(both[1:], model(input_ids=ids[1:, :5]).logits, **CLOSE)
    assert torch.equal(layer.norm.running_mean, after)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_a_batch_of_padding_alone(architecture: str) -> None:
    model = remembering(architecture).train()
    before = [tensor.clone() for tensor in model.memory.buffers()]
    logits = model(input_ids=tokens(2, 4), attention_mask=torch.zeros(2, 4, dtype=torch.long)).logits
    logits.nan_to_num().sum().backward()
    assert [table.grad._nnz() for table in model.memory.product_keys.tables.parameters()] == [0, 0]
    assert all(torch.equal(one, other) for one, other in zip(before, model.memory.buffers(), strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "t5"])
def test_activation_checkpointing_changes_nothing(architecture: str, norm: str, reentrant: bool) -> None:
    found: list[Any] = []
    for checkpoints in (False, True):
        model = remembering(architecture, query_norm=norm).train()
        model.config.use_cache = False
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        ids, mask, _ = padded("right")
        given = {"input_ids": ids, "attention_mask": mask}
        if architecture == "t5":
            given["decoder_input_ids"] = tokens(2, 6)
        with model.memory.product_keys.counting() as usage:
            first = model(**given).logits.square().mean()
            second = model(**{**given, "attention_mask": torch.ones_like(mask)}).logits.mean()
            (first + second).backward()
        gradients = {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}
        rows = [table.grad.coalesce().indices() for table in model.memory.product_keys.tables.parameters()]
        found.append((gradients, rows, dict(model.memory.named_buffers()), usage.layers))
    (gradients, rows, buffers, counts), (again, same_rows, same_buffers, same_counts) = found
    torch.testing.assert_close(again, gradients)
    torch.testing.assert_close(same_buffers, buffers)
    assert all(torch.equal(one, other) for one, other in zip(rows, same_rows, strict=True))
    for number in counts:
        torch.testing.assert_close(dataclasses.asdict(same_counts[number]), dataclasses.asdict(counts[number]), **CLOSE)


def test_a_gradient_that_has_waited_too_long_with_checkpoints_is_told() -> None:
    model = remembering().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    losses = [model(ids).logits.mean() for ids in tokens(9, 1, 12)]
    with pytest.raises(UsageError, match=r"the last 8 forwards, .* call backward\(\) after fewer forwards"):
        sum(losses).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize(("architecture", "layer"), [("gpt2", 1), ("llama", 0), ("t5", 2), ("bart", 3)])
def test_in_training_too_a_later_token_changes_no_earlier_logits(architecture: str, layer: int) -> None:
    model = remembering(architecture, layers=[layer]).train()
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    given = {"input_ids": tokens(3, 6), name: tokens(3, 9)}
    changed = {**given, name: given[name].clone()}
    changed[name][:, -1] = (changed[name][:, -1] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = (model(**inputs).logits for inputs in (given, changed))
    torch.testing.assert_close(after[:, :-1], before[:, :-1], **CLOSE)
    assert not torch.allclose(after[:, -1], before[:, -1])


def test_queries_are_normalised_as_the_model_reads() -> None:
    def kinds(architecture: str, **settings: Any) -> list[str]:
        layers = remembering(architecture, **settings).memory.product_keys.layers.values()
        return [type(layer.norm).__name__ for layer in layers]

    assert kinds("gpt2") == ["HeadLayerNorm"] * 2
    assert kinds("bert") == ["QueryBatchNorm"] * 2
    assert kinds("bart", layers=[0, 3]) == ["QueryBatchNorm", "HeadLayerNorm"]
    assert kinds("gpt2", query_norm="batch") == ["QueryBatchNorm"] * 2
    assert kinds("bart", layers=[3], query_norm="none") == ["NoNorm"]


@pytest.mark.parametrize(("architecture", "norm"), [("gpt2", "layer"), ("gpt2", "batch"), ("llama", "layer")])
def test_rows_generate_together_what_each_does_alone(architecture: str, norm: str) -> None:
    model = remembering(architecture, query_norm=norm, start="normal")
    ids, mask, _ = padded("left", 0)
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS}
    together = model.generate(input_ids=ids, attention_mask=mask, **how)
    for row, real in enumerate(mask.bool()):
        alone = model.generate(input_ids=ids[row : row + 1, real], attention_mask=mask[row : row + 1, real], **how)
        assert torch.equal(together[row, -8:], alone[0, -8:])


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_memory_tokens_in_front_are_real_tokens(architecture: str) -> None:
    ids, mask, positions = padded("right")
    model = mnemic.augment(remembering(architecture), mnemic.MemoryTokens(count=4))
    given = {"input_ids": ids, "attention_mask": mask, **positions}
    with torch.no_grad(), model.memory.product_keys.counting() as usage:
        together = model(**given).logits
    assert {number: figures["reads"] for number, figures in usage.figures().items()} == dict.fromkeys(
        (0, 1), (13 + 2 * 4) * SIZES["heads"] * SIZES["k"]
    )
    with torch.no_grad():
        alone = model(input_ids=ids[1:, :5]).logits
    torch.testing.assert_close(together[1:, :5], alone, **CLOSE)


# Tables, files and copies


def test_one_table_for_all_layers() -> None:
    model = remembering("bert", shared=True, query_norm="layer")
    own, handle = remembering("bert", query_norm="layer"), model.memory.product_keys
    (table,) = handle.tables.parameters()
    assert handle.table(0) is handle.table(1)
    per_table = SIZES["slots"] * model.config.hidden_size
    assert own.num_parameters() - model.num_parameters() == per_table
    with torch.no_grad():
        for number in (0, 1):
            own.memory.product_keys.table(number).weight.copy_(table)
    own.memory.product_keys.layers.load_state_dict(handle.layers.state_dict())
    for each in (model, own):
        each(tokens(2, 7)).logits.square().sum().backward()
    parts = [own.memory.product_keys.table(number).weight.grad.to_dense() for number in (0, 1)]
    torch.testing.assert_close(table.grad.to_dense(), parts[0] + parts[1], rtol=1e-4, atol=1e-4)
    assert all(part.any() for part in parts)


def test_a_shared_table_is_saved_once(tmp_path: Path) -> None:
    model, ids = remembering("bert", shared=True), tokens(2, 7)
    model.save_pretrained(tmp_path)
    loaded = mnemic.load(tmp_path).eval()
    assert [name for name in loaded.state_dict() if "tables" in name] == ["memory.product_keys.tables.shared.weight"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "settings", [{"feed_forward": "renew"}, {"gated": True, "cosine": True}, {"dtype": "bfloat16"}]
)
def test_saved_and_loaded(settings: dict[str, Any], tmp_path: Path) -> None:
    model, ids = remembering("bert", **settings), tokens(2, 7)
    model.save_pretrained(tmp_path)
    loaded = mnemic.load(tmp_path).eval()
    kinds = [{name: tensor.dtype for name, tensor in each.state_dict().items()} for each in (model, loaded)]
    assert kinds[0] == kinds[1]
    assert ("dtype" in settings) == (torch.bfloat16 in kinds[0].values())
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_models_in_one_process_share_nothing() -> None:
    one, other = remembering(), remembering()
    twin, ids = copy.deepcopy(one), tokens(2, 6)
    before = one(ids).logits
    assert torch.equal(twin(ids).logits, before)
    for model in (other, twin):
        with model.memory.product_keys.counting() as usage, torch.no_grad():
            model.train()(ids)
            for tensor in (*model.memory.parameters(), *model.memory.buffers()):
                tensor += 1
        assert usage.figures()[0]["reads"] == 12 * SIZES["heads"] * SIZES["k"]
        with one.memory.product_keys.counting() as mine:
            model(ids)
        assert mine.figures()[0]["reads"] == 0
        assert torch.equal(one(ids).logits, before)
        assert not torch.allclose(model(ids).logits, before)
    twin.memory.detach()
    assert torch.equal(one(ids).logits, before)


@pytest.mark.parametrize(
    ("shape", "layers", "published"),
    [
        ({}, [3, 7], {"base": 110, "PKM": 506, "ResM": 515}),
        (
            {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
            [7, 15],
            {"base": 336, "PKM": 859, "ResM": 876},  # the paper says 340, as the first paper on BERT, and 860
        ),
    ],
    ids=["base", "large"],
)
def test_the_papers_models_have_the_papers_size(shape: Any, layers: list[int], published: dict[str, int]) -> None:
    """Table 1 of arXiv 2010.03881, which counts the heads of pretraining, and not what PKM replaces."""
    config = mnemic.ProductKeys()
    with torch.device("meta"):
        model = BertForPreTraining(BertConfig(**shape))
        memory = Attached(config, layers, model.config.hidden_size, ["batch"] * 2)
    assert config.usual_layers(model.config.num_hidden_layers) == layers

    def millions(*modules: nn.Module) -> float:
        return sum(p.numel() for module in modules for p in module.parameters()) / 1e6

    blocks = [model.bert.encoder.layer[number] for number in layers]
    replaced = millions(*(part for block in blocks for part in (block.intermediate, block.output.dense)))
    sizes = {"base": millions(model), "ResM": millions(model, memory), "PKM": millions(model, memory) - replaced}
    assert {name: round(size) for name, size in sizes.items()} == published
