"""Trainings on a tiny corpus whose steps 1, 2, 3, 4, 6, 8, 12 and 24 ranks share evenly, and what they came to.

Lives here: what the tests of whole trainings share. Not here: the tests, and starting processes (processes.py).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import train_gpt
from mome.command import parse
from mome.launch import silent
from mome.run import open_corpus
from mome.world import World
from optim.schedule import Stage
from tests import tiny

STEPS = 12


def make(
    world: World, corpus: list[str], folder: Path, flags: tuple[str, ...], steps: int = STEPS,
    dtype: torch.dtype = torch.float64, memories: bool = True,
) -> train_gpt.Training:  # fmt: skip
    """A training of 24 micro-rows a step, in two stages; two passes a step where a rank has more than 3 of them."""
    torch.set_flush_denormal(True)
    config = parse(tiny.tiny_flags(corpus, folder / "runs", *flags)).config
    stages = (Stage(1.0, 24, (16, 32), document_cap=32), Stage(1.0, 24, (16, 32), lr_mul=1.2, document_cap=24))
    config = replace(
        config, row_tokens=16, steps=steps, micro_batch=int(os.environ.get("MOME_TEST_MICRO", "3")), schedule=replace(config.schedule, stages=stages),
        memories=config.memories if memories else (),
    )  # fmt: skip
    tables = folder / f"tables_{world.size}"
    return train_gpt.Training(config, open_corpus(config, silent), world, dtype, silent, tables)


def train(training: train_gpt.Training, until: int) -> list[tuple[float, ...]]:
    """Train up to that step; the metrics of each: nats, squared norms, distinct rows."""
    metrics = []
    while training.step < until:
        training.world.step = training.step + 1
        if training.world.calls is not None:
            training.world.calls.append("step")
        training.cycle = training.cycle or training.cycles.begin(training.step)
        last = training.step + 1 == training.cycle.end
        sums = training.train_step()
        metrics.append((sums.nats, sums.dense_square, sums.row_square if last else 0.0, sums.rows))
    return metrics


def outcome(training: train_gpt.Training) -> dict[str, Any]:
    """Weights, and this rank's rows with their state, by table: (ids, planes as dense training has them)."""
    rows = {}
    for name, table in training.parts.tables.items():
        ids = torch.arange(table.spec.rows)
        ids = ids[table.owned(ids)]
        planes = {"rows": table.read_rows(ids)}
        if table.rule.keeps_second:
            planes["second"] = table.read_second(ids)
        if table.rule.keeps_moment:
            planes["moment"] = table.read_moment(ids)
        if table.columns_LD is not None:
            planes["columns"] = table.columns_LD.expand(len(ids), *table.columns_LD.shape)
        planes["last_event"] = table.read_planes(ids)["last_event"]
        rows[name] = ids, planes
    weights = {name: weight.clone() for name, weight in training.parts.model.state_dict().items()}
    return {"weights": weights, "rows": rows}


def whole_rows(ranks: list[dict[str, Any]], name: str) -> dict[str, torch.Tensor]:
    """A table's rows of all ranks in the order of their ids, each of which is there once."""
    ids = torch.cat([one["rows"][name][0] for one in ranks])
    order = ids.argsort()
    assert torch.equal(ids[order], torch.arange(len(ids)))
    return {
        key: torch.cat([one["rows"][name][1][key] for one in ranks])[order] for key in ranks[0]["rows"][name][1]
    }  # fmt: skip


def assert_alike(ranks: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float, case: object) -> None:
    """Outcomes of two numbers of ranks: weights the same bits on all ranks, and all numbers alike in both."""
    close = {"rtol": tolerance, "atol": tolerance}
    for name, weight in expected[0]["weights"].items():
        for rank in ranks:
            assert torch.equal(rank["weights"][name], ranks[0]["weights"][name]), (case, name)
        torch.testing.assert_close(ranks[0]["weights"][name], weight, **close, msg=lambda m, n=name: f"{case} {n}: {m}")
    for name in expected[0]["rows"]:
        mine = whole_rows(ranks, name)
        for key, value in whole_rows(expected, name).items():
            torch.testing.assert_close(mine[key], value, **close, msg=lambda m, n=name, k=key: f"{case} {n} {k}: {m}")
