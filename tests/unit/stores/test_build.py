"""Building a store: the same rows however often it is stopped, and nothing but what belongs together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import mnemic
import mnemic.stores.encode
from mnemic.data import Document, train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.errors import DamagedError, MnemicError, UsageError
from mnemic.stores import References, StoreConfig, Where, open_store
from mnemic.stores.build import Build, add_to_store
from mnemic.stores.build_config import BuildConfig
from mnemic.stores.origin import check_origin
from mnemic.stores.progress import Mark, Progress
from tests.unit.stores.building import (
    BYTES,
    TEXTS,
    Stop,
    assert_same_rows,
    built,
    corpus,
    everything,
    own_rows,
    small,
    tokens_of,
)


def build(path: Path, model: Any, stop_after: int | None = None, monkeypatch: Any = None, **options: Any) -> int:
    """Builds into a store on disk, stopped before batch `stop_after` if given; how many batches were encoded."""
    real, calls = mnemic.stores.encode.encode_group, 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls == stop_after:
            raise Stop
        calls += 1
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(mnemic.stores.encode, "encode_group", counting)
        settings = {"window": 8, "batch_size": 2, "commit_rows": 20, **options}
        try:
            mnemic.build_store(model, BYTES, corpus(), path, **settings).close()
        except Stop:
            assert stop_after is not None
    return calls


@pytest.mark.parametrize("options", [{}, {"max_probability": 0.004}, {"keys": "float32", "layer": "output"}])
def test_stopped_anywhere_and_resumed_gives_the_same_rows(tmp_path: Path, monkeypatch: Any, options: Any) -> None:
    model = small()
    batches = build(tmp_path / "whole", model, monkeypatch=monkeypatch, **options)
    assert batches > 8
    whole = open_store(tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("*.values"))) == 1, "what was committed in parts is put together"
    assert 20 < len(whole) < 128 or (len(whole) == 128 and "max_probability" not in options)
    for stop in range(batches):
        path = tmp_path / str(stop)
        assert build(path, model, stop, monkeypatch, **options) == stop
        rest = build(path, model, monkeypatch=monkeypatch, **options)
        with open_store(path) as resumed:
            assert_same_rows(resumed, whole)
    assert 0 < rest <= batches // 2, "what was committed is not encoded again"


def test_resuming_again_and_again(tmp_path: Path, monkeypatch: Any) -> None:
    model, path = small(), tmp_path / "often"
    build(tmp_path / "whole", model, monkeypatch=monkeypatch)
    for _ in range(20):
        build(path, model, 4, monkeypatch)
    with open_store(path) as often, open_store(tmp_path / "whole") as whole:
        assert_same_rows(often, whole)


def test_a_finished_build_does_nothing_but_say_so(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    model = small()
    build(tmp_path / "s", model, monkeypatch=monkeypatch)
    with open_store(tmp_path / "s") as store:
        store.add(np.ones((1, 16)), [1], References.of("other", [0], "bob"))
        store.commit()
        store.delete("bob")
        store.commit()
        before = store.summary()
    files = {file.name: file.read_bytes() for file in (tmp_path / "s").iterdir()}
    assert sum(name.startswith("manifest") for name in files) == 3
    assert build(tmp_path / "s", model, monkeypatch=monkeypatch) == 0
    assert "is finished: 128 rows; nothing to do" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in (tmp_path / "s").iterdir()} == files
    with (
        mnemic.build_store(model, BYTES, corpus(), tmp_path / "s", window=8, batch_size=2) as finished,
        open_store(tmp_path / "s") as store,
    ):
        assert finished.summary() == store.summary() == before
        store.delete("nobody")  # takes the lock, which the one who only opened it has not


def test_ctrl_c_commits_what_is_done(tmp_path: Path, monkeypatch: Any) -> None:
    import os
    import signal

    real = mnemic.stores.encode.encode_group

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(mnemic.stores.encode, "encode_group", interrupted)
        with pytest.raises(KeyboardInterrupt, match="the same call goes on"):
            mnemic.build_store(small(), BYTES, corpus(), tmp_path / "s", window=8)
    with open_store(tmp_path / "s") as store:
        assert 0 < len(store) < 128
    build(tmp_path / "s", small(), monkeypatch=monkeypatch, batch_size=8)
    build(tmp_path / "whole", small(), monkeypatch=monkeypatch, batch_size=8)
    with open_store(tmp_path / "s") as store, open_store(tmp_path / "whole") as whole:
        assert_same_rows(store, whole)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"resume": False}, r"already holds \d+ rows: go on with resume = true \(--resume\), or choose another path"),
        ({"model": small(1)}, "were made by another model"),
        ({"tokenizer": train_tokenizer(corpus().documents("train"), "bpe", 259)}, "were made by another tokenizer"),
        ({"corpus": corpus({**TEXTS, "a.txt": "changed"})}, "the text of tiny is not what it was"),
        ({"window": 16}, r"window = 16 \(was 8\)"),
        ({"batch_size": 3}, r"batch_size = 3 \(was 2\)"),
        ({"namespace": "other"}, r"namespace = 'other' \(was 'default'\)"),
        ({"layer": "output"}, r"layer = 'lm_head' \(was 'model.layers.1.mlp'\)"),
        ({"max_probability": 0.5}, r"max_probability = 0.5 \(was 1.0\)"),
        ({"metric": "ip"}, "was made with metric = 'l2', not 'ip'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_only_the_same_build_goes_on(tmp_path: Path, monkeypatch: Any, change: dict[str, Any], sentence: str) -> None:
    build(tmp_path / "s", small(), 5, monkeypatch)
    model, tokenizer, text = (
        change.pop("model", small()),
        change.pop("tokenizer", BYTES),
        change.pop("corpus", corpus()),
    )
    with pytest.raises(UsageError, match=sentence):
        mnemic.build_store(model, tokenizer, text, tmp_path / "s", **{"window": 8, "batch_size": 2, **change})
    build(tmp_path / "s", small(), monkeypatch=monkeypatch)  # nothing was changed, and the lock was let go


def test_another_memory_is_another_model(tmp_path: Path) -> None:
    model = mnemic.augment(small(), mnemic.MemoryTokens(count=2))
    mnemic.build_store(model, BYTES, corpus(), tmp_path / "s").close()
    with pytest.raises(UsageError, match="other memories in the model"):
        mnemic.build_store(small(), BYTES, corpus(), tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        check_origin(store, model, BYTES, [])
        with pytest.raises(UsageError, match="other memories in the model"):
            check_origin(store, small(), BYTES, [])
        check_origin(store, small(), BYTES, ["model"])


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_probability": 0.004}])
def test_other_texts_added_in_between_do_no_harm(
    tmp_path: Path, monkeypatch: Any, options: Any, forgotten: bool
) -> None:
    model, path = small(), tmp_path / "s"
    (tmp_path / "other.txt").write_text("quite another text. " * 20)
    build(tmp_path / "whole", model, monkeypatch=monkeypatch, **options)
    for visit in range(6):  # the first one comes to an empty store, the last ones to a finished one
        build(path, model, 6 if visit else 0, monkeypatch, commit_rows=10, **options)
        with open_store(path) as store:
            add_to_store(store, model, BYTES, str(tmp_path / "other.txt"), namespace=f"visit {visit}")
            if forgotten:
                store.delete(f"visit {visit}")
                store.compact()
    assert build(path, model, monkeypatch=monkeypatch, **options) == 0
    assert own_rows(path) == own_rows(tmp_path / "whole")
    with open_store(path) as store:
        assert len(store.summary().namespaces) == (1 if forgotten else 7)


def test_documents_of_the_same_name(tmp_path: Path, monkeypatch: Any) -> None:
    documents = [Document(f"doc{number % 2}", f"the text number {number}") for number in range(6)]
    named = Corpus("named", {"train": lambda: documents})
    monkeypatch.setattr("tests.unit.stores.test_build.corpus", lambda: named)
    options = {"max_probability": 0.004}
    batches = build(tmp_path / "whole", small(), monkeypatch=monkeypatch, **options)
    for stop in range(batches):
        build(tmp_path / str(stop), small(), stop, monkeypatch, **options)
        build(tmp_path / str(stop), small(), monkeypatch=monkeypatch, **options)
        assert own_rows(tmp_path / str(stop)) == own_rows(tmp_path / "whole")


@pytest.mark.parametrize("added", [0, 5, 30, 200])
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_plan_that_was_not_carried_out(tmp_path: Path, monkeypatch: Any, added: int, forgotten: bool) -> None:
    """Killed between the record and the commit; then rows that nobody has announced may have taken its numbers."""
    path, real = tmp_path / "s", Progress.write

    def killed(self: Progress, done: Mark, planned: Mark) -> None:
        real(self, done, planned)
        if done != planned and done.batches:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "write", killed)
        with pytest.raises(Stop):
            mnemic.build_store(small(), BYTES, corpus(), path, window=8, batch_size=2, commit_rows=20)
    with open_store(path) as store:
        done, planned = Progress(store).read() or pytest.fail("there is no record")
        assert store.next_id == done.next_id < planned.next_id
        store.add(np.ones((added, 16)), np.ones(added, int), References.of("a.txt", np.arange(added), "bob"))
        store.commit()
        if forgotten:
            store.delete("bob")
            store.compact()
    build(tmp_path / "whole", small(), monkeypatch=monkeypatch)
    if forgotten and done.next_id + added >= planned.next_id:
        with pytest.raises(UsageError, match="it cannot go on"):  # whose rows these were nobody can know
            build(path, small(), monkeypatch=monkeypatch)
    else:
        build(path, small(), monkeypatch=monkeypatch)
        assert own_rows(path) == own_rows(tmp_path / "whole")


def test_a_damaged_record_is_reported(tmp_path: Path, monkeypatch: Any) -> None:
    build(tmp_path / "s", small(), 5, monkeypatch)
    record = tmp_path / "s/build.json"
    data = record.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))]
    nonsense = b"[" * 3000
    sealed = [xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text for text in (nonsense, b"3", b'{"done": {}}')]
    with open_store(tmp_path / "s") as store:
        for damaged in [*flipped, *sealed, b"", data[:-9], data * 50]:
            record.write_bytes(damaged)
            with pytest.raises(DamagedError, match=r"build\.json.* is damaged"):
                Progress(store).read()
    with pytest.raises(DamagedError):
        build(tmp_path / "s", small(), monkeypatch=monkeypatch)
    record.unlink()
    (tmp_path / "elsewhere").write_bytes(data)
    record.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match="no ordinary file"):
        build(tmp_path / "s", small(), monkeypatch=monkeypatch)
    record.unlink()
    build(tmp_path / "whole", small(), monkeypatch=monkeypatch)
    build(tmp_path / "s", small(), monkeypatch=monkeypatch)  # now the rows say how far it has come
    assert own_rows(tmp_path / "s") == own_rows(tmp_path / "whole")


def test_who_writes_at_the_same_time_is_noticed(tmp_path: Path) -> None:
    task = Build(small(), BYTES, corpus(), tmp_path / "s", BuildConfig(window=8, batch_size=2))
    with task.open() as mine, open_store(tmp_path / "s") as other:
        done = task.done(mine)
        other.add(np.ones((3, 16)), [1, 2, 3], References.of("other", [0, 1, 2]))
        other.commit()
        other.close()
        with pytest.raises(MnemicError, match="another process has just written"):
            task.encode(mine, done)


def test_without_a_record_rows_of_others_end_a_build(tmp_path: Path, monkeypatch: Any) -> None:
    for count in (1, 18):  # 18: the number of rows of a batch
        path = tmp_path / str(count)
        build(path, small(), 5, monkeypatch)
        (path / "build.json").unlink()
        with open_store(path) as store:
            store.add(np.ones((count, 16)), np.ones(count, int), References.of("foreign", np.arange(count)))
            store.commit()
        with pytest.raises(UsageError, match="holds rows that this build has not put there"):
            build(path, small(), monkeypatch=monkeypatch)
    with open_store(tmp_path / "by-hand", StoreConfig(dim=16)) as store:
        store.commit()
    with pytest.raises(UsageError, match="was not made by a build"):
        build(tmp_path / "by-hand", small(), monkeypatch=monkeypatch)


def test_what_was_forgotten_in_between_stays_forgotten(tmp_path: Path, monkeypatch: Any) -> None:
    with open_store(tmp_path / "empty", StoreConfig(dim=1)) as store:
        if not hasattr(store, "next_id"):
            pytest.skip("stores do not say yet how many rows were ever added")
    build(tmp_path / "s", small(), 8, monkeypatch)
    with open_store(tmp_path / "s") as store:
        gone = store.delete(Where.document("a.txt"))
        store.commit()
    build(tmp_path / "s", small(), monkeypatch=monkeypatch)
    assert build(tmp_path / "s", small(), monkeypatch=monkeypatch) == 0
    build(tmp_path / "whole", small(), monkeypatch=monkeypatch)
    with open_store(tmp_path / "s") as store, open_store(tmp_path / "whole") as whole:
        assert len(store) == 128 - gone < 128
        np.testing.assert_array_equal(store.get(np.arange(gone, 128)).keys, whole.get(np.arange(gone, 128)).keys)


def test_the_tokenised_text_is_kept_where_asked(tmp_path: Path) -> None:
    for _ in range(2):
        mnemic.build_store(small(), BYTES, corpus(), tmp_path / "s", tokens=str(tmp_path / "tokens")).close()
    assert (tmp_path / "tokens/tokens.bin").exists()


# Leaving out what the model knows


@torch.no_grad()
def test_rows_that_the_model_foresees_are_left_out() -> None:
    model = small()
    with torch.no_grad():
        model.lm_head.weight *= 20
    probabilities = []
    for text in TEXTS.values():
        tokens = tokens_of(text)
        chances = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].double().softmax(-1)
        probabilities += [float(chances[place, token]) for place, token in enumerate(tokens[1:])]
    limit = float(np.median(probabilities))
    whole, part = built(model), built(model, max_probability=limit)
    kept = [number for number, chance in enumerate(probabilities) if chance <= limit]
    rows, chosen = whole.get(kept), everything(part)
    np.testing.assert_allclose(chosen[0], rows.keys, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(chosen[1], rows.values)
    assert chosen[2] == [everything(whole)[2][number] for number in kept]
    task = Build(model, BYTES, corpus(), "ram:", BuildConfig(max_probability=limit))
    task.run()
    paid = [-np.log(chance) for chance in probabilities if chance > limit]
    assert (task.report["rows"], task.report["dropped"]) == (len(kept), len(paid))
    assert task.report["dropped_loss"] == pytest.approx(np.mean(paid), rel=1e-4)


# Settings


def test_a_namespace_that_no_store_takes_leaves_nothing_behind(tmp_path: Path) -> None:
    for namespace in ("", "a\0b", "x" * 5000):
        with pytest.raises(UsageError, match="namespace"):
            mnemic.build_store(small(), BYTES, corpus(), tmp_path / "s", namespace=namespace)
    assert not (tmp_path / "s").exists()


def test_a_recall_below_the_dial_is_said(tmp_path: Path, capsys: Any) -> None:
    task = Build(small(), BYTES, corpus(), tmp_path / "s", BuildConfig(index="IVF1,PQ1x4", keys="codes"))
    task.run().close()
    assert task.report["recall"] < 0.9
    said = f"finds {task.report['recall']:.2f} of the true nearest 32 rows, not the 0.95 that was asked for"
    assert said in capsys.readouterr().err
    Build(small(), BYTES, corpus(), tmp_path / "t", BuildConfig()).run().close()
    assert "asked for" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window": 0}, "window = 0: expected 1 or more"),
        ({"window": 8, "min_context": 8}, "min_context = 8: expected less than window = 8"),
        ({"max_probability": 0.0}, "max_probability = 0.0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"keys": "codes", "index": "exact"}, "needs the keys"),
        ({"windw": 3}, "did you mean 'window'"),
        ({"dim": 7}, "dim = 7: the keys of model.layers.1.mlp have 16 numbers"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        built(small(), **options)


def test_opening_a_store_needs_no_torch() -> None:
    code = (
        "import sys; from mnemic.stores import open_store, StoreConfig; open_store('ram:', StoreConfig(dim=2)); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
