"""Validation against a loop over rows and tokens in float64, knock-outs one by one, and that it changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from data.loader import validation_rows
from data.shards import Shard, write_shard
from mome.evaluate import evaluate, knock_out, knockouts
from mome.loss import head_logits
from mome.table.parts import state_parts
from tests.trained import rows_of, trained_like

V, BOS, T, WINDOWS = 40, 0, 16, (3, 9)
WORDS = ["local", "--memories", "routed", "ngram", "--model.layers", "2", "--model.width", "32", "--model.heads", "2"]
WORDS += ["--memory.ngram.rows", "64", "--row-tokens", str(T)]
BYTES = torch.tensor([0, *np.random.default_rng(1).integers(1, 9, V - 1)])


@pytest.fixture
def shard(tmp_path):
    random = np.random.default_rng(0)
    ids = random.integers(1, V, 5 * T + 7)
    ids[[0, 9, 30, 31, 60]] = BOS
    write_shard(tmp_path / "val.bin", ids)
    return Shard(tmp_path / "val.bin", V)


@pytest.fixture
def parts():
    return trained_like(WORDS, V, BOS)


def score(parts, shard, **options):
    given = {"row_tokens": T, "rows": 0, "batch_rows": 2, "dtype": torch.float64} | options
    return evaluate(parts, [shard], BYTES, BOS, WINDOWS, **given)


@torch.no_grad()
def test_nats_and_bits_equal_a_loop(parts, shard):
    nats = text_nats = tokens = text_bytes = 0
    for batch in validation_rows([shard], T, None, BOS):
        sets, slots = parts.read(batch.tokens)
        hidden = parts.forward(sets, slots, batch.tokens, batch.docs, windows=WINDOWS, dtype=torch.float64)
        logits = head_logits(hidden[0], parts.model.head, softcap=True)
        for place, target in enumerate(batch.targets[0].tolist()):
            if target < 0:
                continue
            loss = float(-logits[place].log_softmax(0)[target])
            nats, tokens = nats + loss, tokens + 1
            if BYTES[target]:
                text_nats, text_bytes = text_nats + loss, text_bytes + int(BYTES[target])
    got = score(parts, shard)
    assert got.tokens == tokens == 5 * T + 6
    assert got.val_loss == pytest.approx(nats / tokens, abs=1e-9)
    assert got.val_bpb == pytest.approx(text_nats / text_bytes / math.log(2), abs=1e-9)


def test_the_batch_changes_nothing(parts, shard):
    assert score(parts, shard, batch_rows=1).val_loss == pytest.approx(
        score(parts, shard, batch_rows=4).val_loss, abs=1e-9
    )


def test_no_bytes_no_bits(parts, shard):
    zero = torch.zeros_like(BYTES)
    got = evaluate(parts, [shard], zero, BOS, WINDOWS, row_tokens=T, rows=0, batch_rows=2, dtype=torch.float64)
    assert got.val_bpb is None and math.isfinite(got.val_loss)


def test_every_knock_out_differs_and_evaluation_is_pure(parts, shard):
    before = {name: list(state_parts(table)) for name, table in parts.tables.items()}
    losses = {name: score(parts, shard, knockout=name).val_loss for name in knockouts(parts)}
    assert len(set(losses.values())) == len(losses) == 7
    assert losses == {name: score(parts, shard, knockout=name).val_loss for name in knockouts(parts)}
    for name, table in parts.tables.items():
        (one,), (other,) = before[name], state_parts(table)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_rows_put_in_the_place_of_others(parts):
    tokens = torch.randint(1, V, (2, T))
    rows = rows_of(parts, tokens)
    generator = torch.Generator().manual_seed(0)
    assert knock_out(rows, "off", generator) == {}
    assert list(knock_out(rows, "off:ngram", generator)) == ["routed"]
    mean = knock_out(rows, "mean_row", generator)["ngram"]
    for read in range(2):
        expected = rows["ngram"][:, :, read].reshape(-1, 1, 32).mean(0)
        torch.testing.assert_close(mean[1, 3, read], expected)
    mixed = knock_out(rows, "shuffled_rows", generator)["ngram"]
    assert not torch.equal(mixed, rows["ngram"])
    for read in range(2):
        as_sets = [
            sorted(map(tuple, one[:, :, read].flatten(0, 1).flatten(1).tolist())) for one in (mixed, rows["ngram"])
        ]
        assert as_sets[0] == as_sets[1]
