"""Product keys inside models: against blocks written by hand, with padding, and saved, shared, copied and combined."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

import mnemic
from mnemic.memories.product_keys.attach import Attached
from tests.contract.architectures import VOCABULARY, build

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


def test_a_model_that_was_made_narrow_is_loaded_so(tmp_path: Path) -> None:
    model, ids = remembering("bert", gated=True).to(torch.bfloat16), tokens(2, 7)
    model.save_pretrained(tmp_path)
    loaded = mnemic.load(tmp_path).eval()
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_table_may_stay_in_its_file(tmp_path: Path) -> None:
    model, ids = remembering("bert"), tokens(2, 7)
    model.save_pretrained(tmp_path)
    loaded = mnemic.load(tmp_path, mapped=True).eval()
    place = loaded.memory.product_keys.table(0).weight.data_ptr()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    within = [line for line in maps if int(line[0].split("-")[0], 16) <= place < int(line[0].split("-")[1], 16)]
    assert within[0][-1] == str(tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        before = (tmp_path / "model.safetensors").read_bytes()
        loaded.memory.product_keys.table(0).weight += 1  # of this process alone
    assert (tmp_path / "model.safetensors").read_bytes() == before


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
        memory = Attached(config, layers, model.config.hidden_size, ["batch"] * 2, next(model.parameters()))
    assert config.usual_layers(model.config.num_hidden_layers) == layers

    def millions(*modules: nn.Module) -> float:
        return sum(p.numel() for module in modules for p in module.parameters()) / 1e6

    blocks = [model.bert.encoder.layer[number] for number in layers]
    replaced = millions(*(part for block in blocks for part in (block.intermediate, block.output.dense)))
    sizes = {"base": millions(model), "ResM": millions(model, memory), "PKM": millions(model, memory) - replaced}
    assert {name: round(size) for name, size in sizes.items()} == published


@pytest.mark.filterwarnings("ignore")  # the compiler gives some of its own
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_a_compiled_model_has_its_memory_too(architecture: str) -> None:
    model = remembering(architecture, slots=1024).train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    twin, ids = copy.deepcopy(model), tokens(2, 9)
    compiled = torch.compile(twin, backend="aot_eager")
    with twin.memory.product_keys.counting() as usage:
        outputs = compiled(input_ids=ids, labels=ids)
    assert usage.figures()[0]["reads"] == ids.numel() * 2 * 4
    expected = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(outputs.logits, expected.logits, **CLOSE)
    outputs.loss.backward()
    expected.loss.backward()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense(), **CLOSE)
