"""The output memory in generation: all tokens so far are its local memory, whatever the attention still sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mnemic
from mnemic.hf.keys import Ear
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from tests.contract.architectures import EOS, PAD, VOCABULARY, build
from tests.unit.memories.test_output import mixture, score

LENGTH, PIECE, WINDOW = 30, 5, 8  # of the text, of what is read at a time, and of what the attention sees


def text(rows: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def base(architecture: str) -> Any:
    if architecture != "xl cache":
        return build(architecture).double()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.25}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS}
    return MnemicDecoderForCausalLM(MnemicDecoderConfig(**shape, **tokens, xl_length=WINDOW)).double().eval()


def augmented(architecture: str, **options: Any) -> Any:
    return mnemic.augment(base(architecture), mnemic.OutputMemory(**options)).eval()


def read(model: Any, ids: Tensor, sizes: list[int]) -> Tensor:
    """The logits of a text that is read in pieces of these sizes through a KV cache."""
    cache, logits = None, []
    for piece in ids.split(sizes, 1):
        result = model(piece, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        logits.append(result.logits)
    return torch.cat(logits, 1)


def naive(model: Any, ids: Tensor, sizes: list[int]) -> Tensor:
    """The distributions (T, V) of one text with all pairs before each token, its keys those of the same reading."""
    ear = Ear.at_key(model.memory._places, "ffn")
    with model.memory.disabled(), ear.listening() as heard:
        logits = read(model, ids, sizes)[0]
    ear.close()
    keys, config = torch.cat([key.reshape(-1, key.shape[-1]) for key in heard]), model.memory.output.config
    rows = []
    for t in range(ids.shape[1]):
        pairs = [(score(keys[t], keys[j], config), int(ids[0, j + 1])) for j in range(t)]
        rows.append(mixture(logits[t], float(logits[t].logsumexp(-1)), pairs, config))
    return torch.stack(rows)


@pytest.mark.parametrize("piece", [1, PIECE, LENGTH])
@pytest.mark.parametrize("architecture", ["gpt2", "mistral", "gemma3", "xl cache"])
@torch.no_grad()
def test_all_tokens_so_far_are_a_memory_whatever_the_attention_sees(architecture: str, piece: int) -> None:
    model, ids = augmented(architecture, long=3, weight=0.3), text()
    sizes = [piece] * (LENGTH // piece)
    found, wanted = read(model, ids, sizes)[0].softmax(-1), naive(model, ids, sizes)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("architecture", ["gpt2", "mistral", "xl cache"])
@torch.no_grad()
def test_generate_has_the_memory_of_prompt_and_answer(architecture: str) -> None:
    model, new = augmented(architecture, long=3), 6
    how: dict[str, Any] = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    if architecture == "xl cache":
        how["past_key_values"] = model.new_cache(1)
    answer = model.generate(text(), min_new_tokens=new, max_new_tokens=new, **how)
    wanted = naive(model, answer.sequences[:, :-1], [LENGTH, *[1] * (new - 1)])[-new:]
    found = torch.cat(answer.scores).double().softmax(-1)
    wanted[:, EOS] = 0  # the answer may not end
    torch.testing.assert_close(found, wanted / wanted.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", [{"use_cache": False}, {}, {"num_beams": 3}], ids=["no cache", "greedy", "beam"])
@pytest.mark.parametrize("architecture", ["gpt2", "mistral"])
def test_long_is_without_effect_in_generate(architecture: str, how: dict[str, Any]) -> None:
    how = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9, **how}
    how |= {"output_scores": True, "return_dict_in_generate": True}

    def generated(**options: Any) -> Any:
        return augmented(architecture, weight=0.3, **options).generate(text(2), **how)

    local, both, long = generated(), generated(long=10), generated(long=10, local=False)
    plain = base(architecture).generate(text(2), **how)
    for one, other in ((local, both), (plain, long)):
        assert torch.equal(one.sequences, other.sequences)
        assert all(torch.equal(*scores) for scores in zip(one.scores, other.scores, strict=True))
    assert not torch.equal(local.scores[0], plain.scores[0])
