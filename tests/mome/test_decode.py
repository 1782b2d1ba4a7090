"""Full forward == token by token == chunks, for every memory, n-gram history and documents included, in float64."""

from __future__ import annotations

import pytest
import torch

from mome.generate import Decoder, generate
from mome.loss import head_logits
from tests.trained import rows_of, trained_like

WINDOWS = (3, 9)
BOS = 0
SHAPES = ["--model.layers", "3", "--model.width", "32", "--model.heads", "2", "--row-tokens", "32"]
ROWS = ["--memory.ngram.rows", "64"]
CASES = {
    "none": ["--memories"],
    "routed": ["--memories", "routed"],
    "routed by bigram": [
        "--memories",
        "routed",
        "--memory.routed.index",
        "bigram",
        "--memory.routed.bigram-rows",
        "50",
    ],
    "ngram across documents": ["--memories", "ngram", *ROWS],
    "ngram within documents": ["--memories", "ngram", *ROWS, "--memory.ngram.no-cross-documents"],
    "value": ["--memories", "value"],
    "all": ["--memories", "routed", "ngram", "value", *ROWS],
}


def whole(parts, tokens_BT):
    docs_BT = (tokens_BT == BOS).cumsum(1).int()
    rows = rows_of(parts, tokens_BT)
    hidden_BTD = parts.model(tokens_BT, docs_BT, parts.payloads(rows, tokens_BT), windows=WINDOWS)
    return head_logits(hidden_BTD[0], parts.model.head, softcap=True)


@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
@torch.no_grad()
def test_pieces_equal_the_whole(words):
    parts = trained_like(["local", *SHAPES, *words], 40, BOS)
    torch.manual_seed(2)
    tokens_BT = torch.randint(1, 40, (1, 29))
    tokens_BT[0, [0, 7, 8, 20]] = BOS
    expected = whole(parts, tokens_BT)
    for sizes in ([1] * 29, [5, 1, 7, 3, 13], [28, 1], [2, 27]):
        decoder = Decoder(parts, WINDOWS, BOS, torch.float64)
        got = torch.cat([decoder.feed(piece.tolist()) for piece in tokens_BT[0].split(sizes)])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_every_memory_counts_in_these_cases():
    tokens_BT = torch.arange(1, 20).unsqueeze(0)
    for words in CASES.values():
        parts = trained_like(["local", *SHAPES, *words], 40, BOS)
        full = whole(parts, tokens_BT)
        for name in list(parts.memories):
            off = dict(parts.memories)
            del off[name]
            without = type(parts)(parts.model, off, {key: table for key, table in parts.tables.items() if key != name})
            assert (whole(without, tokens_BT) - full).abs().max() > 1e-3


def test_greedy_sampling_equals_uncached_argmax():
    parts = trained_like(["local", *SHAPES, *CASES["all"]], 40, BOS)
    drawn = list(generate(parts, [3, 5], 12, WINDOWS, BOS, temperature=0, dtype=torch.float64))
    ids = [BOS, 3, 5]
    with torch.no_grad():
        for token in drawn:
            assert int(whole(parts, torch.tensor([ids]))[-1].argmax()) == token
            ids.append(token)
    assert drawn
