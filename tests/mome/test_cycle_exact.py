"""A cycle of N steps == dense training: whole tables as leaves, gradients summed over N steps, dense weights stepping.

Here: exactness points 1 and 2 with the real model, loss and memories, in float64 against a dense rule written out.
Not here: the table alone (test_table_exact.py).
"""

from __future__ import annotations

import pytest
import torch

from mome.command import parse
from mome.loss import cross_entropy
from mome.run import build, gather
from mome.table.rows import RowTable
from optim.groups import build_optimizers, set_schedule

V, BOS, WINDOWS, STEPS = 40, 0, (3, 9), 8
WORDS = [
    "local", "--memories", "routed", "ngram", "value", "--row-tokens", "32",
    "--model.layers", "2", "--model.width", "32", "--model.heads", "2", "--memory.ngram.rows", "64",
    "--table.routed.weight-decay", "0.7", "--table.ngram.weight-decay", "0.3",
    "--table.value.rule", "adagrad", "--table.value.weight-decay", "0.5",
]  # fmt: skip


def lr_mul(event):
    """Up, and down to 0."""
    return [0.3, 1.0, 0.6, 0.0][event % 4]


def batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        # A part of the vocabulary a step, so that many rows stay untouched for a while and some for good.
        low = int(torch.randint(0, 30, (1,), generator=generator))
        both = torch.randint(low, low + 8, (2, 18), generator=generator)
        yield both[:, :-1].contiguous(), both[:, 1:].contiguous()


def start():
    config = parse(WORDS).config
    parts = build(config, V, BOS)
    parts.model.double()
    for name, table in parts.tables.items():
        parts.tables[name] = RowTable(table.spec, table.rule, seed=5, dtype=torch.float64, name=name)
    return config, parts, build_optimizers(parts.model.named_parameters(), config.optim)


def dense_step(parts, optimizers, config, rows, tokens_BT, targets_BT):
    hidden = parts.model(
        tokens_BT, torch.zeros_like(tokens_BT, dtype=torch.int32), parts.payloads(rows, tokens_BT), windows=WINDOWS
    )
    loss = cross_entropy(hidden, parts.model.head, targets_BT, softcap=True, scale=1 / tokens_BT.numel())
    loss.backward()
    set_schedule(optimizers, config.optim, lr_mul=1.0, momentum=0.9)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def train_sparse(cycle):
    config, parts, optimizers = start()
    losses, steps = [], list(batches())
    for event, first in enumerate(range(0, STEPS, cycle)):
        ids = [parts.row_ids(tokens) for tokens, _ in steps[first : first + cycle]]
        sets = parts.pull(ids, grad=True)
        for one, (tokens, targets) in zip(ids, steps[first : first + cycle]):
            losses.append(dense_step(parts, optimizers, config, gather(sets, one, torch.float64), tokens, targets))
        for name, table in parts.tables.items():
            table.push(sets[name], lr=getattr(config.table, name).lr * lr_mul(event))
    tables = {name: table.read_rows(torch.arange(table.spec.rows)) for name, table in parts.tables.items()}
    seconds = {name: table.read_second(torch.arange(table.spec.rows)) for name, table in parts.tables.items()}
    return losses, tables, seconds, parts.model.state_dict()


def train_dense(cycle):
    """The same with every row of every table decayed and updated at every event."""
    config, parts, optimizers = start()
    rows = {name: table.read_rows(torch.arange(table.spec.rows)) for name, table in parts.tables.items()}
    seconds = {name: torch.zeros(w.shape[:2], dtype=torch.float64) for name, w in rows.items()}
    product = dict.fromkeys(rows, 1.0)
    losses, steps = [], list(batches())
    for event, first in enumerate(range(0, STEPS, cycle)):
        leaves = {name: w.clone().requires_grad_() for name, w in rows.items()}
        for tokens, targets in steps[first : first + cycle]:
            picked = {name: leaves[name][ids] for name, ids in parts.row_ids(tokens).items()}
            losses.append(dense_step(parts, optimizers, config, picked, tokens, targets))
        for name, leaf in leaves.items():
            how = getattr(config.table, name)
            lr, power = how.lr * lr_mul(event), leaf.grad.square().mean(-1)
            if how.rule == "adam":
                product[name] *= how.beta2
                seconds[name] = how.beta2 * seconds[name] + (1 - how.beta2) * power
                root = (seconds[name] / (1 - product[name])).sqrt()
            else:
                seconds[name] = seconds[name] + power
                root = seconds[name].sqrt()
            rows[name] = leaf.detach() * (1 - lr * how.weight_decay) - lr * leaf.grad / (root + how.eps)[..., None]
    return losses, rows, seconds, parts.model.state_dict()


@pytest.mark.parametrize("cycle", [1, 2, 4])
def test_cycles_equal_dense_training(cycle):
    sparse, dense = train_sparse(cycle), train_dense(cycle)
    torch.testing.assert_close(sparse[0], dense[0], rtol=0, atol=1e-11)
    for mine, theirs in zip(sparse[1:], dense[1:]):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-10)


def test_the_length_of_the_cycle_matters():
    assert train_sparse(1)[0] != train_sparse(4)[0]
