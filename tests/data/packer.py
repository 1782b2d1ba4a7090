"""A packer that walks the corpus token by token, and corpora to hold the loader to it.

Here: what tests/data/test_loader.py compares with, written without the loader's code. Not here: the tests.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from data.loader import DataExhausted, Loader, RowPlan, permutation

BOS = 1


def spell(*lengths, leading=0, first=2):
    """Documents of these lengths (BOS included), their ids counting on; `leading` ids without a BOS before them."""
    ids = itertools.count(first)
    tokens = [next(ids) for _ in range(leading)]
    for length in lengths:
        tokens += [BOS] + [next(ids) for _ in range(length - 1)]
    return tokens


def steady(rows, tokens, cap):
    return lambda step: RowPlan(rows, tokens, cap)


def load(made, plan, chunk=64, **kwargs):
    settings_ = dict(bos=BOS, seed=0, chunk_tokens=chunk, log=lambda line: None) | kwargs
    return Loader(made, plan, **settings_)


def same(a, b):
    return (
        a.step == b.step
        and torch.equal(a.tokens, b.tokens)
        and torch.equal(a.targets, b.targets)
        and torch.equal(a.docs, b.docs)
    )


# The brute-force packer: python lists and one token at a time.


def brute_documents(ids):
    documents = [[]]
    for token in ids:
        if token == BOS and documents[-1]:
            documents.append([])
        documents[-1].append(token)
    return documents


def brute_epochs(corpus, seed, shuffle, chunk, keep, repeat):
    """Yields chunk after chunk (keep) or document after document (drop), epoch after epoch."""
    for epoch in itertools.count():
        order = range(len(corpus))
        if shuffle:
            order = permutation(seed, epoch, 0, len(corpus)).tolist()
        for number in order:
            pieces = []
            for document in brute_documents(corpus[number]):
                if not keep:
                    pieces.append(document)
                    continue
                while document:
                    pieces.append(document[:chunk])
                    document = document[chunk:]
            if shuffle:
                pieces = [pieces[i] for i in permutation(seed, epoch, number + 1, len(pieces)).tolist()]
            yield from pieces
        if not repeat:
            return


def brute_batches(corpus, plan, seed, shuffle, chunk, keep, repeat):
    """Yields (tokens, targets, docs) as nested lists; ends with the data."""
    pieces = brute_epochs(corpus, seed, shuffle, chunk, keep, repeat)
    stream = ((token, at) for piece in pieces for at, token in enumerate(piece))  # keep
    held = None
    for step in itertools.count():
        wanted = plan(step)
        tokens, targets, docs = [], [], []
        for _ in range(wanted.rows):
            row, number = [], -1
            numbers = []
            try:
                if keep:
                    while len(row) < wanted.tokens + 1:
                        token, at = held or next(stream)
                        held = None
                        if not row or at % wanted.document_cap == 0:
                            number += 1
                        row.append(token)
                        numbers.append(number)
                    held = (token, at)
                else:
                    while len(row) < wanted.tokens + 1:
                        number += 1
                        document = next(pieces)
                        for at, token in enumerate(document):
                            if at < wanted.document_cap and len(row) < wanted.tokens + 1:
                                row.append(token)
                                numbers.append(number)
            except StopIteration:
                return
            tokens.append(row[:-1])
            targets.append(row[1:])
            docs.append(numbers[:-1])
        yield tokens, targets, docs


def assert_equals_brute(made, corpus, plan, steps, *, seed=0, shuffle, chunk=64, tails, on_exhausted="repeat"):
    loader = load(made, plan, chunk, seed=seed, shuffle=shuffle, tails=tails, on_exhausted=on_exhausted)
    brute = brute_batches(corpus, plan, seed, shuffle, chunk, tails == "keep", on_exhausted == "repeat")
    for step in range(steps):
        expected = next(brute, None)
        if expected is None:
            for _ in range(2):
                with pytest.raises(DataExhausted):
                    loader.next()
            assert loader.peek(3) == []
            return step
        batch = loader.next()
        assert batch.step == step
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64 and batch.docs.dtype == torch.int32
        assert (batch.tokens.tolist(), batch.targets.tolist(), batch.docs.tolist()) == expected
    return steps


CORPORA = {
    "several shards": [spell(5, 17, 3, 40, first=2), spell(9, 1, 1, 30, 2, first=100), spell(11, 23, first=200)],
    "documents of one token": [spell(*[1] * 50)],
    "one long document": [spell(211)],
    "no BOS at all": [list(range(2, 90)), list(range(100, 113))],
    "leading pieces": [spell(5, 9, 14, leading=7), spell(20, leading=1, first=100), spell(2, 3, leading=40, first=300)],
    "shards shorter than a micro-row": [spell(1, first=2), spell(2, first=10), [77], spell(3, 1, first=20), [BOS]],
}
