"""A cycle of N steps == dense training: whole tables as leaves, gradients summed over N steps, dense weights stepping.

Here: exactness points 1 and 2 with the real model, loss, memories and cycles, in float64 against a dense rule written
out; periods that change, their beta2, clipping.
Not here: the table alone (test_table_dense.py), which steps a cycle has (tests/optim/test_schedule.py).
"""

from __future__ import annotations

import math
from collections import deque

import pytest
import torch

from data.loader import Batch, DataExhausted
from mome.command import parse
from mome.cycle import Cycles
from mome.loss import cross_entropy
from mome.run import build
from mome.world import World
from optim.groups import build_optimizers, set_schedule

V, BOS, WINDOWS, STEPS = 40, 0, (3, 9), 12
WORDS = [
    "local", "--memories", "routed", "ngram", "value", "--row-tokens", "32", "--steps", str(STEPS),
    "--model.layers", "2", "--model.width", "32", "--model.heads", "2", "--memory.ngram.rows", "64",
    "--table.routed.weight-decay", "0.7", "--table.ngram.weight-decay", "0.3",
    "--table.value.rule", "adagrad", "--table.value.weight-decay", "0.5",
]  # fmt: skip
BY_STEP = ["--table.routed.beta2-by", "step"]
# Flags and where their cycles end; the second stage begins at step 6.
CASES = {
    "every step": ([], [*range(1, 13)]),
    "two steps, one ahead": (["--cycle", "2"], [*range(2, 13, 2)]),
    "four steps, cut by the stage": (["--cycle", "4", "--prefetch", "0"], [4, 6, 8, 12]),
    "every odd step, every 4th later": (
        ["--cycle", "2", "--cycle-late", "4", "--cycle-late-from", "0.32"], [2, 4, 6, 8, 12],
    ),
    "beta2 by step": (["--cycle", "3", "--cycle-late", "1", *BY_STEP], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
    "clipped": (["--cycle", "3", "--row-clip", "0.03", "--prefetch", "2"], [3, 6, 9, 12]),
}  # fmt: skip


def lr_mul(event):
    """Up, and down to 0."""
    return [0.3, 1.0, 0.6, 0.0][event % 4]


class Batches:
    """Batches as a loader gives them: a look ahead, and one after the other; then DataExhausted."""

    def __init__(self, steps=STEPS):
        generator = torch.Generator().manual_seed(3)
        self.left = deque()
        for step in range(steps):
            # A part of the vocabulary a step, so that many rows stay untouched for a while and some for good.
            low = int(torch.randint(0, 30, (1,), generator=generator))
            both = torch.randint(low, low + 8, (2, 18), generator=generator)
            tokens, targets = both[:, :-1].contiguous(), both[:, 1:].contiguous()
            self.left.append(Batch(step, tokens, targets, torch.zeros_like(tokens, dtype=torch.int32)))

    def peek(self, count):
        return list(self.left)[:count]

    def next(self):
        if not self.left:
            raise DataExhausted("the data ends")
        return self.left.popleft()


def start(flags):
    config = parse([*WORDS, *flags]).config
    parts = build(config, V, BOS, dtype=torch.float64)
    return config, parts, build_optimizers(parts.model.named_parameters(), config.optim)


def dense_step(parts, optimizers, config, rows, batch):
    hidden = parts.model(batch.tokens, batch.docs, parts.payloads(rows, batch.tokens), windows=WINDOWS)
    loss = cross_entropy(hidden, parts.model.head, batch.targets, softcap=True, scale=1 / batch.tokens.numel())
    loss.backward()
    set_schedule(optimizers, config.optim, lr_mul=1.0, momentum=0.9)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def end(cycles, cycle, lr):
    """What a trainer does at the end of a cycle."""
    cycles.send(cycle)
    cycles.push(cycle, lr, cycles.merge(cycle), {})
    cycles.serve()


def train_sparse(flags):
    config, parts, optimizers = start(flags)
    loader, losses, ends = Batches(), [], []
    cycles, cycle = Cycles(config, parts, loader, World()), None
    for step in range(STEPS):
        cycle = cycle or cycles.begin(step)
        batch, slots = loader.next(), cycle.slots.pop(step)
        rows = {name: one.gather_slots(slots[name]) for name, one in cycle.sets.items()}
        losses.append(dense_step(parts, optimizers, config, rows, batch))
        if step + 1 == cycle.end:
            end(cycles, cycle, lr_mul(len(ends)))
            ends.append(step + 1)
            cycle = None
    cycles.close()
    tables = {name: table.read_rows(torch.arange(table.spec.rows)) for name, table in parts.tables.items()}
    seconds = {name: table.read_second(torch.arange(table.spec.rows)) for name, table in parts.tables.items()}
    return ends, losses, tables, seconds, parts.model.state_dict()


def train_dense(flags, ends):
    """The same with every row of every table decayed and updated at every event."""
    config, parts, optimizers = start(flags)
    rows = {name: table.read_rows(torch.arange(table.spec.rows)) for name, table in parts.tables.items()}
    seconds = {name: torch.zeros(w.shape[:2], dtype=torch.float64) for name, w in rows.items()}
    product, scales = dict.fromkeys(rows, 1.0), []
    losses, loader = [], Batches()
    for event, (first, end) in enumerate(zip([0, *ends], ends)):
        leaves = {name: w.clone().requires_grad_() for name, w in rows.items()}
        for _ in range(first, end):
            batch = loader.next()
            picked = {name: leaves[name][ids] for name, ids in parts.row_ids(batch.tokens).items()}
            losses.append(dense_step(parts, optimizers, config, picked, batch))
        norm = math.sqrt(sum(float(leaf.grad.square().sum()) for leaf in leaves.values()))
        scales.append(min(1.0, config.row_clip / norm) if config.row_clip else 1.0)
        for name, leaf in leaves.items():
            how = getattr(config.table, name)
            grad = leaf.grad * scales[-1]
            lr, power = how.lr * lr_mul(event), grad.square().mean(-1)
            if how.rule == "adam":
                beta2 = how.beta2 ** (end - first) if name == "routed" and BY_STEP[0] in flags else how.beta2
                product[name] *= beta2
                seconds[name] = beta2 * seconds[name] + (1 - beta2) * power
                root = (seconds[name] / (1 - product[name])).sqrt()
            else:
                seconds[name] = seconds[name] + power
                root = seconds[name].sqrt()
            rows[name] = leaf.detach() * (1 - lr * how.weight_decay) - lr * grad / (root + how.eps)[..., None]
    return scales, losses, rows, seconds, parts.model.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_cycles_equal_dense_training(case):
    flags, ends = CASES[case]
    sparse, (scales, *dense) = train_sparse(flags), train_dense(flags, ends)
    assert sparse[0] == ends
    # Some events are clipped and some are not, or the test shows half of it.
    assert {scale < 1 for scale in scales} == ({True, False} if "--row-clip" in flags else {False})
    torch.testing.assert_close(sparse[1], dense[0], rtol=0, atol=1e-11)
    for mine, theirs in zip(sparse[2:], dense[1:]):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-10)


def test_the_length_of_the_cycle_matters():
    assert train_sparse([])[1] != train_sparse(["--cycle", "4"])[1]


@pytest.mark.parametrize("depth", ["0", "1", "3"])
@pytest.mark.parametrize("left", [4, 5])
def test_where_the_data_ends_a_cycle_has_the_steps_there_are(depth, left):
    config, parts, _ = start(["--cycle", "2", "--prefetch", depth])
    loader = Batches(left)
    cycles = Cycles(config, parts, loader, World())
    for step in range(0, left, 2):
        cycle = cycles.begin(step)
        assert (cycle.start, cycle.end, list(cycle.slots)) == (step, step + 2, [*range(step, min(step + 2, left))])
        for _ in cycle.slots:
            loader.next()
        end(cycles, cycle, 1.0)
    with pytest.raises(DataExhausted):
        cycles.begin(step + 2)
    cycles.close()


@pytest.mark.parametrize("depth", ["0", "2"])
def test_a_cycle_restored_in_its_middle_is_the_one_that_was_left(depth):
    config, parts, _ = start(["--cycle", "3", "--prefetch", depth])
    loader = Batches()
    cycles = Cycles(config, parts, loader, World())
    left = cycles.begin(0)
    loader.next()
    for one in left.sets.values():
        one.rows.grad = torch.full_like(one.rows, 0.25)
    kept = {name: {"ids": one.ids, "grad": one.rows.grad} for name, one in left.sets.items()}
    again = cycles.restore(1, kept)
    assert (again.start, again.end, again.rows, list(again.slots)) == (0, 3, left.rows, [1, 2])
    for name, one in again.sets.items():
        assert torch.equal(one.ids, left.sets[name].ids) and torch.equal(one.rows, left.sets[name].rows)
        assert torch.equal(one.rows.grad, left.sets[name].rows.grad)
        assert all(torch.equal(again.slots[step][name], left.slots[step][name]) for step in (1, 2))
    cycles.close()


def test_a_norm_that_is_not_finite_is_refused_and_not_scaled_away():
    config, parts, _ = start(["--row-clip", "1"])
    cycles = Cycles(config, parts, Batches(), World())
    cycle = cycles.begin(0)
    for one in cycle.sets.values():
        one.rows.grad = torch.full_like(one.rows, float("inf"))
    with pytest.raises(ValueError, match="not finite"):
        end(cycles, cycle, 1.0)
    cycles.close()
