"""How a row of a table is kept: the planes that its numbers are stored in, and the way there and back.

Lives here: RowFormat and FORMATS, by name: "fp32", "fp64" (exactness tests), "bf16", "bf16+16", "fp8"; row_format.
Not here: the arithmetic of rounding (kernels/rounding.py), where planes lie (store.py), and who reads or writes them
(rows.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kernels.rounding import decode_fp8, encode_fp8, join_bf16, round_bf16, split_bf16

Planes = dict[str, Tensor]


class RowFormat(ABC):
    """One way to keep rows [lanes, dim]. In every format zero bytes stand for a row of zeros.

    exact: whether decode(encode(rows)) gives every bit back; otherwise rounding is stochastic, drawn from (key, row id,
    element) alone. dtype: what rows are decoded to and encoded from.
    """

    exact = True
    dtype = torch.float32

    @abstractmethod
    def planes(self, lanes: int, dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The planes by name, (shape of one row's part, dtype). "rows" is always one of them."""

    @abstractmethod
    def decode(self, planes: Planes, out: Tensor | None = None) -> Tensor:
        """The rows [U, L, D] in `dtype`, into `out` if given. planes: those of `planes`, each [U, *shape].

        `out` is contiguous; without it the result may be the plane itself.
        """

    @abstractmethod
    def encode(self, rows_ULD: Tensor, ids_U: Tensor, key: int, out: Planes | None = None) -> Planes:
        """The planes of rows with these ids (int64 [U], global and distinct), into `out` (contiguous) if given.

        key: kernels.rounding.rounding_key of the table's seed and the event; exact formats use neither it nor the ids.
        Without `out` a plane may be the rows themselves.
        """


class _Plain(RowFormat):
    """The numbers as a step computes with them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def planes(self, lanes, dim):
        return {"rows": ((lanes, dim), self.dtype)}

    def decode(self, planes, out=None):
        return planes["rows"] if out is None else out.copy_(planes["rows"])

    def encode(self, rows_ULD, ids_U, key, out=None):
        return {"rows": rows_ULD if out is None else out["rows"].copy_(rows_ULD)}


class _Bf16(RowFormat):
    """bfloat16, rounded stochastically: exactly unbiased, 2 bytes a number."""

    exact = False

    def planes(self, lanes, dim):
        return {"rows": ((lanes, dim), torch.bfloat16)}

    def decode(self, planes, out=None):
        return planes["rows"].to(torch.float32) if out is None else out.copy_(planes["rows"])

    def encode(self, rows_ULD, ids_U, key, out=None):
        into_UE = _flat(out["rows"]) if out else None
        return {"rows": round_bf16(rows_ULD.flatten(1), ids_U, key, into_UE).view(rows_ULD.shape)}


class _Bf16AndLow(RowFormat):
    """float32 in two planes: its upper half, which is a bfloat16 by itself, and its lower half apart from it."""

    def planes(self, lanes, dim):
        return {"rows": ((lanes, dim), torch.bfloat16), "low": ((lanes, dim), torch.int16)}

    def decode(self, planes, out=None):
        high, low = planes["rows"], planes["low"]
        into_UE = None if out is None else _flat(out)
        return join_bf16(high.flatten(1), low.flatten(1), into_UE).view(high.shape)

    def encode(self, rows_ULD, ids_U, key, out=None):
        into_UE = (_flat(out["rows"]), _flat(out["low"])) if out else ()
        high, low = split_bf16(rows_ULD.flatten(1), *into_UE)
        return {"rows": high.view(rows_ULD.shape), "low": low.view(rows_ULD.shape)}


class _Fp8(RowFormat):
    """e4m3 codes and one float32 scale a lane, rounded stochastically; decay of a lane moves its scale alone."""

    exact = False

    def planes(self, lanes, dim):
        return {"rows": ((lanes, dim), torch.uint8), "scale": ((lanes,), torch.float32)}

    def decode(self, planes, out=None):
        return decode_fp8(planes["rows"], planes["scale"], out)

    def encode(self, rows_ULD, ids_U, key, out=None):
        codes_ULD, scale_UL = encode_fp8(rows_ULD, ids_U, key, *((out["rows"], out["scale"]) if out else ()))
        return {"rows": codes_ULD, "scale": scale_UL}


FORMATS: dict[str, RowFormat] = {
    "fp32": _Plain(torch.float32),
    "fp64": _Plain(torch.float64),
    "bf16": _Bf16(),
    "bf16+16": _Bf16AndLow(),
    "fp8": _Fp8(),
}


def row_format(name: str) -> RowFormat:
    """The format of this name. Raises ValueError for another one."""
    if name not in FORMATS:
        raise ValueError(f"row format {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _flat(out_ULD: Tensor) -> Tensor:
    """A view [U, L * D] to write into; flatten would copy what is not contiguous, and the result would be lost."""
    return out_ULD.view(len(out_ULD), math.prod(out_ULD.shape[1:]))
