"""The augmented model is an ordinary Hugging Face model: Trainer, pipeline, PEFT, saving and loading."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel, Trainer, TrainingArguments, pipeline

import mnemic
from mnemic.errors import DamagedError, UsageError
from tests.contract.architectures import EOS, PAD, VOCABULARY, build


def ids(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def rows(count: int = 16) -> list[dict[str, Any]]:
    """Sequences that count upwards: learnable in a few steps."""
    return [
        {"input_ids": torch.arange(start, start + 12) % 40 + 3, "labels": torch.arange(start, start + 12) % 40 + 3}
        for start in range(count)
    ]


def trainer(model: PreTrainedModel, folder: Path, steps: int, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, learning_rate=5e-3, report_to=[],
        lr_scheduler_type="constant",
        logging_steps=1, use_cpu=True, disable_tqdm=True, save_steps=10, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=rows())


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert", "mnemic-encoder-decoder", "t5"])
def test_trainer_trains_it_and_it_comes_back(architecture: str, tmp_path: Path) -> None:
    model = mnemic.augment(build(architecture), mnemic.MemoryTokens(count=4))
    assert isinstance(model, PreTrainedModel)
    vectors = model.memory.tokens.layer.vectors.detach().clone()
    run = trainer(model, tmp_path / "run", steps=30)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    assert (model.memory.tokens.layer.vectors - vectors).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "saved")
    loaded = mnemic.load(tmp_path / "saved")
    given = {"decoder_input_ids": ids()} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids(), **given).logits, model.eval()(ids(), **given).logits)


@pytest.mark.parametrize("frozen", [False, True])
def test_trainer_resumes_with_its_memory(frozen: bool, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "base")

    def fresh() -> Any:
        base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
        torch.manual_seed(3)
        model = mnemic.augment(base, mnemic.MemoryTokens(count=4))
        if frozen:
            model.requires_grad_(False)
            model.memory.requires_grad_(True)
        return model

    straight, first, second = fresh(), fresh(), fresh()
    trainer(straight, tmp_path / "straight", steps=20).train()
    trainer(first, tmp_path / "stopped", steps=10).train()
    trainer(second, tmp_path / "stopped", steps=20).train(
        resume_from_checkpoint=str(tmp_path / "stopped/checkpoint-10")
    )
    restored = mnemic.load(tmp_path / "stopped/checkpoint-10")
    torch.testing.assert_close(restored.memory.state_dict(), first.memory.state_dict())
    assert (first.memory.tokens.layer.vectors - fresh().memory.tokens.layer.vectors).abs().max() > 1e-3
    torch.testing.assert_close(second.state_dict(), straight.state_dict())


def test_pipeline_generates(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    model = mnemic.augment(build("gpt2"), mnemic.MemoryTokens(count=4))
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    got = write("w5 w6 w7", do_sample=False, return_full_text=False, max_new_tokens=5)[0]["generated_text"]
    tokens = tokenizer("w5 w6 w7", return_tensors="pt")
    expected = model.generate(**tokens, do_sample=False, max_new_tokens=5)[0, 3:]
    assert got.split() == tokenizer.decode(expected).split()


def test_lora_on_top(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = mnemic.augment(build("llama"), mnemic.MemoryTokens(count=4))
    before = model(ids()).logits.detach()
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    torch.testing.assert_close(adapted(ids()).logits, before)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name or ".memory." in name)
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        loss = adapted(ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
    assert loss < adapted(ids(seed=1), labels=ids(seed=1)).loss
    after = adapted(ids()).logits.detach()
    assert (after - before).abs().max() > 0.1
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids()).logits, after, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(mnemic.load(tmp_path / "merged").eval()(ids()).logits, after, rtol=1e-4, atol=1e-4)


def test_sampling_follows_the_seed() -> None:
    model = mnemic.augment(build("llama"), mnemic.MemoryTokens(count=4))

    def sample(seed: int, **options: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.generate(ids(), do_sample=True, max_new_tokens=12, pad_token_id=PAD, eos_token_id=None, **options)

    assert torch.equal(sample(1), sample(1))
    assert torch.equal(sample(1), sample(1, use_cache=False))
    assert not torch.equal(sample(1), sample(2))


def test_gradient_checkpointing_changes_nothing() -> None:
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = mnemic.augment(build("llama"), mnemic.MemoryTokens(count=4)).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids(), labels=ids(), use_cache=False).loss.backward()
        grads.append(model.memory.tokens.layer.vectors.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_the_base_is_written_only_if_it_must_be(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path / "base")

    def load_base() -> Any:
        return transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")

    model = mnemic.augment(load_base(), mnemic.MemoryTokens(count=4))
    with torch.no_grad():
        model.memory.tokens.layer.vectors += 1
    model.save_pretrained(tmp_path / "small")
    assert sorted(p.name for p in (tmp_path / "small").iterdir()) == ["README.md", "memory.json", "model.safetensors"]
    assert (tmp_path / "small/model.safetensors").stat().st_size < 2_000
    with pytest.raises((OSError, ValueError)):  # never a base with random weights
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    with torch.no_grad():
        model.transformer.wpe.weight[5] += 1
    model.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole/config.json").exists()
    assert torch.equal(mnemic.load(tmp_path / "whole").eval()(ids()).logits, model(ids()).logits)
    record = json.loads((tmp_path / "whole/memory.json").read_text())
    assert (record["schema"], record["mnemic"]) == (1, mnemic.__version__)
    (memory,) = record["memories"]
    assert memory.items() >= {"memory": "tokens", "schema": 1, "count": 4, "gated": False}.items()
    card = (tmp_path / "small/README.md").read_text()
    assert "| tokens | count | 4 |" in card
    assert f"base_model: {tmp_path / 'base'}" in card


def test_a_folder_is_checked_before_it_is_believed(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path / "base")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    folder = tmp_path / "saved"
    mnemic.augment(base, mnemic.MemoryTokens(count=4)).save_pretrained(folder)
    with pytest.raises(UsageError, match="trained with other base weights"):
        mnemic.load(folder, base=build("gpt2", seed=5))
    assert mnemic.load(folder, base=build("gpt2", seed=5), check_base=False).memory.configs[0].count == 4
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-3] + b"abc")
    with pytest.raises(DamagedError, match="was altered"):
        mnemic.load(folder)
    (folder / "model.safetensors").write_bytes(weights)
    record = json.loads((folder / "memory.json").read_text())
    for change, message in (
        ({"schema": 99}, "another version"),
        ({"memories": [{"memory": "toknes"}]}, "did you mean 'tokens'"),
        ({"memories": [{"memory": "tokens", "cuont": 3}]}, "did you mean 'count'"),
        ({"checksums": {"../base/model.safetensors": "x"}}, "points outside"),
    ):
        (folder / "memory.json").write_text(json.dumps(record | change))
        with pytest.raises(UsageError, match=message):
            mnemic.load(folder)
    (folder / "memory.json").write_text("{")
    with pytest.raises(DamagedError, match="is damaged"):
        mnemic.load(folder)
    with pytest.raises(UsageError, match="holds no augmented model"):
        mnemic.load(tmp_path)


def test_wrong_arguments_are_said_in_one_sentence() -> None:
    with pytest.raises(UsageError, match="takes a transformers PreTrainedModel, not Linear"):
        mnemic.augment(torch.nn.Linear(2, 2), mnemic.MemoryTokens())
    with pytest.raises(UsageError, match="one or more memories"):
        mnemic.augment(build("gpt2"))
    model = mnemic.augment(build("gpt2"), mnemic.MemoryTokens())
    with pytest.raises(UsageError, match="tokens was given twice"):
        mnemic.augment(model, mnemic.MemoryTokens())


def test_saving_keeps_what_else_is_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    model = mnemic.augment(build("gpt2"), mnemic.MemoryTokens())
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".mnemic")]


def test_loading_is_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mnemic.augment(build("gpt2"), mnemic.MemoryTokens()).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        mnemic.load(tmp_path)
    assert not caplog.records


def test_a_new_process_loads_our_own_backbone(tmp_path: Path) -> None:
    mnemic.augment(build("mnemic-rotary"), mnemic.MemoryTokens()).save_pretrained(tmp_path)
    script = f"import mnemic; print(type(mnemic.load({str(tmp_path)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "MnemicDecoderForCausalLM"


def test_verbs_are_functions_and_packages_in_any_order() -> None:
    import mnemic.augment as module

    assert callable(mnemic.augment)
    assert mnemic.augment is module
    assert mnemic.augment(build("gpt2"), mnemic.MemoryTokens()).memory is not None


def test_a_memory_trains_or_tests_as_its_model_does() -> None:
    for training in (True, False):
        model = build("gpt2").train(training)
        mnemic.augment(model, mnemic.OutputMemory())
        assert model.memory.output.training is training
