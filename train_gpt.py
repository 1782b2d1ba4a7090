"""Train a language model with sparse memory embeddings: what a run is, in reading order.

    python train_gpt.py [PRESET] [flags]        PRESET may be left out and is then `local`
    python train_gpt.py --resume runs/FOLDER    go on where a run stopped
    torchrun --standalone --nproc_per_node=N train_gpt.py [PRESET] [flags]    the same on N processes

Lives here: the command line, the loop over cycles and steps, what a step is, what a checkpoint holds.
Not here: how a model is built (mome/run.py), what a table does (mome/table/), what an optimizer does (optim/), how
processes come together (mome/launch.py) and who owns what of the dense weights (mome/dense.py).
"""

from __future__ import annotations

import os

# Before torch loads OpenMP: a thread that waits may spin only for a moment, or whatever else runs on these cores makes
# a step many times slower (records/NOTEBOOK.md has the numbers).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# And before torch is there: a torchrun that died is told in a line of ours, not in a trace of its C++.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import io
import math
import re
import shutil
import signal
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.loader import DataExhausted, Loader, take
from kernels.cpu import threads
from kernels.row_update import column_squares
from mome.checkpoint import Checkpoint, newest
from mome.command import parse
from mome.config import RunConfig
from mome.cycle import Cycle, Cycles
from mome.dense import DenseOptimizers
from mome.describe import describe, tables_of
from mome.ending import bits, result_of, write_sample
from mome.errors import SharedError, UserError
from mome.evaluate import Score, evaluate
from mome.files import sync
from mome.launch import open_together, remember_stop, require_replicas, shared_folder, silent
from mome.loss import cross_entropy
from mome.progress import Reporter, Stop
from mome.run import Corpus, Parts, build, load_model, pick_device, row_plan
from mome.runfolder import RunFolder, environment
from mome.saving import Saver
from mome.step_sums import StepSums, summed
from mome.table.deltas import load_files
from mome.tools.report import write_report
from mome.usage import clock, process_bytes
from mome.watchdog import Watchdog, lost, plain
from mome.world import World
from optim.groups import describe as describe_groups
from optim.groups import set_schedule

# Steps of the data that the placement "balanced" looks at.
PREFIX_STEPS = 8


@dataclass(frozen=True)
class RunResult:
    """What a run came to. signal: the one that stopped it after a checkpoint; values is then empty."""

    folder: Path
    values: dict[str, Any]
    signal: int | None


class Training:
    """The state of a run between two steps, and the moves that change it. Every rank has one."""

    COUNTS = ("step", "tokens", "seconds")

    def __init__(
        self, config: RunConfig, corpus: Corpus, world: World, dtype: torch.dtype, say, folder: Path | None = None
    ):
        """folder: of tables that lie in files."""
        self.config, self.corpus, self.world, self.dtype = config, corpus, world, dtype
        self.device = world.device
        self.schedule = config.make_schedule()
        self.loader = self.make_loader(say)
        tokenizer = corpus.tokenizer
        self.parts: Parts = build(
            config, tokenizer.vocab_size, tokenizer.bos, world, folder, tokenizer.token_strings(), self.prefix,
            torch.promote_types(dtype, torch.float32),
        )  # fmt: skip
        self.parts.model.compute_dtype = dtype
        self.dense = DenseOptimizers(self.parts.model.named_parameters(), config.optim, world)
        self.cycles = Cycles(config, self.parts, self.loader, world)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.own_tokens, self.sent = 0, 0.0
        self.cycle: Cycle | None = None
        self.saver: Saver | None = None

    def make_loader(self, say) -> Loader:
        """What the run reads: every rank packs the same steps, and takes its share of each."""
        config = self.config
        return Loader(
            self.corpus.train, lambda step: row_plan(self.schedule, step), bos=self.corpus.tokenizer.bos,
            seed=config.seed, chunk_tokens=max(stage.document_cap for stage in config.schedule.stages),
            tails=config.tails, shuffle=config.shuffle, on_exhausted=config.on_exhausted, log=say,
        )  # fmt: skip

    def prefix(self) -> Iterable[Tensor]:
        """Token ids of the first steps of the run, wherever it is now."""
        loader = self.make_loader(silent)
        return [batch.tokens for batch in loader.peek(min(PREFIX_STEPS, self.config.steps))]

    def train_step(self, asked: int | None = None) -> StepSums:
        """A step: forward, backward, all gradients to their owners, dense update, at the cycle's end the tables.

        asked: a signal that asks this rank to stop. Collectives come in the order of mome.world.ORDER. Raises UserError
        before anything is changed when a loss or a gradient is not finite.
        """
        first, last = self.step == self.cycle.start, self.step + 1 == self.cycle.end
        if first:
            self.cycles.ask_counts(self.step)
        whole, slots, now = self.loader.next(), self.cycle.slots.pop(self.step), self.schedule.at(self.step)
        batch = take(whole, self.world.rank, self.world.size)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for begin in range(0, len(batch.tokens), self.config.micro_batch):
            part = slice(begin, begin + self.config.micro_batch)
            tokens_BT, targets_BT, docs_BT = (
                one[part].to(self.device) for one in (batch.tokens, batch.targets, batch.docs)
            )
            part_slots = {name: slots_BTR[part] for name, slots_BTR in slots.items()}
            hidden_BTD = self.parts.forward(
                self.cycle.sets, part_slots, tokens_BT, docs_BT, windows=now.windows, dtype=self.dtype
            )
            self.cycles.ask_ids()
            part_loss = cross_entropy(
                hidden_BTD, self.parts.model.head, targets_BT, softcap=self.parts.model.softcap,
                scale=1 / whole.tokens.numel(),
            )  # fmt: skip
            part_loss.backward()
            loss += part_loss.detach()
        if first:
            self.cycles.read_asked()
        self.dense.scatter()
        if last:
            self.cycles.send(self.cycle)
        sums, columns = self.add_up(loss, last, asked)
        if not math.isfinite(sums.nats + sums.dense_square + sums.row_square):
            raise SharedError(
                f"step {self.step + 1}: loss {sums.nats}, gradient norm {math.sqrt(sums.dense_square)}, of the rows "
                f"{math.sqrt(sums.row_square)}{self.culprit()}; the last good checkpoint is kept: "
                "lower the learning rate and start anew"
            )
        if last:
            self.end_cycle(now.lr, sums.row_square, columns)
        set_schedule(self.dense.optimizers, self.config.optim, lr_mul=now.lr, momentum=now.momentum)
        self.dense.update()
        self.dense.gathered()
        self.step += 1
        self.tokens += whole.tokens.numel()
        self.own_tokens += batch.tokens.numel()
        return sums

    def culprit(self) -> str:
        """Which table's row has a gradient that is not finite, on whatever rank; every rank is here then."""
        return next(filter(None, self.world.gather_objects("culprit", self.cycles.culprit(self.cycle))), "")

    def gradient_squares(self, last: bool) -> tuple[Tensor, float]:
        """This rank's shares of the squared norms of the dense and of the rows' gradients, once they have come."""
        dense = self.dense.square()
        return dense, self.cycles.merge(self.cycle) if last else self.cycles.square_so_far(self.cycle)

    def add_up(self, loss: Tensor, last: bool, asked: int | None) -> tuple[StepSums, dict[str, Tensor]]:
        """The sums of the step, and in a cycle's last one the column squares of tables whose rule keeps columns."""
        dense, rows = self.gradient_squares(last)
        votes = self.saver.votes() if self.saver else (0, 0)
        kept = {} if self.world.alone or not last else {
            name: column_squares(one.owner.rows.grad)
            for name, one in self.cycle.shared.items() if self.parts.tables[name].rule.keeps_columns
        }  # fmt: skip
        return summed(self.world, loss, dense, rows, self.cycle.rows, asked, votes, kept)

    def end_cycle(self, lr_mul: float, square: float, columns: dict[str, Tensor]) -> None:
        """Let the owners apply the row rule to the rows of the cycle, and send those of the next one on their way.

        Raises UserError when one refuses.
        """
        try:
            self.cycles.push(self.cycle, lr_mul, square, columns)
        except (ValueError, OSError) as error:
            raise UserError(f"step {self.step + 1}: {error}; the last good checkpoint is kept") from error
        self.cycle = None
        self.cycles.serve()

    def score(self, rows: int, knockout: str = "full") -> Score:
        """Validate with the windows of the last stage."""
        windows = self.schedule.at(self.config.steps - 1).windows
        tokenizer = self.corpus.tokenizer
        return evaluate(
            self.parts, self.corpus.val, torch.from_numpy(tokenizer.token_bytes()).long(), tokenizer.bos, windows,
            row_tokens=self.config.row_tokens, rows=rows, batch_rows=self.config.micro_batch, dtype=self.dtype,
            knockout=knockout, world=self.world,
        )  # fmt: skip

    def save(self, last: bool) -> None:
        """Begin a checkpoint: weights, both kinds of optimizer state, position in the data, and a cycle under way.

        A thread writes it while training goes on; the last one is waited for.
        """
        state = {name: getattr(self, name) for name in self.COUNTS}
        state |= {"loader": self.loader.state(), "data": self.corpus.fingerprint, "in_cycle": self.cycle is not None}
        cycle = {}
        for name, one in self.cycle.sets.items() if self.cycle else ():
            grad = torch.zeros_like(one.rows) if one.rows.grad is None else one.rows.grad
            cycle[name] = {"ids": one.ids, "grad": grad}
        model, optim = self.parts.model.state_dict(), self.dense.state_dict()
        self.saver.begin(self.step, state, model, optim, self.parts.tables, cycle)
        if last:
            self.saver.finish()

    def load(self, saved: Checkpoint) -> None:
        """Everything that `save` wrote: what follows would have followed then too, bit for bit on as many ranks."""
        if saved.state["data"] != self.corpus.fingerprint:
            raise SharedError(
                f"{saved.path}: trained on other data or another tokenizer; give those the run began with"
            )
        load_model(self.parts.model, saved)
        state = self.dense.state_dict()
        saved.load_optimizer(state)
        self.dense.load_state_dict(state)
        for name, table in self.parts.tables.items():
            load_files(table, saved.table(name))
        self.loader.load_state(saved.state["loader"])
        for name in self.COUNTS:
            setattr(self, name, saved.state[name])
        self.own_tokens = self.tokens // self.world.size
        if saved.state["in_cycle"]:
            world = self.world
            kept = {name: saved.cycle(name, world.rank, world.size) for name in self.parts.tables}
            self.cycle = self.cycles.restore(self.step, kept)

    def close(self) -> None:
        """End the threads, and let go of the tables' files."""
        if self.saver is not None:
            self.saver.close()
        self.cycles.close()
        for table in self.parts.tables.values():
            table.close()


def train(config: RunConfig, resume: Path | None = None) -> RunResult:
    """Run, or go on with, a whole training. Raises UserError, DataError or OSError with one line for the user."""
    device, dtype, why = pick_device()
    # Later than the watchdog, which knows more to say.
    world = World.join(device, config.timeout, longer=60)
    say = print if world.first else silent
    try:
        with Watchdog(world, config.timeout) as watchdog:
            corpus = open_together(config, dtype, world, say)
            folder, what = shared_folder(config, resume, world)
            if what == "nothing":
                say(f"{folder.path}: the attempt before has come to its result")
                return RunResult(folder.path, {}, None)
            with folder.locked() if world.first else nullcontext():
                return train_in(folder, config, corpus, world, watchdog, dtype, why, what == "go on", say)
    finally:
        world.close()


def train_in(
    folder: RunFolder, config: RunConfig, corpus: Corpus, world: World, watchdog: Watchdog, dtype: torch.dtype,
    why: str, resumed: bool, say,
) -> RunResult:  # fmt: skip
    """The training whose folder this process may use."""
    tables = folder.path / "tables"
    try:
        if world.first:
            # What was pushed after the checkpoint is in these files too: they are made anew out of it.
            shutil.rmtree(tables, ignore_errors=True)
        world.meet("tables")
        training = Training(config, corpus, world, dtype, say, tables)
    except Exception:
        if not resumed and world.first:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    try:
        stopped = go(training, folder, watchdog, why, resumed, say)
        values = finish(training, folder, say) if stopped is None else {}
        world.meet("end")
    except Exception as error:
        # Before threads and files are closed, for which the others would wait.
        shown = watchdog.tell(error)
        raise shown from (error if shown is not error else None)
    finally:
        training.close()
        # The checkpoint holds every row that was touched; a sparse file is a burden to who copies the folder.
        if world.first:
            shutil.rmtree(tables, ignore_errors=True)
    if stopped is not None:
        if world.first:
            remember_stop(config, folder)
        say(f"stopped after step {training.step}; go on with: python train_gpt.py --resume {folder.path}")
    return RunResult(folder.path, values, stopped)


def go(training: Training, folder: RunFolder, watchdog: Watchdog, why: str, resumed: bool, say) -> int | None:
    """Say what is trained, from where, and train it; the signal that ended it early, or None."""
    config, device, dtype, corpus = training.config, training.device, training.dtype, training.corpus
    world = training.world
    if world.first:
        groups = describe_groups(training.parts.model.named_parameters(), config.optim)
        about = environment(device, dtype, why, world.size, corpus.fingerprint) | {"groups": groups}
        folder.start(about, corpus.tokenizer, print)
    path = newest(folder.checkpoints, print, world)
    saved = Checkpoint(path) if path else None
    if saved:
        training.load(saved)
    training.saver = Saver(folder.checkpoints, world, after=saved)
    watchdog.saved = lambda: training.saver.last is not None
    if resumed:
        if world.first:
            folder.truncate_metrics(training.step, print)
        done = ", its last: making its result" if training.step == config.steps else ""
        say(f"going on with {folder.path} after step {training.step}{done}")
    shared = "" if world.alone else f" on {world.size} processes"
    say(f"{config.preset}: {config.steps} steps into {folder.path}{shared}")
    say(f"computing in {str(dtype).removeprefix('torch.')} on {device}: {why}; data {corpus.fingerprint[:12]}")
    if training.parts.tables:
        say(tables_of(config, training.parts.memories))
    for name, memory in training.parts.memories.items():
        for warning in memory.warnings:
            say(f"warning: memory {name}: {warning}")
    return steps(training, folder, watchdog)


def steps(training: Training, folder: RunFolder, watchdog: Watchdog) -> int | None:
    """Train to the last step, validating and saving on the way; the signal that ended it earlier, or None."""
    config, world, stopped = training.config, training.world, None
    reporter = Reporter(config.steps, training.step, silent=not world.first)
    with Stop(reporter, watchdog.broken) as stop:
        try:
            while training.step < config.steps and stopped is None:
                line, agreed = timed_step(training, reporter, stop.signal)
                # Who is alone need not ask, and hears of a signal a step sooner.
                stopped = stop.signal if world.alone else agreed
                due = training.step < config.steps
                if due and config.paranoid and training.step % config.paranoid == 0:
                    require_replicas(world, training.dense.hash_of_replicas(), training.step)
                if due and config.val_every and training.step % config.val_every == 0:
                    line |= score_fields(training.score(config.val_rows), reporter)
                if world.first:
                    folder.log(line)
                if due and config.save_every and training.step % config.save_every == 0:
                    save(training, folder)
            save(training, folder, last=True)
        except DataExhausted as error:
            save(training, folder, last=True)
            raise SharedError(str(error)) from error
        finally:
            reporter.close()
    return stopped if training.step < config.steps else None


def save(training: Training, folder: RunFolder, last: bool = False) -> None:
    """A checkpoint, once the metrics up to it are on the disk. The last one is waited for."""
    if training.world.first and folder.metrics_path.exists():
        sync(folder.metrics_path)
    training.save(last)


def timed_step(training: Training, reporter: Reporter, asked: int | None) -> tuple[dict[str, Any], int | None]:
    """Train one step on the clock; its line of metrics, and the signal that all ranks stop for."""
    started, before, sent = clock(training.device), training.tokens, training.sent
    training.world.step = training.step + 1
    training.cycle = training.cycle or training.cycles.begin(training.step)
    last = training.step + 1 == training.cycle.end
    sums = training.train_step(asked)
    taken = clock(training.device) - started
    training.seconds, training.sent = training.seconds + taken, sums.bytes_sent
    training.saver.settle(int(sums.written), int(sums.failed))
    reporter.step(training.step, sums.nats, (training.tokens - before) / taken, int(sums.rows))
    in_files = any(table.place == "file" for table in training.parts.tables.values())
    line = {
        "step": training.step, "loss": sums.nats, "grad_norm": math.sqrt(sums.dense_square),
        **({"row_grad_norm": math.sqrt(sums.row_square)} if last and training.parts.tables else {}),
        "lr": training.schedule.at(training.step - 1).lr, "tokens": training.tokens, "seconds": training.seconds,
        "rows_touched": int(sums.rows), "bytes_sent": int(sums.bytes_sent - sent), **process_bytes(disk=in_files),
    }  # fmt: skip
    return line, sums.signal


def score_fields(score: Score, reporter: Reporter) -> dict[str, Any]:
    reporter.say(f"validation  {score.val_loss:.4f} nats a token  {bits(score)}")
    return {"val_loss": score.val_loss, "val_bpb": score.val_bpb}


def finish(training: Training, folder: RunFolder, say) -> dict[str, Any]:
    """Validate, knock the memory out, and leave the result, a sample, the plot and the page."""
    config, parts, world = training.config, training.parts, training.world
    say("validating")
    counts = {name: getattr(training, name) for name in Training.COUNTS}
    counts |= {"rank_tokens": training.own_tokens, "rank_bytes_sent": world.bytes_sent()}
    result = result_of(config, parts, training.score, folder, world, counts, say)
    if world.first:
        write_sample(config, parts, training.corpus.tokenizer, folder, training.dtype, training.saver.last)
        write_report(folder.path)
        print(f"{folder.path}: result.json, loss.png, report.html")
    return result


def main(words: list[str]) -> int:
    """The command; returns the exit status: 1 after a mistake of the user's, 128 + signal after a stop."""
    # What all processes meet alike is said once a machine: another machine may have been given other words.
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        # A sample may hold what the terminal cannot show.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace", line_buffering=True)
        # Moments of rarely seen rows become denormal, ten times slower; always on, so that a resumption computes alike.
        torch.set_flush_denormal(True)
        threads.start_over()
        options = parse(words)
        if options.dry_run:
            (print if first else silent)(describe(options.config))
            return 0
        result = train(options.config, options.resume)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        # torch knows no other sign of a size that memory cannot hold; any other RuntimeError is a fault of ours.
        if isinstance(error, RuntimeError) and not (lost(error) or re.search("alloc|out of memory", str(error))):
            raise
        if first or not isinstance(error, SharedError):
            rank = "" if isinstance(error, SharedError) or "RANK" not in os.environ else f"rank {os.environ['RANK']}: "
            text = plain(error) if lost(error) else " ".join(str(error).split())
            print(f"train_gpt.py: {rank}{text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_gpt.py: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        torch.set_flush_denormal(False)
    return 0 if result.signal is None else 128 + result.signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
