"""Train a language model with sparse memory embeddings: what a run is, in reading order.

    python train_gpt.py [PRESET] [flags]        PRESET may be left out and is then `local`
    python train_gpt.py --resume runs/FOLDER    go on where a run stopped

Lives here: the command line, the loop over cycles and steps, what a checkpoint holds, the end of a run.
Not here: how a model is built (mome/run.py), what a table does (mome/table/), what an optimizer does (optim/).
"""

from __future__ import annotations

import os

# Before torch loads OpenMP: a thread that waits may spin only for a moment, or whatever else runs on these cores makes
# a step many times slower (records/NOTEBOOK.md has the numbers).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import io
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from data.loader import DataExhausted, Loader
from kernels.cpu import threads
from mome import checkpoint
from mome.command import parse
from mome.config import RunConfig
from mome.cycle import Cycle, Cycles
from mome.describe import describe, parameter_counts, tables_of
from mome.errors import UserError
from mome.evaluate import Score, evaluate, knockouts
from mome.files import sync, write_atomic, write_json
from mome.generate import generate
from mome.loss import cross_entropy
from mome.progress import Reporter, Stop
from mome.run import Corpus, Parts, build, load_model, open_corpus, pick_device, row_plan
from mome.runfolder import RunFolder, environment
from mome.table.parts import load_parts, state_parts
from mome.tools.report import write_report
from mome.usage import peak_bytes, process_bytes
from optim.groups import build_optimizers, set_schedule
from optim.groups import describe as describe_groups


@dataclass(frozen=True)
class RunResult:
    """What a run came to. signal: the one that stopped it after a checkpoint; values is then empty."""

    folder: Path
    values: dict[str, Any]
    signal: int | None


class Training:
    """The state of a run between two steps, and the moves that change it."""

    COUNTS = ("step", "tokens", "seconds")

    def __init__(
        self, config: RunConfig, corpus: Corpus, device: torch.device, dtype: torch.dtype, say,
        folder: Path | None = None,
    ):  # fmt: skip
        """folder: of tables that lie in files."""
        self.config, self.corpus, self.device, self.dtype = config, corpus, device, dtype
        self.schedule = config.make_schedule()
        tokenizer = corpus.tokenizer
        strings = tokenizer.token_strings()
        self.parts: Parts = build(config, tokenizer.vocab_size, tokenizer.bos, device, folder, strings)
        self.parts.model.compute_dtype = dtype
        self.optimizers = build_optimizers(self.parts.model.named_parameters(), config.optim)
        self.loader = Loader(
            corpus.train, lambda step: row_plan(self.schedule, step), bos=corpus.tokenizer.bos, seed=config.seed,
            chunk_tokens=max(stage.document_cap for stage in config.schedule.stages), tails=config.tails,
            shuffle=config.shuffle, on_exhausted=config.on_exhausted, log=say,
        )  # fmt: skip
        self.cycles = Cycles(config, self.parts, self.loader, device)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.cycle: Cycle | None = None

    def gradient_norm(self) -> float:
        """Norm of all gradients, of the working sets' so far too: not finite if one number is not."""
        leaves = [*self.parts.model.parameters(), *(one.rows for one in self.cycle.sets.values())]
        return float(torch.nn.utils.get_total_norm([leaf.grad for leaf in leaves if leaf.grad is not None]))

    def train_step(self) -> tuple[float, float]:
        """A step of the cycle: forward, backward, dense update, at its end the tables. Returns nats a token and the
        gradient's norm; raises UserError before anything is changed when one of them is not finite."""
        batch, slots, now = self.loader.next(), self.cycle.slots.pop(self.step), self.schedule.at(self.step)
        loss = torch.zeros((), device=self.device)
        for first in range(0, len(batch.tokens), self.config.micro_batch):
            part = slice(first, first + self.config.micro_batch)
            whole = (batch.tokens, batch.targets, batch.docs)
            tokens_BT, targets_BT, docs_BT = (one[part].to(self.device) for one in whole)
            part_slots = {name: slots_BTR[part] for name, slots_BTR in slots.items()}
            hidden_BTD = self.parts.forward(
                self.cycle.sets, part_slots, tokens_BT, docs_BT, windows=now.windows, dtype=self.dtype
            )
            part_loss = cross_entropy(
                hidden_BTD, self.parts.model.head, targets_BT, softcap=self.parts.model.softcap,
                scale=1 / batch.tokens.numel(),
            )  # fmt: skip
            part_loss.backward()
            loss += part_loss.detach()
        nats, norm = float(loss), self.gradient_norm()
        if not math.isfinite(nats + norm):
            raise UserError(
                f"step {self.step + 1}: loss {nats}, gradient norm {norm}; the last good checkpoint is kept: "
                "lower the learning rate and start anew"
            )
        set_schedule(self.optimizers, self.config.optim, lr_mul=now.lr, momentum=now.momentum)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.tokens.numel()
        if self.step == self.cycle.end:
            self.end_cycle(now.lr)
        return nats, norm

    def end_cycle(self, lr_mul: float) -> None:
        """Let the owners apply the row rule to the rows of the cycle. Raises UserError when one refuses."""
        try:
            self.cycles.push(self.cycle, lr_mul)
        except (ValueError, OSError) as error:
            raise UserError(f"step {self.step}: {error}; the last good checkpoint is kept") from error
        self.cycle = None

    def score(self, rows: int, knockout: str = "full") -> Score:
        """Validate with the windows of the last stage."""
        windows = self.schedule.at(self.config.steps - 1).windows
        tokenizer = self.corpus.tokenizer
        return evaluate(
            self.parts, self.corpus.val, torch.from_numpy(tokenizer.token_bytes()).long(), tokenizer.bos, windows,
            row_tokens=self.config.row_tokens, rows=rows, batch_rows=self.config.micro_batch, dtype=self.dtype,
            knockout=knockout,
        )  # fmt: skip

    def save(self, folder: Path) -> None:
        """A checkpoint: weights, both kinds of optimizer state, position in the data, and a cycle under way."""
        state = {name: getattr(self, name) for name in self.COUNTS}
        state |= {"loader": self.loader.state(), "data": self.corpus.fingerprint, "in_cycle": self.cycle is not None}
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        checkpoint.save(folder, self.step, state, self.tensors(), optimizers)

    def tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """What a checkpoint holds, a file at a time: no table is ever in memory a second time."""
        yield "model", self.parts.model.state_dict()
        for name, table in self.parts.tables.items():
            yield from ((f"table_{name}.{n:03d}", part) for n, part in enumerate(state_parts(table)))
        for name, one in self.cycle.sets.items() if self.cycle else ():
            grad = torch.zeros_like(one.rows) if one.rows.grad is None else one.rows.grad
            yield f"cycle_{name}", {"ids": one.ids, "grad": grad}

    def load(self, saved: checkpoint.Checkpoint) -> None:
        """Everything that `save` wrote, so that what follows is bit for bit what would have followed."""
        if saved.state["data"] != self.corpus.fingerprint:
            raise UserError(f"{saved.path}: trained on other data or another tokenizer; give those the run began with")
        load_model(self.parts.model, saved)
        for name, table in self.parts.tables.items():
            load_parts(table, saved.parts(f"table_{name}"))
        for optimizer, state in zip(self.optimizers, saved.optimizer(), strict=True):
            optimizer.load_state_dict(state)
        self.loader.load_state(saved.state["loader"])
        for name in self.COUNTS:
            setattr(self, name, saved.state[name])
        if saved.state["in_cycle"]:
            self.cycle = self.cycles.restore(
                self.step, {name: saved.tensors(f"cycle_{name}") for name in self.parts.tables}
            )

    def close(self) -> None:
        """End the thread, and let go of the tables' files."""
        self.cycles.close()
        for table in self.parts.tables.values():
            table.close()


def train(config: RunConfig, resume: Path | None = None) -> RunResult:
    """Run, or go on with, a whole training. Raises UserError, DataError or OSError with one line for the user."""
    device, dtype, why = pick_device()
    join_processes(device)
    corpus = open_corpus(config, print)
    folder = RunFolder.open(resume) if resume else RunFolder.create(config)
    with folder.locked():
        try:
            tables = folder.path / "tables"
            if tables.exists():
                # What was pushed after the checkpoint is in these files too: they are made anew out of it.
                shutil.rmtree(tables)
            training = Training(config, corpus, device, dtype, print, tables)
        except Exception:
            if not resume:
                shutil.rmtree(folder.path)
            raise
        try:
            stopped = go(training, folder, why, resume)
            values = finish(training, folder) if stopped is None else {}
        finally:
            training.close()
            # The checkpoint holds every row that was touched; a sparse file is a burden to who copies the folder.
            shutil.rmtree(tables, ignore_errors=True)
    if stopped is not None:
        print(f"stopped after step {training.step}; go on with: python train_gpt.py --resume {folder.path}")
    return RunResult(folder.path, values, stopped)


def go(training: Training, folder: RunFolder, why: str, resume: Path | None) -> int | None:
    """Say what is trained, from where, and train it; the signal that ended it early, or None."""
    config, device, dtype, corpus = training.config, training.device, training.dtype, training.corpus
    groups = describe_groups(training.parts.model.named_parameters(), config.optim)
    folder.start(environment(device, dtype, why, 1, corpus.fingerprint) | {"groups": groups}, corpus.tokenizer, print)
    saved = checkpoint.newest(folder.checkpoints, print)
    if saved:
        training.load(checkpoint.Checkpoint(saved))
    if resume:
        folder.truncate_metrics(training.step, print)
        done = ", its last: making its result" if training.step == config.steps else ""
        print(f"going on with {folder.path} after step {training.step}{done}")
    print(f"{config.preset}: {config.steps} steps into {folder.path}")
    print(f"computing in {str(dtype).removeprefix('torch.')} on {device}: {why}; data {corpus.fingerprint[:12]}")
    if training.parts.tables:
        print(tables_of(config, training.parts.memories))
    for name, memory in training.parts.memories.items():
        for warning in memory.warnings:
            print(f"warning: memory {name}: {warning}")
    return steps(training, folder)


def steps(training: Training, folder: RunFolder) -> int | None:
    """Train to the last step, validating and saving on the way; the signal that ended it earlier, or None."""
    config = training.config
    reporter = Reporter(config.steps, training.step)
    with Stop(reporter) as stop:
        try:
            while training.step < config.steps and stop.signal is None:
                line = timed_step(training, reporter)
                due = training.step < config.steps
                if due and config.val_every and training.step % config.val_every == 0:
                    line |= score_fields(training.score(config.val_rows), reporter)
                folder.log(line)
                if due and config.save_every and training.step % config.save_every == 0:
                    save(training, folder)
            save(training, folder)
        except DataExhausted:
            save(training, folder)
            raise
        finally:
            reporter.close()
    return stop.signal if training.step < config.steps else None


def save(training: Training, folder: RunFolder) -> None:
    """A checkpoint, once the metrics up to it are on the disk."""
    if folder.metrics_path.exists():
        sync(folder.metrics_path)
    training.save(folder.checkpoints)


def join_processes(device: torch.device) -> None:
    """Under torchrun, join its process group and meet once, so that a broken set-up shows before the first step."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise UserError(f"torchrun started {world} processes, and a run takes one: give --nproc_per_node=1")
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        distributed.all_reduce(torch.ones(1, device=device))


def timed_step(training: Training, reporter: Reporter) -> dict[str, Any]:
    """Train one step on the clock; returns its line of metrics."""
    started, before = now_on(training.device), training.tokens
    training.cycle = training.cycle or training.cycles.begin(training.step)
    rows = training.cycle.rows
    nats, norm = training.train_step()
    taken = now_on(training.device) - started
    training.seconds += taken
    reporter.step(training.step, nats, (training.tokens - before) / taken, rows)
    in_files = any(table.place == "file" for table in training.parts.tables.values())
    return {
        "step": training.step, "loss": nats, "grad_norm": norm, "lr": training.schedule.at(training.step - 1).lr,
        "tokens": training.tokens, "seconds": training.seconds, "rows_touched": rows, "bytes_sent": 0,
        **process_bytes(disk=in_files),
    }  # fmt: skip


def now_on(device: torch.device) -> float:
    """Seconds of a clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def score_fields(score: Score, reporter: Reporter) -> dict[str, Any]:
    reporter.say(f"validation  {score.val_loss:.4f} nats a token  {bits(score)}")
    return {"val_loss": score.val_loss, "val_bpb": score.val_bpb}


def bits(score: Score) -> str:
    if score.val_bpb is None:
        return "no bits a byte (the tokenizer states no bytes)"
    return f"{score.val_bpb:.4f} bits a byte"


def finish(training: Training, folder: RunFolder) -> dict[str, Any]:
    """Validate, knock the memory out, and leave the result, a sample, the plot and the page."""
    config, parts = training.config, training.parts
    print("validating")
    final = training.score(config.final_val_rows)
    knockout = {name: training.score(config.val_rows, name).val_loss for name in knockouts(parts)}
    typical = folder.typical_step_seconds()
    active, memory = parameter_counts(parts.model, parts.memories)
    result = {
        "val_loss": final.val_loss, "val_bpb": final.val_bpb, "val_tokens": final.tokens, "seconds": training.seconds,
        "steps": training.step, "tokens": training.tokens, "step_ms": typical and 1000 * typical,
        "active_params": active, "memory_params": memory, "peak_bytes": peak_bytes(training.device), "world": 1,
        "rank_tokens": [training.tokens], "rank_bytes_sent": [0],
        "rank_table_bytes": [sum(table.table_bytes() + table.state_bytes() for table in parts.tables.values())],
        "knockout": knockout,
    }  # fmt: skip
    folder.log_validation(training.step, final.val_loss, final.val_bpb)
    print(f"validation  {final.val_loss:.4f} nats a token  {bits(final)}  over {final.tokens:,} tokens")
    if knockout:
        print(f"the memory knocked out, on {config.val_rows} of the validation rows:")
    for name, loss in knockout.items():
        rise = "" if name == "full" else f"  ({loss - knockout['full']:+.4f})"
        print(f"  memory {name.replace('_', ' '):15} {loss:.4f}{rise}")
    write_json(folder.path / "result.json", result)
    write_sample(training, folder)
    write_report(folder.path)
    print(f"{folder.path}: result.json, loss.png, report.html")
    return result


def write_sample(training: Training, folder: RunFolder) -> None:
    """A short continuation of nothing, so that a person sees what the model has learnt."""
    config, tokenizer = training.config, training.corpus.tokenizer
    if not config.sample_tokens:
        return
    windows = training.schedule.at(config.steps - 1).windows
    drawn = generate(
        training.parts, [], config.sample_tokens, windows, tokenizer.bos, seed=config.seed, dtype=training.dtype,
        limit=config.model.max_tokens,
    )  # fmt: skip
    text = tokenizer.decode(list(drawn))
    write_atomic(folder.path / "sample.txt", text + "\n")
    print(f"sample:\n{text}")


def main(words: list[str]) -> int:
    """The command; returns the exit status: 1 after a mistake of the user's, 128 + signal after a stop."""
    try:
        # A sample may hold what the terminal cannot show.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        # Moments of rarely seen rows become denormal, ten times slower; always on, so that a resumption computes alike.
        torch.set_flush_denormal(True)
        threads.start_over()
        options = parse(words)
        if options.dry_run:
            print(describe(options.config))
            return 0
        result = train(options.config, options.resume)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        # torch knows no other sign of a size that memory cannot hold; any other RuntimeError is a fault of ours.
        if isinstance(error, RuntimeError) and "alloc" not in str(error) and "out of memory" not in str(error):
            raise
        print(f"train_gpt.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_gpt.py: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        torch.set_flush_denormal(False)
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return 0 if result.signal is None else 128 + result.signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
