"""Validation rows against loops over tokens: every row in order, the padded last one, evenly spaced ones.

Here: data.loader.validation_rows. Not here: what training reads (test_loader.py).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.loader import validation_rows
from data.shards import Shard, write_shard

BOS = 1

CORPORA = {
    "documents": [[BOS, 2, 3, BOS, 4, BOS, 5, 6, 7, 8, 9, 10, 11, 12, BOS, 13, 14, 15, 16, 17, 18]],
    "a leading piece": [[2, 3, 4, 5, BOS, 6, 7, 8]],
    "documents of one token": [[BOS] * 40],
    "several shards": [[BOS, *range(2, 30)], [BOS, *range(30, 44), BOS, BOS], [50, 51]],
    "a shard without a target": [[BOS], [BOS, 2, 3], [7]],
    "ids up to the last of uint16": [[BOS, 65535, 32768, 65534]],
}


@pytest.fixture
def shards(tmp_path):
    def make(*corpus, vocab_size=None):
        for i, ids in enumerate(corpus):
            write_shard(tmp_path / f"{i}.bin", np.array(ids))
        return [Shard(tmp_path / f"{i}.bin", vocab_size) for i in range(len(corpus))]

    return make


def brute_validation(corpus, tokens):
    """Every row of every shard, the last padded, token by token."""
    rows = []
    for ids in corpus:
        for at in range(0, len(ids) - 1, tokens):
            row = [[], [], []]
            number = 0
            for i in range(at, at + tokens):
                padding = i + 1 >= len(ids)
                if i > at and (i + 1 == len(ids) if padding else ids[i] == BOS):
                    number += 1
                row[0].append(BOS if padding else ids[i])
                row[1].append(-100 if padding else ids[i + 1])
                row[2].append(number)
            rows.append(row)
    return rows


def listed(batches):
    return [list(row) for b in batches for row in zip(b.tokens.tolist(), b.targets.tolist(), b.docs.tolist())]


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("tokens", [1, 4, 7, 20, 300])
@pytest.mark.parametrize("batch_rows", [1, 3])
def test_validation_rows_are_the_whole_shards_in_order(shards, name, tokens, batch_rows):
    corpus = CORPORA[name]
    batches = list(validation_rows(shards(*corpus), tokens, None, BOS, batch_rows))
    assert listed(batches) == brute_validation(corpus, tokens)
    assert [b.step for b in batches] == list(range(len(batches)))
    assert all(len(b.tokens) == batch_rows for b in batches[:-1]) and 1 <= len(batches[-1].tokens) <= batch_rows
    assert all(b.tokens.dtype == b.targets.dtype == torch.int64 and b.docs.dtype == torch.int32 for b in batches)
    targets = Counter(int(t) for b in batches for t in b.targets.flatten())
    del targets[-100]
    assert targets == Counter(t for ids in corpus for t in ids[1:])


@pytest.mark.parametrize("rows, chosen", [(1, [0]), (2, [0, 4]), (4, [0, 2, 4, 6]), (8, [0, 1, 2, 3, 4, 5, 6, 7])])
def test_fewer_rows_are_evenly_spaced_whole_ones(shards, rows, chosen):
    corpus = [list(range(2, 44)), list(range(50, 73))]  # whole rows of 6: six and three; a padded one each
    whole = [row for row in brute_validation(corpus, 6) if -100 not in row[1]]
    assert len(whole) == 9
    got = listed(validation_rows(shards(*corpus), 6, rows, BOS, 4))
    assert [whole.index(row) for row in got] == chosen


@pytest.mark.parametrize("rows", [9, 10, 1000])
def test_asking_for_as_many_rows_as_there_are_gives_all(shards, rows):
    corpus = [list(range(2, 44)), list(range(50, 73))]
    assert listed(validation_rows(shards(*corpus), 6, rows, BOS)) == brute_validation(corpus, 6)


def test_bad_input_is_refused_before_the_first_row(shards):
    with pytest.raises(DataError, match="no token to predict"):
        validation_rows(shards([BOS], [7]), 4, None, BOS)
    with pytest.raises(DataError, match="no token to predict"):
        validation_rows([], 4, 3, BOS)
    with pytest.raises(DataError, match="token id 40 at position 2 "):
        validation_rows(shards([BOS, 2], [BOS, 2, 40], vocab_size=40), 4, None, BOS)
    for tokens, rows, batch_rows in [(0, None, 1), (4, 0, 1), (4, None, 0)]:
        with pytest.raises(DataError, match=">= 1, not 0"):
            validation_rows(shards([BOS, 2, 3]), tokens, rows, BOS, batch_rows)
