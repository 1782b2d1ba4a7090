"""Pure functions from token ids to row ids: two n-gram hashes and their sign indices.

Lives here: windows of tokens over their history, the hashes `xor` and `mix`, and what each of them cannot do.
Not here: which memory asks for which n-gram and the rule for documents (mome/memory/), the 64-bit mixer
(kernels/initial.py), what a hash does to a corpus (collisions.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.initial import mixed, splitmix64

HASHES = ("xor", "mix")
ORDERS = range(2, 9)
# Rows of a range: xor wraps to int32; mix takes the remainder of 64 bits, in int64.
MOST_ROWS = {"xor": (1 << 31) - 1, "mix": 1 << 62}
MOST_SIGN_ROWS = (1 << 31) - 1

# By distance, the current token's first: modded-nanogpt's bigram table, and its pull request 360 (trigrams, signs).
HASH_MULTIPLIERS = {2: (36313, 27191), 3: (17351, 60961, 45259)}
SIGN_MULTIPLIERS = {2: (48271, 30011), 3: (58699, 39779, 26801)}

# Beside a multiple of the vocabulary to within this share of it, a hash that is linear in the ids folds onto itself.
NEAR = 1e-3


def ngram_windows(tokens_BT: Tensor, history_BH: Tensor | None, order: int) -> list[Tensor]:
    """The token and its predecessors: `order` tensors, int64 [B, T], the current token first, -1 where there is none.

    history_BH holds the ids that came before tokens_BT, the nearest last; -1 is no token, None is no history at all.
    Only its last order - 1 columns are read, and what is missing on its left counts as -1.
    """
    rows_B, steps_T = tokens_BT.shape
    reach = order - 1
    padded = tokens_BT.new_full((rows_B, reach + steps_T), -1, dtype=torch.int64)
    padded[:, reach:] = tokens_BT
    if history_BH is not None and reach:
        near = history_BH[:, -reach:]
        if near.shape[0] != rows_B:
            raise ValueError(f"history of {near.shape[0]} rows for {rows_B} rows of tokens: give one history a row")
        padded[:, reach - near.shape[1] : reach] = near
    return [padded[:, reach - back : reach - back + steps_T] for back in range(order)]


def hash_ngrams(
    tokens_BT: Tensor, history_BH: Tensor | None, orders: Sequence[int], rows: int, kind: str = "xor", heads: int = 1
) -> Tensor:
    """Row ids of the n-grams that end at each token: int64 [B, T, R], R = len(orders) * heads ranges of `rows` rows.

    Head k of the i-th order reads range r = i * heads + k, ids r * rows to (r + 1) * rows - 1. The last of them is
    reserved for tokens with fewer than order - 1 predecessors; the others hash modulo rows - 1, never negative.
    Document bounds are crossed.

    xor: (m_0 * x_t) XOR (m_1 * x_{t-1}) [XOR (m_2 * x_{t-2})] in wrapping int32 arithmetic. Formula: modded-nanogpt
         (order 2) and its pull request 360 (order 3); the record's slip of feeding the reserved id to position 1 as
         its predecessor is not copied.
    mix: h_1 = mix(x_t), h_j = mix(h_{j-1} XOR x_{t-j+1}), then mix(h_order XOR salt(order, head)) as an unsigned
         number, with mix the 64 bits of splitmix64. Every token goes through a whole round, so their order counts, and
         heads are independent: n-grams that share a row under one head share it under another by chance alone.

    Raises ValueError for an unknown kind; orders that are not ascending, distinct and from 2 to 8 (xor: 2 and 3); heads
    below 1 (xor: other than 1); rows below 2 or above MOST_ROWS[kind]; ids past int64.
    """
    _check(orders, kind, heads)
    most = MOST_ROWS[kind]
    if not 2 <= rows <= most:
        wider = ", or the hash mix" if kind == "xor" and rows > most else ""
        raise ValueError(f"a range of {rows} rows for the hash {kind}: choose 2 to {most} rows{wider}")
    ranges = len(orders) * heads
    if rows * ranges > 1 << 63:
        raise ValueError(f"{ranges} ranges of {rows} rows: their ids do not fit into 64 bits: choose fewer rows")
    ids = []
    for place, (code_BT, short_BT) in enumerate(_codes(tokens_BT, history_BH, orders, kind, heads, signs=False)):
        ids_BT = _remainder(code_BT, rows - 1, kind).masked_fill_(short_BT, rows - 1)
        ids.append(ids_BT.add_(place * rows))
    return torch.stack(ids, dim=-1)


def sign_indices(
    tokens_BT: Tensor, history_BH: Tensor | None, orders: Sequence[int], sign_rows: int, kind: str = "xor",
    heads: int = 1,
) -> Tensor:  # fmt: skip
    """Which row of the +-1 sign pool multiplies each row of hash_ngrams: int64 [B, T, R], in [0, sign_rows).

    The same hashes with other multipliers or salts, modulo sign_rows; xor with a power of two takes the low bits, as
    modded-nanogpt's pull request 360 does (8192 rows, low 13 bits). A token without enough predecessors gets sign row
    0, so that the reserved rows always have the same signs.
    Raises ValueError as hash_ngrams does, with 1 <= sign_rows < 2**31.
    """
    _check(orders, kind, heads)
    if not 1 <= sign_rows <= MOST_SIGN_ROWS:
        raise ValueError(f"a sign pool of {sign_rows} rows: choose at least 1 and fewer than 2**31 rows")
    picks = [
        _remainder(code_BT, sign_rows, kind).masked_fill_(short_BT, 0)
        for code_BT, short_BT in _codes(tokens_BT, history_BH, orders, kind, heads, signs=True)
    ]
    return torch.stack(picks, dim=-1)


def multiple_of(rows: int, vocab_size: int) -> int:
    """Which multiple of the vocabulary `rows` rows lie beside, to within NEAR of the vocabulary; 0: none.

    What counts is the modulus, rows - 1; a row count that is itself a multiple is meant as well.
    """
    for count in (rows - 1, rows):
        times = round(count / vocab_size)
        if times and abs(count / vocab_size - times) < NEAR:
            return times
    return 0


def weaknesses(orders: Sequence[int], rows: int, kind: str, vocab_size: int) -> list[str]:
    """A line for each way in which this hash spreads this vocabulary over `rows` rows worse than chance would.

    The lines are about xor alone. It reaches no further than the bits of its products: rows beyond are never read.
    And modulo a multiple of one of its multipliers the token so multiplied hardly counts; measured on 10 million
    tokens of Python, rows - 1 = 2 x 36313 to 8 x 36313: 1.4 to 2.3 % more of the bigrams' mass in a row whose largest
    n-gram is another. Multiples of the vocabulary, to which linear hashes are prone, were measured not to matter.
    """
    found = []
    for order in orders if kind == "xor" else ():
        multipliers = HASH_MULTIPLIERS[order]
        bits = ((vocab_size - 1) * max(multipliers)).bit_length()
        if bits < 32 and rows - 1 > 1 << bits:
            found.append(
                f"order {order}: the hash xor of {vocab_size:,} ids reaches {1 << bits:,} of {rows:,} rows: the others "
                "are never read; choose the hash mix"
            )
        for multiplier in multipliers:
            if (rows - 1) % multiplier == 0:
                found.append(
                    f"order {order}: {rows:,} rows are one more than a multiple of {multiplier}, which the hash xor "
                    "multiplies by: more n-grams collide; choose another row count, or the hash mix"
                )
    return found


def _check(orders: Sequence[int], kind: str, heads: int) -> None:
    if kind not in HASHES:
        raise ValueError(f"a hash {kind!r}: choose {' or '.join(HASHES)}")
    told = ", ".join(map(str, orders))
    if not orders or any(order not in ORDERS for order in orders) or any(a >= b for a, b in pairwise(orders)):
        raise ValueError(f"n-grams of order {told or 'none'}: give ascending orders from {ORDERS[0]} to {ORDERS[-1]}")
    if heads < 1:
        raise ValueError(f"{heads} heads of a hash: give 1 or more")
    if kind == "xor" and (heads > 1 or any(order not in HASH_MULTIPLIERS for order in orders)):
        raise ValueError(f"the hash xor has orders 2 and 3 and one head, not orders {told} and {heads}: choose mix")


def _codes(
    tokens_BT: Tensor, history_BH: Tensor | None, orders: Sequence[int], kind: str, heads: int, signs: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each range: what its n-grams hash to, int64 [B, T] (mix: unsigned), and which n-grams are short, bool."""
    windows = ngram_windows(tokens_BT, history_BH, orders[-1])
    multipliers = SIGN_MULTIPLIERS if signs else HASH_MULTIPLIERS
    short_BT = windows[0] < 0
    state_BT = splitmix64(windows[0]) if kind == "mix" else None
    for order in range(2, orders[-1] + 1):
        before_BT = windows[order - 1]
        short_BT = short_BT | (before_BT < 0)
        if kind == "mix":
            # One chain for all orders and heads.
            state_BT = splitmix64(state_BT ^ before_BT)
        if order not in orders:
            continue
        if kind == "xor":
            yield _xor_int32(windows[:order], multipliers[order]), short_BT
        else:
            for head in range(heads):
                yield splitmix64(state_BT ^ _salt(order, head, signs)), short_BT


@functools.cache
def _salt(order: int, head: int, signs: bool) -> int:
    """64 bits of which no two purposes share any by more than chance, as a signed number."""
    return mixed(order << 40 | head << 1 | signs)


def _xor_int32(windows: list[Tensor], multipliers: tuple[int, ...]) -> Tensor:
    """XOR of the products, wrapped to int32 and kept as int64; the products of int32 ids stay below 2**48 in int64."""
    mixed_BT = windows[0] * multipliers[0]
    for ids_BT, multiplier in zip(windows[1:], multipliers[1:]):
        mixed_BT ^= ids_BT * multiplier
    # Wrapping at the end equals wrapping each product: XOR works bit by bit.
    return mixed_BT.to(torch.int32).to(torch.int64)


def _remainder(code_BT: Tensor, modulus: int, kind: str) -> Tensor:
    """The code modulo `modulus`, in [0, modulus): a signed number for xor, an unsigned one of 64 bits for mix."""
    left_BT = code_BT.remainder(modulus)
    if kind == "mix":
        # A set sign bit makes int64 less than the unsigned number by 2**64.
        left_BT += (code_BT < 0) * ((1 << 64) % modulus)
        left_BT.remainder_(modulus)
    return left_BT
