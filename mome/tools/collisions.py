"""python -m mome collisions: what a hashed n-gram table of a given size does to a corpus, before anything is trained.

Lives here: the command, its table, its notes on what to do, the JSON file.
Not here: the counting (mome/table/collisions.py) and the hashes (mome/table/hashing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import data.local
from data.tokenizer import Tokenizer, load_tokenizer
from mome.config import require
from mome.errors import UserError
from mome.files import write_json
from mome.options import parse
from mome.presets import LOCAL
from mome.run import CACHE, opened
from mome.table.canonical import canonical_ids
from mome.table.collisions import HeadUse, Ngrams, OrderUse, Placement, distinct_ngrams, order_use, placement, rows_of
from mome.table.hashing import HASH_MULTIPLIERS, HASHES, MOST_ROWS, hash_ngrams, multiple_of, weaknesses
from mome.tools.bench.output import print_table, require_place

NGRAM = LOCAL.memory.ngram
MUCH = 0.1  # minority mass from which more rows are advised
WIDER = 4  # how many times the rows that advice is about
SPARE = 10  # rows for each distinct n-gram from which fewer are advised
SHORT = 0.98  # of the rows that chance would use, below which a hash is at fault

COLUMNS = (
    "hash", "order", "head", "n-grams", "distinct", "rows used", "of ideal", "distinct sharing", "minority mass",
    "rows a lookup",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Count the n-grams of a corpus and where a hash puts them: rows used, rows shared, and the share of tokens whose
    n-gram is not the most frequent one of its row (minority mass), by order and head. Trains nothing."""

    train_glob: str = ""
    """Shards (.bin) to count; empty: the built-in corpus."""
    tokenizer: str = "local"
    """Of those shards: gpt2, or a tokenizer.json."""
    tokens: int = 0
    """How many tokens to count, from the first on (0: all)."""
    rows: int = NGRAM.rows
    """Rows for each order and head, as --memory.ngram.rows."""
    orders: tuple[int, ...] = NGRAM.orders
    """Lengths of the n-grams."""
    heads: int = NGRAM.heads
    """Heads for each order."""
    hash: Literal["xor", "mix", "both"] = "both"
    """Which hash, or both of them where xor can do what is asked for."""
    canonical: bool = False
    """Fold tokens that differ in case, accents and white space into one, as --memory.ngram.canonical."""
    batch: int = LOCAL.micro_batch * LOCAL.row_tokens
    """Tokens of a batch, for the distinct rows a lookup."""
    json: Path | None = None
    """Write the numbers to this file."""

    def __post_init__(self):
        require(self.tokens >= 0, "tokens", self.tokens, "give 0 or more")
        require(self.batch >= 1, "batch", self.batch, "give 1 or more")


def corpus_of(options: Options) -> tuple[np.ndarray, Tokenizer]:
    """The tokens to count, uint16 [N], and the tokenizer they were made with. Raises UserError or DataError."""
    pattern, name = options.train_glob, options.tokenizer
    if not pattern:
        if name != "local":
            raise UserError(f"--tokenizer {name}: say with --train-glob which shards were made with it")
        local = data.local.build(CACHE / "local", print)
        pattern, name = local.train_glob, local.tokenizer_path
    elif name == "local":
        beside = Path(pattern).parent / "tokenizer.json"
        raise UserError(f"--train-glob {pattern}: name its tokenizer too, --tokenizer {beside} or gpt2")
    tokenizer = load_tokenizer(name)
    pieces, left = [], options.tokens or None
    for shard in opened(pattern, "training", tokenizer):
        pieces.append(shard.tokens[:left])
        left = None if left is None else left - len(pieces[-1])
        if left == 0:
            break
    return np.concatenate(pieces), tokenizer


def report(options: Options, tokens_N: np.ndarray, vocab_size: int) -> tuple[list[tuple[str, OrderUse]], list[str]]:
    """(hash, use) of every order, and notes on what to do about them."""
    kinds, notes = kinds_of(options)
    found = []
    times = multiple_of(options.rows, vocab_size)
    if times:
        notes.append(
            f"warning: {options.rows:,} rows lie within a thousandth of {times:,} x the vocabulary of {vocab_size:,}, "
            "where a hash that is linear in the ids, such as a polynomial, folds onto itself; xor and mix do not, by "
            "measurement"
        )
    for kind in kinds:
        notes += weaknesses(options.orders, options.rows, kind, vocab_size)
    for ngrams in distinct_ngrams(tokens_N, options.orders):
        for kind in kinds:
            found.append((kind, order_use(tokens_N, ngrams, options.rows, kind, options.heads, options.batch)))
            notes += fault(kind, found[-1][1])
        notes += advice(found[-1][1], tokens_N, ngrams)
    return found, notes


def kinds_of(options: Options) -> tuple[list[str], list[str]]:
    """The hashes to count, and what is left out. Raises ValueError for what none of them can do."""
    kinds = list(HASHES) if options.hash == "both" else [options.hash]
    fits = options.heads == 1 and set(options.orders) <= set(HASH_MULTIPLIERS) and options.rows <= MOST_ROWS["xor"]
    notes = []
    if options.hash == "both" and not fits:
        kinds.remove("xor")
        notes.append("xor is left out: it has orders 2 and 3, one head and fewer than 2**31 rows")
    for kind in kinds:
        hash_ngrams(torch.empty(0, 0), None, options.orders, options.rows, kind, options.heads)
    return kinds, notes


def fault(kind: str, use: OrderUse) -> list[str]:
    """A note where a hash is worse than chance."""
    least = min(head.placement.used for head in use.heads)
    if least >= SHORT * use.ideal:
        return []
    return [
        f"order {use.order}: {kind} uses {least / use.ideal:.1%} of the rows that chance would: choose another hash or "
        "another row count"
    ]


def advice(use: OrderUse, tokens_N: np.ndarray, ngrams: Ngrams) -> list[str]:
    """A note where there are too few rows for an order's n-grams, or far too many."""
    rows, mass = use.available + 1, use.heads[0].placement.minority
    if use.distinct and use.available > SPARE * use.distinct:
        part = use.heads[0].placement.used / use.available
        return [f"order {use.order}: {use.distinct:,} n-grams fill {part:.1%} of the rows: fewer rows would do"]
    wider = min(WIDER * rows, MOST_ROWS["mix"])
    if mass < MUCH or wider == rows:
        return []
    then = placement(rows_of(tokens_N, ngrams, wider, "mix", 1)[:, 0], ngrams.counts_D).minority
    return [
        f"order {use.order}: {mass:.0%} of the tokens read a row whose most frequent n-gram is another one; with "
        f"{wider:,} rows it would be {then:.0%} (--memory.ngram.rows {wider})"
    ]


def lines_of(kind: str, use: OrderUse) -> list[list[str]]:
    """A line of the table for each head, and one for all of them together."""
    counts = [f"{use.tokens:,}", f"{use.distinct:,}"]
    lines = []
    for number, head in enumerate(use.heads):
        lines.append([kind, str(use.order), str(number), *counts, *_cells(head, use.ideal)])
    if len(use.heads) > 1:
        lines.append([kind, str(use.order), "all", *counts, "", "", *_shares(use.joint), ""])
    return lines


def _cells(head: HeadUse, ideal: float) -> list[str]:
    used = head.placement.used
    part = f"{used / ideal:.2%}" if ideal else "-"
    return [f"{used:,}", part, *_shares(head.placement), f"{head.per_lookup:.3f}"]


def _shares(placed: Placement) -> list[str]:
    return [f"{placed.shared:.4%}", f"{placed.minority:.4f}"]


def main(words: Sequence[str]) -> int:
    """The command. Errors: UserError, DataError, ValueError, OSError."""
    options = parse(Options, words, "python -m mome collisions")
    require_place(options.json)
    kinds_of(options)
    tokens_N, tokenizer = corpus_of(options)
    vocab_size = classes = tokenizer.vocab_size
    if options.canonical:
        canonical_V = canonical_ids(tokenizer.token_strings()).numpy()
        classes = len(np.unique(canonical_V))
        tokens_N = canonical_V.astype(np.uint16)[tokens_N]
    found, notes = report(options, tokens_N, vocab_size)
    folded = f", folded to {classes:,}" if options.canonical else ""
    title = f"{len(tokens_N):,} tokens of {vocab_size:,} ids{folded}; {options.rows:,} rows for each order and head"
    rows = [line for kind, use in found for line in lines_of(kind, use)]
    print_table(title, COLUMNS, rows, notes)
    if options.json:
        write_json(options.json, record(options, found, notes, len(tokens_N), vocab_size, classes))
        print(options.json)
    return 0


def record(
    options: Options, found: Sequence[tuple[str, OrderUse]], notes: Sequence[str], tokens: int, vocab_size: int,
    classes: int,
) -> dict[str, Any]:  # fmt: skip
    """What the JSON file holds: shares from 0 to 1, counts of rows, n-grams and tokens."""
    return {
        "corpus": Path(options.train_glob).name or "local",
        "tokens": tokens,
        "vocabulary": vocab_size,
        "classes": classes,
        "rows": options.rows,
        "batch": options.batch,
        "orders": [{"hash": kind, **asdict(use)} for kind, use in found],
        "notes": list(notes),
    }
