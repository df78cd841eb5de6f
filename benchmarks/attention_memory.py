"""What an attention memory costs: a training step, a generated token, its bytes, and its recall on real keys.

A model of 12 layers of 256 with 8 heads (memory in the 9th layer, segments of 512 tokens, two rows) is trained for a
short while on a text. Each process then fills the memory with that text and measures with a full memory, in turns with
the same model without memory: search, insertion and eviction are in the step.

    training     memories of 8,192, 65,536 and 262,144 pairs
    generation   one token, with 65,536 pairs
    peer         one key/value head, 65,536 pairs: mnemic at two recalls, and the PyPI package
                 memorizing-transformers-pytorch as it is and with a wider search; it is looked for in --peer FOLDER too
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import compare, table

PARTS = {
    "training": ["8192", "65536", "262144"],
    "generation": ["65536"],
    "peer": ["peer", "peer, wide", "mnemic", "mnemic, narrow"],
}
PEER_PAIRS = 65_536
WIDE = 1024  # candidates of the peer's search (HNSW), 16 as it is
NARROW = 0.3  # the recall that is asked for; the peer's own is lower
WARM = 4  # steps before those that are measured
ROWS, SEGMENT, HEADS, WIDTH, LAYERS, VOCABULARY = 2, 512, 8, 256, 12, 8192


def main() -> None:
    """Compares the settings of one part, or measures the one that `--setting` names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="a corpus, as `mnemic train` takes it: long documents")
    parser.add_argument("--part", choices=list(PARTS), default="training")
    parser.add_argument("--setting", help="measure only this one and print JSON")
    parser.add_argument("--folder", default="bench-attention", help="for the model and its tokenizer")
    parser.add_argument("--train-steps", type=int, default=150, help="of the model whose keys are searched")
    parser.add_argument(
        "--steps", type=int, default=12, help="measured steps of a process, of which the fastest counts"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="processes of each setting")
    parser.add_argument("--peer", default="", help="a folder with the package memorizing-transformers-pytorch")
    options = parser.parse_args()
    if options.setting:
        print(json.dumps(measure(options)))
        return
    trained(options)
    names = ("part", "folder", "steps", "threads", "peer")
    arguments = [options.corpus, *(f"--{name}={getattr(options, name)}" for name in names)]
    print(table(compare(__file__, PARTS[options.part], arguments, options.repeats, f"attention-{options.part}")))


def trained(options: argparse.Namespace) -> None:
    """Trains the model with a small memory, or goes on with it."""
    run = Path(options.folder) / "run"
    command = ["train", options.corpus, "--model=preset:memorizing-256", f"--vocab-size={VOCABULARY}"]
    command += ["--memory=attention:size=8192", f"--steps={options.train_steps}", f"--batch-size={ROWS}"]
    command += [f"--segment-length={SEGMENT}", "--learning-rate=0.001", f"--warmup={options.train_steps // 10}"]
    command += [f"--checkpoint-every={options.train_steps}", f"--out={run}", "--resume"]
    if not (run / "model").is_dir():
        subprocess.run([sys.executable, "-m", "mnemic", *command], check=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The seconds of one setting, and what else is known of it."""
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.setting.startswith("peer"):
        return measure_peer(options, options.setting == "peer, wide")
    size = PEER_PAIRS if options.part == "peer" else int(options.setting)
    ids = text(options, size + (options.steps + WARM + 2) * SEGMENT)
    model = one_head(size) if options.part == "peer" else made(options, size)
    if options.setting == "mnemic, narrow":
        model.memory.change("attention", recall=NARROW)
    training = options.part != "generation"
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stepped(model, optimiser, ids, model.memory.new_state(ROWS), WARM)  # all that a step needs besides is there then
    before, state = resident(), model.memory.new_state(ROWS)
    fill(model, ids[:, :size], state)
    (memory,), ids = state["attention"].memories.values(), ids[:, size:]
    for row in memory.rows:
        row.keys.queries = None  # those of `fill` were no queries
    stepped(model, optimiser, ids, state, WARM)  # their queries tell how many lists are worth a look
    rarely = seconds_of_rare_work(memory, size)
    ids = ids[:, WARM * SEGMENT :]
    seconds, without = (
        stepped(model, optimiser, ids, state, options.steps) if training else generated(model, ids, state)
    )
    found = {"without": min(without), "all_seconds": seconds, "all_without": without}
    if not training:
        return {"seconds": min(seconds), **found}
    pairs = 2 * 4 * sum(size * row.values.shape[0] * row.values.shape[2] for row in memory.rows)
    found |= {"pairs_bytes": pairs, "rare_work": rarely}
    listed = [row.keys for row in memory.rows if hasattr(row.keys, "recall")]
    found |= {"recall": [keys.recall(32) for keys in listed]}
    found |= {"probes": [[lists.probes for lists in keys.heads] for keys in listed]}
    full = resident()
    del state, memory, row, listed
    found |= {"bytes_ratio": (full - resident()) / pairs, "growth_ratio": (full - before) / pairs}
    return {"seconds": min(seconds) + sum(rarely.values()), **found}


def seconds_of_rare_work(memory: Any, size: int) -> dict[str, float]:
    """What lists cost in some steps only, in seconds a step: points learned, lists looked through and made small."""
    from mnemic.memories.attention import search

    keys = [row.keys for row in memory.rows if hasattr(row.keys, "heads")]
    renewed = max(size * search.RENEWED, search.FEWEST) / SEGMENT
    every = {"learning": size / SEGMENT, "adjusting": renewed, "compacting": renewed}
    work = {
        "learning": lambda one: one._learn(one.end),
        "adjusting": lambda one: one.adjust(),
        "compacting": lambda one: one.compact(),
    }
    found = {}
    for name, do in work.items():
        began = time.perf_counter()
        for one in keys:
            do(one)
        found[name] = (time.perf_counter() - began) / every[name]
    return found


def text(options: argparse.Namespace, length: int) -> Any:
    """As many tokens of the corpus as are needed, (rows, length)."""
    import torch
    from transformers import AutoTokenizer

    import mnemic
    from mnemic.cli.loading import load_model  # noqa: F401  (registers the models)

    tokenizer = AutoTokenizer.from_pretrained(Path(options.folder) / "run" / "model")
    found: list[int] = []
    for document in mnemic.open_corpus(options.corpus).documents("train"):
        found += tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
        if len(found) >= ROWS * length:
            break
    return torch.tensor(found[: ROWS * length]).view(ROWS, length)


def made(options: argparse.Namespace, size: int) -> Any:
    """The trained model, with a memory of that size."""
    import mnemic

    model = mnemic.load(Path(options.folder) / "run" / "model")
    model.memory.change("attention", size=size)
    return model.train()


def one_head(size: int) -> Any:
    """A model of the same size with one key/value head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import mnemic

    shape = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, **shape)
    model = LlamaForCausalLM(config)
    return mnemic.augment(model, mnemic.KNNAttention(size=size)).train()


def fill(model: Any, ids: Any, state: Any) -> None:
    """Puts the pairs of a text into the memory; what is in it already is not looked at."""
    import torch

    (memory,), handle = state["attention"].memories.values(), model.memory.attention
    heads, width = memory.rows[0].values.shape[0], memory.rows[0].values.shape[2]
    model.eval()
    with torch.no_grad(), handle.pairs_read() as heard:
        for part in ids.split(SEGMENT, 1):
            model(input_ids=part, use_cache=False, logits_to_keep=1)
            keys, values = heard.pop().unflatten(2, (2, heads, width)).permute(2, 0, 3, 1, 4)
            memory.append(keys, values, torch.ones(part.shape, dtype=torch.bool))
            memory.find(keys[:, :, -1:], 1, None)  # so that keys are listed as they come
    model.train()


def stepped(model: Any, optimiser: Any, ids: Any, state: Any, steps: int) -> tuple[list[float], list[float]]:
    """The seconds of training steps, each of the next segment: with the memory, and without it."""
    from mnemic.hf.losses import token_losses

    def step(part: Any, **more: Any) -> float:
        start = time.perf_counter()
        optimiser.zero_grad(set_to_none=True)
        losses = token_losses(model, part[:, 1:], input_ids=part[:, :-1], use_cache=False, **more)[0]
        losses.mean().backward()
        optimiser.step()
        return time.perf_counter() - start

    seconds, without = [], []
    for number in range(steps):
        part = ids[:, number * SEGMENT : (number + 1) * SEGMENT + 1]
        seconds.append(step(part, memory_state=state))
        with model.memory.disabled():
            without.append(step(part))
    return seconds, without


def generated(model: Any, ids: Any, state: Any, tokens: int = 60) -> tuple[list[float], list[float]]:
    """The seconds of single tokens of one row, after a segment of context: with the memory, and without it."""
    import torch
    from transformers import DynamicCache

    model.eval()
    state["attention"].batch_select_indices(torch.tensor([0]))
    model.memory.attention.shared = state["attention"]

    def token(last: Any, cache: Any, seconds: list[float]) -> Any:
        start = time.perf_counter()
        found = model(input_ids=last, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        seconds.append(time.perf_counter() - start)
        return found

    seconds, without = list[float](), list[float]()
    caches, last = (DynamicCache(), DynamicCache()), [ids[:1, :SEGMENT]] * 2
    with torch.no_grad():
        for _ in range(tokens):
            last[0] = token(last[0], caches[0], seconds)
            with model.memory.disabled():
                last[1] = token(last[1], caches[1], without)
    return seconds[1:], without[1:]


def measure_peer(options: argparse.Namespace, wide: bool) -> dict[str, Any]:
    """A training step of the peer with a full memory, in turns with one of its model without a memory."""
    import tempfile

    import torch

    if options.peer:
        sys.path.append(options.peer)
    from memorizing_transformers_pytorch import MemorizingTransformer

    def new(folder: str, layer: int) -> tuple[Any, Any]:
        model = MemorizingTransformer(
            num_tokens=VOCABULARY,
            dim=WIDTH,
            depth=LAYERS,
            dim_head=WIDTH // HEADS,
            heads=HEADS,
            memorizing_layers=(layer,),
            max_knn_memories=2 * PEER_PAIRS,  # at its capacity it forgets everything
            num_retrieved_memories=32,
            knn_memories_directory=folder,
        ).train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(model: Any, optimiser: Any, part: Any, **more: Any) -> float:
        start = time.perf_counter()
        optimiser.zero_grad(set_to_none=True)
        model(part[:, :-1], labels=part[:, 1:], **more).backward()
        optimiser.step()
        return time.perf_counter() - start

    ids = text(options, PEER_PAIRS + (options.steps + 3) * SEGMENT)
    parts = list(ids[:, : -SEGMENT - 1].unfold(1, SEGMENT + 1, SEGMENT).unbind(1))
    filling = PEER_PAIRS // SEGMENT
    seconds, without = [], []
    with tempfile.TemporaryDirectory() as folder:
        (model, optimiser), bare = new(folder, 9), new(folder, 0)  # there is no layer 0: none has a memory
        with model.knn_memories_context(batch_size=ROWS) as memories, torch.no_grad():
            for part in parts[:filling]:
                model(part[:, :-1], knn_memories=memories)
            for index in memories[0].knns if wide else ():
                index.index.hnsw.efSearch = WIDE
            with torch.enable_grad():
                for part in parts[filling:]:
                    seconds.append(step(model, optimiser, part, knn_memories=memories))
                    without.append(step(*bare, part, knn_memories=bare[0].create_knn_memories(batch_size=ROWS)))
            recall = peer_recall(model, ids[:, -SEGMENT:], memories)
    found = {"recall": [recall], "all_seconds": seconds, "all_without": without}
    return {"seconds": min(seconds), "without": min(without), **found}


def peer_recall(model: Any, ids: Any, memories: Any) -> float:
    """The share of the 32 nearest keys that the peer finds for one more segment, without memories of it."""
    import faiss
    import numpy as np
    import torch

    shares = []
    for index in memories[0].knns:
        search = index.search

        def compared(queries: Any, k: int, *rest: Any, index: Any = index, search: Any = search, **more: Any) -> Any:
            found = search(queries, k, *rest, **more)
            exact = faiss.IndexFlatIP(index.index.d)
            exact.add(index.index.storage.reconstruct_n(0, index.index.ntotal))
            pairs = zip(exact.search(queries, k)[1], found, strict=True)
            shares.append(float(np.mean([np.isin(near, some).mean() for near, some in pairs])))
            return found

        index.search = compared
    with torch.no_grad():
        model(ids, knn_memories=memories, add_knn_memory=False)
    return sum(shares) / len(shares)


def resident() -> int:
    """The bytes of memory that this process takes now, without what it could give back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
