"""Forks groups of processes that train together: imports torch once, then obeys lines of JSON on stdin.

{"count", "out", "kind", "model", "config", "fault"}: `count` children train a tiny model of that kind into `out`, and
each writes to `out`.<rank>.json what came of it: the losses or the error, and what it wrote to the run's folder.
`fault` is [name, rank, step]: what goes wrong in which process (-1: in all) when it begins which step. The answer is
a line with the children's exit statuses; a child that hangs is ended by its alarm. With such an order as an argument
this process is one of a group, made by a launcher.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mnemic
import mnemic.train.loop
from mnemic.data import train_tokenizer
from mnemic.data.documents import Corpus
from mnemic.models import MnemicDecoderConfig, MnemicDecoderForCausalLM
from mnemic.train.config import TrainConfig
from tests.crash import training_process

EVERYWHERE = -1
SECONDS = 60  # far more than any of these runs takes
WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree"}
BASE = {"steps": 8, "batch_size": 4, "segment_length": 10, "warmup": 2, "learning_rate": 1e-2}
OFTEN = {"log_every": 1, "checkpoint_every": 3, "evaluate_every": 4, "keep": 99, "clip": 0.5}


def make_model(kind: str, options: dict[str, Any], vocabulary: int) -> Any:
    """A model without dropout unless asked for, in float64."""
    torch.manual_seed(options.pop("seed"))
    product_keys = options.pop("product_keys", None)
    if kind == "decoder":
        shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "xl_length": 12}
        model = MnemicDecoderForCausalLM(MnemicDecoderConfig(vocab_size=vocabulary, **{**shape, **options}))
    else:
        model = training_process.make_model(kind, vocabulary)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    if product_keys is not None:
        mnemic.augment(model, mnemic.ProductKeys(slots=64, heads=2, k=4, key_dim=8, **product_keys))
    return model.double()


def go_wrong(fault: str, when: int, model: Any) -> None:
    """Arranges for `fault` when step `when` begins."""
    loop = mnemic.train.loop.Loop
    step = loop.step
    if fault == "batch norm":
        model.norm = torch.nn.BatchNorm1d(2)
    if fault == "larger":
        model.more = torch.nn.Parameter(torch.ones(3))
    if fault == "partly used":
        model.idle = torch.nn.Parameter(torch.ones(2, 2))
        model.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
        if dist.get_rank() == 1:
            model.lm_head.register_forward_hook(lambda module, given, out: out + model.bias)
    if fault == "table of one":
        model.table = torch.nn.Embedding(model.config.vocab_size, 1, sparse=True, dtype=torch.float64)
        if dist.get_rank() == 1:
            model.lm_head.register_forward_hook(lambda module, given, out: out + model.table(out.argmax(-1)))

    def faulty_step(self: Any, batch: Any) -> None:
        if self.progress.step + 1 == when:
            if fault == "error":
                raise ValueError("the cat bit through the cable" * 500)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "interrupt":
                signal.raise_signal(signal.SIGINT)
            if fault == "nan":
                model.lm_head.weight.data.fill_(torch.nan)
        step(self, batch)

    def failing_save(*_: Any) -> None:
        raise mnemic.MnemicError("the disk is full")

    if fault == "disk":
        mnemic.train.loop.save_checkpoint = failing_save
    loop.step = faulty_step  # type: ignore[method-assign]


def watch(folder: str, written: list[str]) -> None:
    """Notes each change of a file in `folder`."""

    def hook(event: str, arguments: tuple) -> None:
        path = str(arguments[0]) if arguments else ""
        writes = event in WRITES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & 3)
        if writes and path.startswith(folder):
            written.append(f"{event} {path}")

    sys.addaudithook(hook)


def train(order: dict[str, Any], rank: int) -> None:
    """One process of a group, from its start to its end."""
    result: dict[str, Any] = {"written": []}
    watch(order["out"] + "/", result["written"])
    tokenizer = train_tokenizer([], "byte")
    documents = training_process.documents
    corpus = Corpus("group", {"train": lambda: documents(0, 30), "valid": lambda: documents(30, 34)})
    fault, where, when = order["fault"] or ("", -1, 0)
    here = where in (rank, EVERYWHERE)
    seed = 99 if fault == "other weights" and here else 0
    model = make_model(order["kind"], {"seed": seed, **order["model"]}, len(tokenizer))
    if here:
        go_wrong(fault, when, model)
    try:
        config = TrainConfig(**{**BASE, **OFTEN, "out": order["out"], **order["config"]})
        run = mnemic.train.loop.train(model, tokenizer, corpus, config)
        result |= {"losses": run.losses, "report": run.report}
    except (Exception, KeyboardInterrupt) as error:
        result |= {"error": type(error).__name__, "message": str(error)}
    Path(f"{order['out']}.{rank}.json").write_text(json.dumps(result))


def join_group(rank: int, count: int, meeting_point: str) -> None:
    """Makes this process one of a group, as a launcher would; through a file, for ports may be taken."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=count)


def start(order: dict[str, Any], rank: int, meeting_point: str) -> int:
    """Forks one process of a group; its process id."""
    if child := os.fork():
        return child
    try:
        signal.alarm(SECONDS)
        os.dup2(2, 1)
        if order["count"] > 1:
            join_group(rank, order["count"], meeting_point)
        train(order, rank)
        os._exit(0)
    finally:
        os._exit(1)


def main() -> None:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:  # this is itself one of a group, which a launcher has made
        train(json.loads(sys.argv[1]), int(os.environ["RANK"]))
        return
    for line in sys.stdin:
        order = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            children = [start(order, rank, f"{folder}/meet") for rank in range(order["count"])]
            print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == "__main__":
    main()
