"""Recurrent memory tokens: what they write behind one segment is the memory before the next."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.errors import UnsupportedModel, UsageError
from mnemic.memories.tokens.recurrence import Carried
from tests.contract.architectures import ARCHITECTURES, VOCABULARY, build

COUNT = 3
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
CAUSAL = [name for name in ARCHITECTURES if build(name).can_generate() and not build(name).config.is_encoder_decoder]
APART = [name for name in CAUSAL if name not in ("bloom", "falcon-alibi")]  # which keep documents in a row apart
XL = ["mnemic-t5+xl", "mnemic-xl+xl", "mnemic-rotary+xl", "mnemic-sru"]

every_architecture = pytest.mark.parametrize("architecture", CAUSAL)


def made(architecture: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A tiny model with a memory; of architectures with a `+xl`, with an XL cache."""
    name, _, xl = architecture.partition("+")
    model = build(name)
    if xl:
        model.config.xl_length = 6
    torch.manual_seed(1)
    model = mnemic.augment(model.to(dtype), mnemic.MemoryTokens.recurrent(count=COUNT, **settings)).to(dtype)
    return model.eval()


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


class Reader:
    """Reads one segment after the other, as training and evaluation do."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model, self.states = model, model.memory.new_state(rows)
        self.cache = model.memory.new_cache(rows) if model.memory.xl_length else None

    @property
    def state(self) -> Carried:
        found: Carried = self.states["tokens"]
        return found

    def read(self, tokens: Tensor, starts: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The losses of each next token within the segment, (B, T - 1)."""
        given: dict[str, Any] = {"attention_mask": mask} if mask is not None else {}
        if self.cache is not None:
            given |= {"past_key_values": self.cache, "use_cache": True}
        targets = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
        losses: Tensor
        losses, _ = self.model.token_losses(
            targets, input_ids=tokens, memory_state=self.states, document_starts=starts, **given
        )
        return losses


def starting(shape: tuple[int, int], *places: tuple[int, int]) -> Tensor:
    starts = torch.zeros(shape, dtype=torch.bool)
    for row, column in places:
        starts[row, column] = True
    return starts


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "mnemic-rotary", "mnemic-sinusoidal"])
def test_segments_are_read_as_the_formula_says(architecture: str) -> None:
    """[M_t ; X_t ; M_t] given to the base by hand, in float64; M_{t+1} = M_1 + s H / rms(H), H what comes out."""
    model, base = made(architecture, torch.float64), build(architecture).double()
    layer, text = model.memory.tokens.layer, ids(2, 21)
    reader, memory = Reader(model, 2), layer.vectors.expand(2, -1, -1)
    positions = torch.arange(-COUNT, 7 + COUNT).expand(2, -1)
    if architecture == "gpt2":
        positions = positions.clamp(0, 6)
    with torch.no_grad():
        for begin in (0, 7, 14):
            segment = text[:, begin : begin + 7]
            embedded = base.base_model.get_input_embeddings()(segment)
            everything = torch.cat([memory, embedded, memory], 1)
            given = {"inputs_embeds": everything, "attention_mask": torch.ones(2, 7 + 2 * COUNT)}
            states = base.base_model(**given, position_ids=positions, use_cache=False).last_hidden_state
            logits = base.get_output_embeddings()(states[:, COUNT:-COUNT])
            expected = -logits.log_softmax(-1).gather(2, segment.roll(-1, 1).unsqueeze(2)).squeeze(2)
            torch.testing.assert_close(reader.read(segment), expected, **EXACT)
            written = states[:, -COUNT:]
            torch.testing.assert_close(reader.state.written, written, **EXACT)
            memory = layer.vectors + layer.scale * written / written.square().mean(-1, keepdim=True).sqrt()


@every_architecture
def test_later_segments_know_the_first_and_what_stands_behind_one_changes_nothing_in_it(architecture: str) -> None:
    model, text = made(architecture), ids(2, 24)
    other = text.clone()
    other[:, 2] = (other[:, 2] + 1) % VOCABULARY
    with torch.no_grad():
        first, second = Reader(model, 2), Reader(model, 2)
        plain = model(input_ids=text[:, :8]).logits.float().log_softmax(-1)
        expected = -plain.gather(2, text[:, :8].roll(-1, 1).unsqueeze(2)).squeeze(2)
        torch.testing.assert_close(first.read(text[:, :8]), expected, **CLOSE)
        second.read(other[:, :8])
        for begin in (8, 16):
            piece = slice(begin, begin + 8)
            assert (first.read(text[:, piece]) - second.read(other[:, piece])).abs().max() > 1e-4


@pytest.mark.parametrize("architecture", APART + XL)
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_documents_back_to_back_are_documents_apart(architecture: str, gated: bool) -> None:
    """A document that begins within a segment starts with a new memory, and its own is what goes on."""
    model, text = made(architecture, torch.float64, gated=gated), ids(2, 20)
    if gated:
        model.memory.tokens.layer.gate.data = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    borders = {0: (4, 13), 1: (10,)}
    with torch.no_grad():
        together = Reader(model, 2)
        starts = [starting((2, 10), (0, 0), (1, 0), (0, 4)), starting((2, 10), (0, 3), (1, 0))]
        found = torch.cat([together.read(text[:, i * 10 : i * 10 + 10], starts[i]) for i in (0, 1)], 1)
        for row, inner in borders.items():
            cuts = (0, *inner, 20)
            for begin, end in itertools.pairwise(cuts):
                alone, first = Reader(model, 1), True
                stops = sorted({begin, end, *(stop for stop in (10,) if begin < stop < end)})
                for a, b in itertools.pairwise(stops):
                    losses = alone.read(text[row : row + 1, a:b], starting((1, b - a), (0, 0)) if first else None)
                    kept = slice(0, b - a - 1)  # the last target is another's where a document is cut
                    torch.testing.assert_close(found[row, a:b][kept], losses[0][kept], **CLOSE)
                    first = False


@pytest.mark.parametrize("architecture", CAUSAL + XL[:3])
def test_padding_behind_a_segment_is_not_read(architecture: str) -> None:
    model, text = made(architecture), ids(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    mask[0, :] = 1
    with torch.no_grad():
        padded, alone, nothing = Reader(model, 2), Reader(model, 1), Reader(model, 2)
        padded.read(text, mask=mask)
        alone.read(text[1:, :5])
        torch.testing.assert_close(padded.state.written[1:], alone.state.written, **CLOSE)
        nothing.read(text)
        before, absent = nothing.state.written.clone(), torch.tensor([[1] * 8, [0] * 8])
        nothing.read(text, mask=absent)
        assert torch.equal(nothing.state.written[1], before[1])
        assert (nothing.state.written[0] - before[0]).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ["bloom", "falcon-alibi"])
def test_models_that_cannot_keep_documents_apart_begin_anew_with_the_next_segment(architecture: str) -> None:
    model, text = made(architecture), ids(2, 16)
    with torch.no_grad():
        reader, fresh = Reader(model, 2), Reader(model, 2)
        reader.read(text[:, :8], starting((2, 8), (0, 0), (1, 0), (1, 5)))
        assert reader.state.begun.tolist() == [True, False]
        later, new = reader.read(text[:, 8:], starting((2, 8))), fresh.read(text[:, 8:], starting((2, 8)))
        assert (later[0] - new[0]).abs().max() > 1e-4
        torch.testing.assert_close(later[1], new[1], **CLOSE)
        again = Reader(model, 2)
        again.read(text[:, :8])
        torch.testing.assert_close(again.read(text[:, 8:], starting((2, 8), (0, 0), (1, 0))), new, **CLOSE)


def gradient_of_first(model: Any, text: Tensor, cut: int | None) -> Tensor:
    """What the loss of the third segment has to say of the embeddings of the first."""
    table = model.get_input_embeddings().weight
    model.zero_grad()
    reader = Reader(model, 1)
    for number in range(3):
        if number == cut:
            reader.state.detach()
        loss = reader.read(text[:, number * 6 : number * 6 + 6]).sum()
    loss.backward()
    found: Tensor = table.grad[text[0, :6].unique()]
    return found


@pytest.mark.parametrize("architecture", ["gpt_neox", "llama", "mnemic-rotary", "mnemic-xl+xl"])
def test_the_gradient_goes_back_as_far_as_it_is_let_and_no_further(architecture: str) -> None:
    model = made(architecture)
    first, later = torch.arange(3, 9), torch.arange(9, 21)
    text = torch.cat([first, later])[None]
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight.clone())
    assert (gradient_of_first(model, text, cut=None).abs().sum(1) > 1e-6).all()
    for cut in (1, 2):
        assert torch.equal(gradient_of_first(model, text, cut), torch.zeros(6, 32))


def test_the_gradient_through_segments_is_right() -> None:
    model, text = made("mnemic-rotary", torch.float64), ids(2, 18)
    starts = [starting((2, 6), (0, 0), (1, 0)), starting((2, 6), (1, 2)), starting((2, 6))]

    def value() -> Tensor:
        reader = Reader(model, 2)
        return torch.stack([reader.read(text[:, i * 6 : i * 6 + 6], starts[i]) for i in range(3)])[2].sum()

    value().backward()
    for name, parameter in model.memory.named_parameters():
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)).double()
        slopes = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter += step * direction
                slopes.append(value().item())
                parameter -= step * direction
        expected = (slopes[0] - slopes[1]) / 2e-6
        assert (parameter.grad * direction).sum().item() == pytest.approx(expected, rel=1e-5), name


def test_layers_that_run_again_for_their_gradient_give_the_same() -> None:
    def gradients(checkpoint: bool) -> list[Tensor]:
        model = made("llama", torch.float64).train()
        if checkpoint:
            model.gradient_checkpointing_enable()
        reader, text = Reader(model, 2), ids(2, 12)
        losses = reader.read(text[:, :6]), reader.read(text[:, 6:], starting((2, 6), (1, 3)))
        sum(part.sum() for part in losses).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected, **EXACT)


@every_architecture
def test_what_was_read_is_before_every_later_forward(architecture: str) -> None:
    model, text, prompt = made(architecture, segment=8), ids(1, 16), ids(2, 5, seed=3)
    new = model(input_ids=prompt).logits
    model.memory.read(text)
    read, written = model(input_ids=prompt).logits, model.memory.tokens.shared.written
    assert (read - new).abs().max() > 1e-3
    model.memory.reset()
    assert torch.equal(model(input_ids=prompt).logits, new)
    reader = Reader(model, 1)
    reader.cache = None  # an XL cache is no part of what a memory reads
    for begin in (0, 8):
        reader.read(text[:, begin : begin + 8])
    torch.testing.assert_close(reader.state.written, written, **CLOSE)
    model.memory.read(text[:, :8])
    model.memory.read(text[:, 8:])
    torch.testing.assert_close(model(input_ids=prompt).logits, read, **CLOSE)
    kept = model.memory.state()
    model.memory.reset()
    model.memory.load_state(kept)
    torch.testing.assert_close(model(input_ids=prompt).logits, read, **CLOSE)


@every_architecture
def test_texts_of_different_lengths_are_read_beside_each_other(architecture: str) -> None:
    model, texts, prompt = made(architecture, segment=4), ids(2, 10), ids(2, 5, seed=3)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    model.memory.read(texts, mask)
    together = model(input_ids=prompt).logits
    model.memory.reset()
    for row, length in ((0, 10), (1, 6)):
        model.memory.reset()
        model.memory.read(texts[row : row + 1, :length])
        torch.testing.assert_close(together[row : row + 1], model(input_ids=prompt[row : row + 1]).logits, **CLOSE)


def test_an_attention_memory_beside_them_keeps_tokens_alone() -> None:
    torch.manual_seed(0)
    both = mnemic.augment(
        build("llama"), mnemic.KNNAttention(layers=[1], k=4, size=50), mnemic.MemoryTokens.recurrent()
    )
    reader, text = Reader(both.eval(), 2), ids(2, 12)
    with torch.no_grad():
        reader.read(text[:, :6], starting((2, 6), (0, 0), (1, 2)))
        row, second = reader.states["attention"].memories[1].rows
        assert (row.count, second.count) == (6, 4)
        reader.read(text[:, 6:], starting((2, 6)))
        assert (row.count, second.count) == (12, 10)


def test_an_output_memory_beside_them_has_keys_of_tokens_alone() -> None:
    for name in ("llama", "opt"):
        torch.manual_seed(0)
        both = mnemic.augment(
            build(name), mnemic.OutputMemory(local=True, long=50), mnemic.MemoryTokens.recurrent(count=COUNT)
        ).eval()
        apart = mnemic.augment(build(name), mnemic.OutputMemory(local=True, long=50)).eval()
        with torch.no_grad():
            both.memory.tokens.layer.vectors.zero_()
            keys, expected = [], []
            for model, found in ((both, keys), (apart, expected)):
                states = model.memory.new_state(2)
                model.token_losses(ids(2, 6).roll(-1, 1), input_ids=ids(2, 6), memory_state=states)
                found.append(states["output"].keys)
        assert keys[0].shape == expected[0].shape == (2, 6, 32)


@pytest.mark.parametrize("architecture", XL)
def test_an_xl_cache_keeps_nothing_of_the_memory(architecture: str) -> None:
    model, text = made(architecture), ids(2, 16)
    with torch.no_grad():
        reader = Reader(model, 2)
        reader.read(text[:, :8])
        plain = model.memory.new_cache(2)
        model(input_ids=text[:, :8], past_key_values=plain, use_cache=True)
        mine = reader.cache.tensors()
        for name, expected in plain.tensors().items():
            torch.testing.assert_close(mine[name], expected, **CLOSE, msg=name)


def test_rows_can_be_chosen_and_saved() -> None:
    state = Carried(3, torch.zeros(2, 4))
    state.write(torch.arange(24.0).view(3, 2, 4), ended=torch.tensor([False, True, False]))
    assert state.begun.tolist() == [True, False, True]
    state.batch_select_indices(torch.tensor([2, 1]))
    twin = Carried(2, torch.zeros(2, 4))
    twin.load_tensors(state.tensors())
    assert torch.equal(twin.written, state.written)
    assert twin.begun.tolist() == [True, False]
    with pytest.raises(UsageError, match="another number or width"):
        Carried(2, torch.zeros(3, 4)).load_tensors(state.tensors())


def test_a_forward_that_carries_nothing_reads_the_new_memory() -> None:
    """Evaluation in between does not touch what training carries, nor what was read."""
    model, text = made("llama"), ids(2, 12)
    with torch.no_grad():
        reader = Reader(model, 2)
        reader.read(text[:, :6])
        before = reader.state.written.clone()
        other = Reader(model, 4)
        other.read(ids(4, 6, seed=8))
        model(input_ids=text)
        model.generate(input_ids=text, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.equal(reader.state.written, before)
        assert model.memory.tokens.shared is None


def test_a_memory_of_another_size_reads_anew() -> None:
    model = made("llama", segment=8)
    model.memory.read(ids(1, 16))
    model.memory.change("tokens", count=5)
    assert model.memory.tokens.shared is None
    assert model(input_ids=ids(1, 4)).logits.isfinite().all()


def test_what_cannot_be_is_said() -> None:
    for settings in ({"variant": "control"}, {"place": "both"}, {"pool": True}):
        with pytest.raises(UsageError, match="segment = 128 is for causal models"):
            mnemic.MemoryTokens.recurrent(**settings)
    with pytest.raises(UnsupportedModel, match="is not causal"):
        made("bert")
    model = made("llama")
    with pytest.raises(UsageError, match="read segments without past_key_values"):
        Reader(model, 1).model.token_losses(
            ids(1, 4),
            input_ids=ids(1, 4),
            memory_state=model.memory.new_state(1),
            past_key_values=model(input_ids=ids(1, 1), use_cache=True).past_key_values.__class__(),
        )
    with model.memory.disabled(), pytest.raises(UsageError, match="outside of disabled"):
        model.memory.read(ids(1, 4))
    with pytest.raises(UsageError, match="the tokens of a segment, or 0"):
        mnemic.MemoryTokens.recurrent(segment=-1)
    with pytest.raises(UsageError, match="only their count can be changed"):
        model.memory.change("tokens", segment=0)
    for rows in (1, 3):
        with pytest.raises(UsageError, match=f"a state of {rows} rows for a batch of 2"):
            model.token_losses(ids(2, 4), input_ids=ids(2, 4), memory_state=model.memory.new_state(rows))
    model.memory.read(ids(2, 4))
    with pytest.raises(UsageError, match="read one text for all"):
        model(input_ids=ids(3, 4))
    with pytest.raises(UsageError, match="as many texts"):
        model.memory.read(ids(1, 4))


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_new_document_finds_nothing_of_the_one_before_through_the_memory(recurrent: bool) -> None:
    """Below the last layer an attention memory gives memory tokens what the next layer reads in them."""
    tokens = mnemic.MemoryTokens.recurrent(count=COUNT) if recurrent else mnemic.MemoryTokens(count=COUNT)
    torch.manual_seed(1)
    model = mnemic.augment(build("llama"), mnemic.KNNAttention(layers=[0], k=4, size=50), tokens).eval()
    for starts, same in ((starting((1, 8), (0, 0)), slice(0, 7)), (starting((1, 8), (0, 3)), slice(3, 7))):
        found = []
        for seed in (5, 6):
            reader = Reader(model, 1)
            with torch.no_grad():
                reader.read(ids(1, 8, seed=seed), starting((1, 8), (0, 0)))
                found.append(reader.read(ids(1, 8), starts))
        torch.testing.assert_close(found[0][:, same], found[1][:, same])
        assert not torch.equal(found[0], found[1]) or same.start == 0


def test_memories_read_a_text_together() -> None:
    """As evaluation reads it, in whichever order they were put in."""
    attention, tokens = mnemic.KNNAttention(layers=[1], k=4, size=100), mnemic.MemoryTokens.recurrent(segment=8)
    found = []
    for order in ((attention, tokens), (tokens, attention)):
        model = mnemic.augment(build("llama"), *order).eval()
        vectors = model.memory.tokens.layer.vectors
        vectors.data = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(0))
        model.memory.read(ids(1, 24))
        found.append(model(input_ids=ids(1, 5, seed=3)).logits)
        written = model.memory.tokens.shared.written
        model.memory.reset()
        reader = Reader(model, 1)
        with torch.no_grad():
            for begin in (0, 8, 16):
                reader.read(ids(1, 24)[:, begin : begin + 8])
        torch.testing.assert_close(reader.state.written, written, **CLOSE)
    torch.testing.assert_close(found[0], found[1], **CLOSE)


def test_packed_rows_are_documents_too() -> None:
    model, positions, found = made("llama"), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), []
    for seed in (5, 6):
        reader = Reader(model, 1)
        with torch.no_grad():
            reader.read(ids(1, 8, seed=seed))
            given = {"input_ids": ids(1, 8), "position_ids": positions, "memory_state": reader.states}
            found.append(model.token_losses(ids(1, 8).roll(-1, 1), **given)[0])
    assert torch.equal(found[0], found[1])  # both documents begin anew


def test_positions_may_be_given_with_an_xl_cache_and_no_mask() -> None:
    model, text, found = made("mnemic-rotary+xl"), ids(1, 8), []
    for given in ({}, {"position_ids": torch.arange(8)[None]}):
        states, cache = model.memory.new_state(1), model.memory.new_cache(1)
        options = {"memory_state": states, "past_key_values": cache, "use_cache": True}
        found.append(model.token_losses(text, input_ids=text, **options, **given)[0])
    torch.testing.assert_close(found[0], found[1])


def test_every_parameter_takes_part_in_a_plain_forward() -> None:
    model = made("llama")
    model(input_ids=ids(2, 8), labels=ids(2, 8)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.memory.parameters())
    assert model.memory.tokens.layer.scale.grad.abs().sum() == 0


def test_a_refused_state_leaves_what_was_read() -> None:
    model = made("llama", segment=8)
    model.memory.read(ids(1, 8))
    before = model(input_ids=ids(1, 4)).logits
    with pytest.raises(UsageError, match="another number or width"):
        model.memory.load_state({"tokens.written": torch.zeros(2, 1, 32), "tokens.begun": torch.ones(2).bool()})
    assert torch.equal(model(input_ids=ids(1, 4)).logits, before)


def test_a_lesion_leaves_nothing_to_carry() -> None:
    model = made("llama", segment=8)
    model.memory.change("tokens", count=0)
    with torch.no_grad():
        reader = Reader(model, 2)
        reader.read(ids(2, 8))
        found = reader.read(ids(2, 8, seed=1), starting((2, 8), (1, 3)))
        with model.memory.disabled():
            plain = Reader(model, 2).read(ids(2, 8, seed=1), starting((2, 8), (1, 3)))
    torch.testing.assert_close(found, plain)


def test_what_was_read_is_before_documents_that_are_scored() -> None:
    model, text = made("llama", segment=8), ids(2, 8)
    with torch.no_grad():
        new = Reader(model, 2).read(text, starting((2, 8), (0, 0), (1, 0), (1, 4)))
        model.memory.read(ids(1, 16, seed=9))
        read = Reader(model, 2).read(text, starting((2, 8), (0, 0), (1, 0), (1, 4)))
    assert ((new - read)[:, :4].abs().amax(1) > 1e-4).all()
    assert (new - read)[1, 4:].abs().max() > 1e-4


def test_a_store_is_not_built_of_what_goes_from_segment_to_segment(tmp_path: Any) -> None:
    tokenizer = mnemic.train_tokenizer([], "byte")
    (tmp_path / "text.txt").write_text("a text that is long enough")
    model = made("llama")
    with pytest.raises(UsageError, match="windows that are read alone"):
        mnemic.build_store(model, tokenizer, str(tmp_path), tmp_path / "rows.store")
