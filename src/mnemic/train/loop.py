"""The one training loop.

A step: the next batch of the document streams, cut into `accumulate` pieces, the sum of each piece's losses
back-propagated, the gradient divided by the number of targets of the whole batch, clipped, and applied. Between steps
the state of a run is complete, and a checkpoint holds all of it: killed at any moment and resumed, a run makes the
same losses as if it had never stopped, bit for bit on the same machine.

Several processes divide the rows of a batch among them and make the losses that one would make, but for the order in
which floating-point numbers are added up. The main process alone writes; all read the same `out` folder.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import set_seed
from tqdm import tqdm

from mnemic.data import ConsecutiveSegments, SimilarSegments, open_corpus
from mnemic.data.pair_batches import SimilarPairs
from mnemic.errors import MnemicError, UsageError
from mnemic.files import lock, new_folder, os_errors_of_safetensors
from mnemic.memories.output.gathering import meeting_first
from mnemic.train.carries import join_rows, take_rows
from mnemic.train.checkpoints import (
    Checkpoint,
    load_checkpoint,
    load_model_tensors,
    load_newest,
    model_settings,
    model_tensors,
    save_checkpoint,
)
from mnemic.train.config import TrainConfig
from mnemic.train.objectives import Batch, check_length, make_objective
from mnemic.train.optimizers import load_optimizer_tensors, make_optimizer, optimizer_tensors, select_trainable
from mnemic.train.processes import Processes, check_divisible
from mnemic.train.report import Log, commit, versions, write_report
from mnemic.train.rows import clip_gradients
from mnemic.train.run import Progress, Run, finished_report, refuse_to_overwrite
from mnemic.train.schedules import learning_rate
from mnemic.train.state import mode, random_state, set_random_state, untouched
from mnemic.train.terminal import interrupts, no_other_bars, progress_bar, say
from mnemic.train.tracking import end_trackers, make_accelerator, start_trackers


def train(model: Any, tokenizer: Any, corpus: Any, config: TrainConfig | None = None, **options: Any) -> Run:
    """Trains `model` on a corpus (a name, a path or a Corpus) as `config`, or options by name, say.

    >>> run = mnemic.train(model, tokenizer, "stdlib", steps=2000, out="runs/a")
    """
    if config is not None and options:
        raise UsageError("give train either a TrainConfig or options by name, not both")
    config = config or TrainConfig.from_dict(options)
    out, processes = Path(config.out), Processes()
    with processes.together():
        if processes.is_main:
            refuse_to_overwrite(out, config.resume)
        corpus = open_corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
        held = lock(out / "lock", f"the run folder {out}") if processes.is_main else contextlib.nullcontext()
        with held, mode(model, training=True), meeting_first(processes.collect):
            report = processes.from_main(lambda: finished_report(out, config.steps))
            loop = Loop(model, tokenizer, corpus, config, processes)
            if report is None:
                try:
                    report = processes.collect(loop.run())[0]
                finally:
                    if loop.objective.memory is not None:
                        loop.objective.memory.end_training()
    return Run(out, report)


class Loop:
    """All that a run holds while it trains, in one of its processes."""

    def __init__(
        self, model: Any, tokenizer: Any, corpus: Any, config: TrainConfig, processes: Processes | None = None
    ) -> None:
        self.model, self.tokenizer, self.corpus, self.config = model, tokenizer, corpus, config
        self.out = Path(config.out)
        self.checkpoints = self.out / "checkpoints"
        self.processes = processes or Processes()
        self.accelerator = make_accelerator(config)
        check_divisible(model, self.processes, config)
        self.rows = config.batch_size // self.processes.count  # of each batch, in this process
        model.to(self.accelerator.device)
        self.processes.copy_from_main(model)
        set_seed(config.seed, device_specific=True)
        check_length(model, config.segment_length, "segment_length")
        self.objective = make_objective(config.objective, model, tokenizer, config.seed, config.label_smoothing)
        if config.segments > 1 and self.objective.kind != "causal":
            raise UsageError(
                f"segments = {config.segments}: a {self.objective.kind} model does not read documents on from segment "
                "to segment, leave it at 1"
            )
        if self.objective.memory is not None:
            self.objective.memory.check_training(config, self.objective.kind)
        self.parameters = select_trainable(model, config)
        self.optimizer = make_optimizer(self.parameters, config)
        self.stream = self.new_stream(self.tokenize(config.split))
        self.valid = self.tokenize("valid") if config.evaluate_every else None
        if (
            self.processes.is_main
            and self.objective.memory
            and (needed := self.objective.memory.state_bytes(self.rows)) > 1e8
        ):
            say(f"the memory of {self.rows} rows will take up to {needed / 1e9:.1f} GB")
        self.carries = [self.objective.new_carry(self.rows // config.accumulate) for _ in range(config.accumulate)]
        self.progress = Progress()
        self.norm = 0.0
        self.saved_step: int | None = None
        if (checkpoint := self.newest_checkpoint()) is not None:
            self.restore(checkpoint)
        if self.processes.is_main:
            self.log = Log(self.out / "log.jsonl", self.progress.step)

    # The steps

    def run(self) -> dict[str, Any]:
        """Trains until `steps` are made and returns the report; on ctrl-C ends the step, saves, and raises."""
        config, progress, shown = self.config, self.progress, self.processes.is_main
        if self.saved_step is None:
            self.save()  # a run killed early begins again with the same weights, and a full disk shows at once
        start_trackers(self.accelerator, config, progress.step)
        with interrupts(shown) as interrupted, progress_bar(config.steps, "step", progress.step, shown) as bar:
            batches = iter(self.stream)
            while progress.step < config.steps and not self.processes.any(interrupted.is_set()):
                self.step(next(batches))
                bar.update()
                if progress.step % config.log_every == 0 or progress.step == config.steps:
                    self.log_losses(bar)
                if config.evaluate_every and progress.step % config.evaluate_every == 0:
                    self.evaluate()
                if progress.step % config.checkpoint_every == 0:
                    self.save()
            if self.saved_step != progress.step:
                self.save()
        end_trackers(self.accelerator)
        if progress.step < config.steps:
            self.write_report("interrupted")
            raise KeyboardInterrupt(
                f"stopped at step {progress.step} of {config.steps}; all is saved in {self.out}: "
                "go on with resume = true (--resume)"
            )
        self.save_model("model")
        return self.write_report("finished")

    def step(self, batch: Batch) -> None:
        """Updates the weights once."""
        config, progress, began = self.config, self.progress, time.monotonic()
        progress.step += 1
        total, count = 0.0, 0
        self.objective.begin_step(progress.step, config.steps)
        for piece, carry in zip(self.pieces(self.prepare(batch, progress.step)), self.carries, strict=True):
            loss, targets = self.loss(piece, carry)
            self.accelerator.backward(loss)
            total, count = total + loss.item(), count + targets
        total, count = self.processes.add(self.parameters, total, count)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.div_(max(count, 1))
        self.norm = clip_gradients(self.parameters.values(), config.clip)
        if not math.isfinite(total) or not math.isfinite(self.norm):
            self.break_down(f"the loss is {total / max(count, 1)} and the norm of the gradient {self.norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress.step, config)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.tokens += count
        progress.loss_sum += total
        progress.loss_count += count
        progress.seconds += time.monotonic() - began

    def loss(self, piece: Batch, carry: Any) -> tuple[torch.Tensor, int]:
        """The objective's loss in the configured precision."""
        device = self.accelerator.device
        piece = {name: tensor.to(device) for name, tensor in piece.items()}
        # torch's own autocast: accelerate's is a setting of the whole process, which a second run could not change
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            found = [self.objective.loss(segment, carry) for segment in self.segments(piece)]
        if carry is not None:
            carry.detach()
        return torch.stack([loss for loss, _ in found]).sum(), sum(count for _, count in found)

    def segments(self, piece: Batch) -> list[Batch]:
        """The consecutive segments of a piece of a batch."""
        count, length = self.config.segments, self.config.segment_length
        if count == 1:
            return [piece]
        cuts = [slice(begin, begin + length) for begin in range(0, length * count, length)]
        return [{name: tensor[:, cut] for name, tensor in piece.items()} for cut in cuts]

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """The batch cut into `accumulate` pieces of equally many rows."""
        rows = len(batch["targets"]) // self.config.accumulate
        for first in range(0, rows * self.config.accumulate, rows):
            yield {name: tensor[first : first + rows] for name, tensor in batch.items()}

    def break_down(self, why: str) -> NoReturn:
        """Ends a run that has gone wrong, leaving its last checkpoint as it is."""
        self.write_report("broken down")
        raise MnemicError(
            f"training broke down at step {self.progress.step}: {why}; the checkpoint of step {self.saved_step} in "
            f"{self.out} is good. Start in another out folder with a lower learning_rate, more warmup or a smaller clip"
        )

    # The data

    def tokenize(self, split: str) -> Any:
        """The token ids of a split, kept in the run's folder."""
        folder = self.out / "tokens" / split
        if self.processes.is_main:
            tokens = self.objective.tokenize(self.corpus, split, folder, self.config)
        self.processes.collect(None)  # the others wait for the folder
        return tokens if self.processes.is_main else self.objective.open_tokens(folder)

    def new_stream(self, tokens: Any, epochs: int | None = None) -> Any:
        """This process' rows of the batches: shuffled and endless, or in order for a number of epochs."""
        config, processes = self.config, self.processes
        options: dict[str, Any] = {"seed": config.seed, "rank": processes.rank, "world_size": processes.count}
        if epochs is not None or config.batching == "documents":
            options |= {"shuffle": epochs is None, "epochs": epochs}
            return self.objective.stream(tokens, self.rows, config.segment_length * config.segments, **options)
        self.objective.check_batching(config.batching)
        if config.batching == "consecutive":
            return ConsecutiveSegments(tokens, self.rows, config.segment_length, config.consecutive, **options)
        options["folder"] = self.out / "neighbours"
        if not processes.is_main:
            processes.collect(None)  # the main one searches, and the others read what it found
        if self.objective.kind == "seq2seq":
            stream: Any = SimilarPairs(tokens, self.rows, config.segment_length, **options)
        else:
            shuffled = config.batching == "shuffled"
            stream = SimilarSegments(tokens, self.rows, config.segment_length, shuffled=shuffled, **options)
        if processes.is_main:
            processes.collect(None)
        return stream

    def prepare(self, batch: Batch, step: int) -> Batch:
        """The batch as the objective reads it."""
        return self.objective.prepare(batch, step, self.processes.rank, self.processes.count)

    # The figures

    def log_losses(self, bar: tqdm) -> None:
        """Writes the mean loss since the last line to the log and the trackers, and shows it."""
        progress = self.progress
        loss = progress.loss_sum / max(progress.loss_count, 1)
        progress.loss_sum, progress.loss_count = 0.0, 0
        told, sentences = self.objective.memory.tell() if self.objective.memory is not None else ({}, [])
        if not self.processes.is_main:
            return
        for sentence in sentences:
            say(sentence)
        rate = learning_rate(progress.step, self.config)
        figures = {"loss": loss, "learning_rate": rate, "gradient_norm": self.norm, "tokens": progress.tokens}
        figures |= told
        self.log.append({"step": progress.step, **figures})
        self.accelerator.log(figures, step=progress.step)
        bar.set_postfix_str(f"loss {loss:.4f}, {self.speed():,.0f} tokens/s")

    def evaluate(self) -> None:
        """The objective's loss on the valid split; the best model so far is kept.

        Quick and in the form the model is trained in; `mnemic.evaluate` gives figures that do not depend on batches.
        """
        total, count = 0.0, 0
        with untouched(self.model):
            carry = self.objective.new_carry(self.rows)
            for number, batch in enumerate(self.new_stream(self.valid, epochs=1)):
                loss, targets = self.loss(self.prepare(batch, number), carry)
                total, count = total + loss.item(), count + targets
        total, count = self.processes.sum(total, count)
        mean = total / max(count, 1)
        if self.processes.is_main:
            self.log.append({"step": self.progress.step, "evaluation": {"loss": mean, "tokens": count}})
            self.accelerator.log({"valid_loss": mean}, step=self.progress.step)
        if self.progress.best is None or mean < self.progress.best:
            self.progress.best = mean
            self.save_model("best")

    def speed(self) -> float:
        """Tokens trained on per second."""
        return self.progress.tokens / max(self.progress.seconds, 1e-9)

    def write_report(self, status: str) -> dict[str, Any]:
        """Writes report.json and returns it; nothing in processes that do not write."""
        if not self.processes.is_main:
            return {}
        config, progress, log = self.config, self.progress, self.log.entries
        report = {
            "status": status,
            "step": progress.step,
            "data": self.corpus.name,
            "model": type(self.model).__name__,
            "objective": type(self.objective).__name__,
            "documents_apart": self.objective.keeps_documents_apart,
            "parameters": {
                "all": sum(parameter.numel() for parameter in self.model.parameters()),
                "trained": sum(parameter.numel() for parameter in self.parameters.values()),
            },
            "seed": config.seed,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            "tokens_per_second": self.speed(),
            "device": str(self.accelerator.device),
            "processes": self.processes.count,
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "commit": commit(),
            "config": config.to_dict(),
            "losses": [entry for entry in log if "loss" in entry],
            "evaluations": [{"step": e["step"], **e["evaluation"]} for e in log if "evaluation" in e],
        }
        write_report(self.out / "report.json", report)
        return report

    # What is kept

    def save(self) -> None:
        """Writes a checkpoint and the report."""
        carries = self.processes.gather(join_rows([carry.tensors() for carry in self.carries if carry is not None]))
        random_tensors, random_values = random_state()
        generators, values = self.processes.gather(random_tensors), self.processes.collect(random_values)
        self.saved_step = self.progress.step
        if not self.processes.is_main:
            return
        self.log.sync()
        weights, tied = model_tensors(self.model)
        tensors = {
            "model": weights,
            "optimizer": optimizer_tensors(self.optimizer, self.parameters),
            "carry": join_rows(carries),
            "random": {f"{rank}/{name}": state for rank, own in enumerate(generators) for name, state in own.items()},
        }
        state = {
            "config": self.config.to_dict(),
            "model": model_settings(self.model),
            "progress": asdict(self.progress),
            "tied": tied,
            "stream": self.stream.state_dict(),
            "random": values,
        }
        save_checkpoint(self.checkpoints, Checkpoint(self.progress.step, tensors, state), self.config.keep)
        self.write_report("running")

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest intact checkpoint, if there is one; the main process finds out which it is."""
        checkpoint = load_newest(self.checkpoints) if self.processes.is_main else None
        step = self.processes.collect(checkpoint and checkpoint.step)[0]
        if step is None or self.processes.is_main:
            return checkpoint
        return load_checkpoint(self.checkpoints, step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Takes up a run where a checkpoint left it; UsageError if it was made with other settings."""
        tensors, state = checkpoint.tensors, checkpoint.state
        different = self.config.differences(TrainConfig.from_dict(state["config"]))
        then, now = state["model"], model_settings(self.model)
        different |= {f"the model's {k}": (then[k], now[k]) for k in then.keys() & now.keys() if then[k] != now[k]}
        if different:
            listed = ", ".join(f"{name} = {now!r} (was {then!r})" for name, (then, now) in different.items())
            raise UsageError(
                f"the run in {self.out} was started with other settings: {listed}; set them back, "
                "or start another run in another out folder"
            )
        self.stream.load_state_dict(state["stream"])
        load_model_tensors(self.model, tensors["model"], state["tied"])
        load_optimizer_tensors(self.optimizer, self.parameters, tensors["optimizer"])
        rank, rows = self.processes.rank, self.rows // self.config.accumulate
        for number, carry in enumerate(self.carries):
            if carry is not None:
                carry.load_tensors(take_rows(tensors["carry"], rank * self.rows + number * rows, rows))
        self.progress = Progress(**state["progress"])
        self.saved_step = checkpoint.step
        same_processes = len(state["random"]) == self.processes.count
        if same_processes:
            own = {n.partition("/")[2]: t for n, t in tensors["random"].items() if n.startswith(f"{rank}/")}
            set_random_state(own, state["random"][rank])
        if checkpoint.step < self.config.steps and self.processes.is_main:
            say(f"going on from step {checkpoint.step} of {self.config.steps} in {self.out}")
            if not same_processes:
                say(f"with {self.processes.count} processes (was {len(state['random'])}): dropout draws other numbers")

    def save_model(self, name: str) -> None:
        """Writes the model and its tokenizer to `out/name`."""
        if not self.processes.is_main:
            return
        with new_folder(self.out / name) as folder, os_errors_of_safetensors(), no_other_bars():
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
