"""Pure functions from ids to numbers: n-gram hashes, sign-row indices and a counter-based random mixer.

Lives here: what turns token ids into row ids, and counters into bits, the same on every device and in any order.
Not here: which memory asks for which n-gram, document rules (mome/memory/), and the rows themselves (rows.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

# By distance, the current token's first: modded-nanogpt's bigram table, and its pull request 360 (trigrams, signs).
HASH_MULTIPLIERS = {2: (36313, 27191), 3: (17351, 60961, 45259)}
SIGN_MULTIPLIERS = {2: (48271, 30011), 3: (58699, 39779, 26801)}

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


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


def hash_ngrams(tokens_BT: Tensor, history_BH: Tensor | None, order: int, rows: int) -> Tensor:
    """Row ids of the n-grams that end at each token: int64 [B, T], in [0, rows).

    (m0 * x_t) XOR (m1 * x_{t-1}) [XOR (m2 * x_{t-2})] in wrapping int32 arithmetic, modulo rows - 1 (never negative);
    the last row, rows - 1, is reserved for tokens with fewer than order - 1 predecessors. Document bounds are crossed.
    Formula: modded-nanogpt (order 2) and its pull request 360 (order 3); the record's slip of feeding the reserved id
    to position 1 as its predecessor is not copied. Raises ValueError unless order is 2 or 3 and 2 <= rows < 2**31.
    """
    _check_order(order)
    if not 2 <= rows < 1 << 31:
        raise ValueError(f"a hashed table of {rows} rows: choose at least 2 and fewer than 2**31 = 2147483648 rows")
    windows = ngram_windows(tokens_BT, history_BH, order)
    hashed_BT = _xor_int32(windows, HASH_MULTIPLIERS[order]).remainder_(rows - 1)
    return hashed_BT.masked_fill_(_short_of_history(windows), rows - 1)


def sign_index(tokens_BT: Tensor, history_BH: Tensor | None, order: int, sign_rows: int) -> Tensor:
    """Which row of the +-1 sign pool multiplies each token's n-gram row: int64 [B, T], in [0, sign_rows).

    The same XOR with other multipliers, modulo sign_rows; for a power of two these are the low bits, as in
    modded-nanogpt's pull request 360 (8192 rows, low 13 bits). A token without enough predecessors gets sign row 0, so
    that the reserved row of hash_ngrams always has the same signs.
    Raises ValueError unless order is 2 or 3 and 1 <= sign_rows < 2**31.
    """
    _check_order(order)
    if not 1 <= sign_rows < 1 << 31:
        raise ValueError(f"a sign pool of {sign_rows} rows: choose at least 1 and fewer than 2**31 rows")
    windows = ngram_windows(tokens_BT, history_BH, order)
    index_BT = _xor_int32(windows, SIGN_MULTIPLIERS[order]).remainder_(sign_rows)
    return index_BT.masked_fill_(_short_of_history(windows), 0)


def splitmix64(counter: Tensor) -> Tensor:
    """64 mixed bits for each counter: int64 in, int64 out (two's complement of the unsigned value), any shape.

    The n-th output of Steele, Lea and Flood's SplitMix64 (OOPSLA 2014) seeded with 0 is splitmix64(n - 1).
    """
    z = counter + 1
    z *= _GOLDEN
    # >> is arithmetic on int64: the mask clears the copies of the sign bit.
    z ^= (z >> 30).bitwise_and_((1 << 34) - 1)
    z *= _MIX_1
    z ^= (z >> 27).bitwise_and_((1 << 37) - 1)
    z *= _MIX_2
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def _check_order(order: int) -> None:
    if order not in HASH_MULTIPLIERS:
        raise ValueError(f"an n-gram hash of order {order}: the orders are {sorted(HASH_MULTIPLIERS)}")


def _xor_int32(windows: list[Tensor], multipliers: tuple[int, ...]) -> Tensor:
    """XOR of the products, wrapped to int32 and kept as int64; the products of int32 ids stay below 2**48 in int64."""
    mixed = windows[0] * multipliers[0]
    for ids_BT, multiplier in zip(windows[1:], multipliers[1:]):
        mixed ^= ids_BT * multiplier
    # Wrapping at the end equals wrapping each product: XOR works bit by bit.
    return mixed.to(torch.int32).to(torch.int64)


def _short_of_history(windows: list[Tensor]) -> Tensor:
    missing_BT = windows[-1] < 0
    for ids_BT in windows[1:-1]:
        missing_BT = missing_BT | (ids_BT < 0)
    return missing_BT
