"""A table in files: deltas of the rows that were pushed since the save before, of which the newest wins.

    table_NAME.DDDD.SSSS.PPP.safetensors    delta D, list S (the rank that wrote it), part P: ids and planes (parts.py)
    table_NAME.clock.DDDD.safetensors       the clock's sums, and columns, as of delta D

Within a list ids ascend over its parts; the lists of one delta share no row. A folder holds every delta that its newest
state is made of, so that it needs no other; the first delta is all rows touched until then.

Lives here: TableFiles (the files of one table, in order), load_files (into a table), merged (many deltas as one).
Not here: what a part holds (parts.py), reading single rows (file.py), folders, markers and links (mome/checkpoint.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mome.errors import UserError
from mome.table.file import mapped_names, mapped_torch
from mome.table.parts import PART_BYTES, Loading
from mome.table.rows import RowTable

_PART = re.compile(r"table_(.+)\.(\d{4,})\.(\d{4,})\.(\d{3,})\.safetensors")
_CLOCK = re.compile(r"table_(.+)\.clock\.(\d{4,})\.safetensors")


class PartFile(NamedTuple):
    """One file of rows; they compare by delta, list and part, hence oldest first."""

    delta: int
    list: int
    part: int
    path: Path


def part_name(table: str, delta: int, list: int, part: int) -> str:
    """The file name of a part."""
    return f"table_{table}.{delta:04d}.{list:04d}.{part:03d}.safetensors"


def clock_name(table: str, delta: int) -> str:
    """The file name of a clock."""
    return f"table_{table}.clock.{delta:04d}.safetensors"


@dataclass(frozen=True)
class TableFiles:
    """The files of one table in one checkpoint: its clock and its parts, oldest delta first."""

    table: str
    delta: int
    clock: Path
    parts: tuple[PartFile, ...]

    @property
    def deltas(self) -> int:
        """How many deltas hold a row."""
        return len({part.delta for part in self.parts})

    def rows(self) -> int:
        """Rows in all parts; one that several deltas hold counts as often."""
        return sum(len(mapped_torch(part.path, "ids")) for part in self.parts)


def tables_in(folder: Path, names: Iterable[str]) -> dict[str, TableFiles]:
    """The tables among the file names of a folder. Raises UserError for parts without a clock, or with several."""
    clocks: dict[str, list[tuple[int, Path]]] = {}
    parts: dict[str, list[PartFile]] = {}
    for name in names:
        if found := _CLOCK.fullmatch(name):
            clocks.setdefault(found[1], []).append((int(found[2]), folder / name))
        elif found := _PART.fullmatch(name):
            parts.setdefault(found[1], []).append(PartFile(*map(int, found.groups()[1:]), folder / name))
    for table in sorted({*clocks, *parts}):
        if len(clocks.get(table, ())) != 1:
            raise UserError(
                f"{folder}: {len(clocks.get(table, ()))} clocks of the table {table!r}, which has one: it is damaged"
            )
    return {table: TableFiles(table, *found[0], tuple(sorted(parts.get(table, ())))) for table, found in clocks.items()}


def read_clock(path: Path) -> dict[str, Tensor]:
    """The tensors of a clock's file. Raises UserError where it cannot be read."""
    try:
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path}: its clock cannot be read ({error}); copy or write it again") from error


def mapped_part(path: Path) -> dict[str, Tensor]:
    """A part as memory maps: what is not looked at is not read. Raises UserError where it cannot be read."""
    return {name: mapped_torch(path, name) for name in mapped_names(path)}


def load_files(table: RowTable, files: TableFiles) -> None:
    """Make a table what it was when these files were written, as far as its rows are its own; as load_parts.

    Raises UserError for a file that cannot be read, ValueError for one of another table. When the clock or the oldest
    part is refused nothing has changed; later ones leave a table that refuses to be used.
    """
    loading = Loading(table)
    loading.begin(read_clock(files.clock), mapped_part(files.parts[0].path) if files.parts else None)
    before = None
    for one in files.parts:
        if (one.delta, one.list) != before:
            loading.next_list()
            before = one.delta, one.list
        if may_own(table, one):
            loading.add(mapped_part(one.path))
    loading.end()


def merged(
    parts: Sequence[PartFile], owned: Callable[[Tensor], Tensor] | None = None, part_bytes: int = PART_BYTES
) -> Iterator[dict[str, Tensor]]:
    """The newest of every row in these parts, as parts of one list of about part_bytes, in memory one at a time.

    owned: ids -> which of them to take (None: all). Raises UserError for a file that cannot be read, or parts that do
    not hold the same planes.
    """
    lists: dict[tuple[int, int], list[PartFile]] = {}
    for one in sorted(parts):
        lists.setdefault((one.delta, one.list), []).append(one)
    open_lists = [_List(files) for _, files in sorted(lists.items())]
    if not open_lists:
        return
    most = max(1, part_bytes // open_lists[0].bytes_a_row)
    held, count = [], 0
    while open_lists := [one for one in open_lists if one.more]:
        # So many of each list that a window is a part at most.
        each = max(1, most // len(open_lists))
        bounds = [bound for one in open_lists if (bound := one.bound(each)) is not None]
        window = _newest([one.take(min(bounds, default=None), owned) for one in open_lists])
        if held and count + len(window["ids"]) > most:
            yield _joined(held)
            held, count = [], 0
        if len(window["ids"]):
            held.append(window)
            count += len(window["ids"])
    if held:
        yield _joined(held)


class _List:
    """The parts of one list, read from the lowest id to the highest."""

    def __init__(self, files: list[PartFile]) -> None:
        self._files = files[::-1]
        self._at = 0
        self._open()

    @property
    def more(self) -> bool:
        return bool(self._files)

    @property
    def bytes_a_row(self) -> int:
        """Of the file that is open."""
        return sum(plane[:1].nbytes for plane in self._part.values()) or 1

    def bound(self, count: int) -> int | None:
        """An id up to which there are `count` rows at most in the file that is open; None: all that is left."""
        ids_N = self._part["ids"]
        if len(ids_N) - self._at > count:
            return int(ids_N[self._at + count - 1])
        return int(ids_N[-1]) if len(self._files) > 1 else None

    def take(self, bound: int | None, owned: Callable[[Tensor], Tensor] | None) -> dict[str, Tensor]:
        """The rows up to `bound` (None: all of them) that have not been taken, of those that are owned."""
        ids_N, start = self._part["ids"], self._at
        end = len(ids_N) if bound is None else int(torch.searchsorted(ids_N, bound, right=True))
        self._at = end
        taken = {key: plane[start:end] for key, plane in self._part.items()}
        if owned is not None and end > start:
            where_U = owned(taken["ids"]).nonzero().flatten()
            if len(where_U) < end - start:
                taken = {key: plane.index_select(0, where_U) for key, plane in taken.items()}
        if end == len(ids_N):
            self._files.pop()
            self._at = 0
            self._open()
        return taken

    def _open(self) -> None:
        """Open the next file that holds a row."""
        while self._files:
            self._part = mapped_part(self._files[-1].path)
            if "ids" not in self._part:
                raise UserError(f"{self._files[-1].path}: a part without ids: it is damaged")
            if len(self._part["ids"]):
                return
            self._files.pop()


def _newest(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows of several lists, oldest first, each id once, its newest row: sorted."""
    planes = {key: (plane.shape[1:], plane.dtype) for key, plane in pieces[0].items()}
    for piece in pieces:
        if {key: (plane.shape[1:], plane.dtype) for key, plane in piece.items()} != planes:
            raise UserError("the deltas of a table do not hold the same planes: they are of different tables")
    if len(pieces) == 1:
        return {key: plane.clone() for key, plane in pieces[0].items()}
    whole = _joined(pieces)
    ids_N, order_N = torch.sort(whole["ids"], stable=True)
    last_N = torch.ones_like(ids_N, dtype=torch.bool)
    last_N[:-1] = ids_N[1:] != ids_N[:-1]
    order_U = order_N[last_N]
    return {key: plane.index_select(0, order_U) for key, plane in whole.items()}


def _joined(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return pieces[0] if len(pieces) == 1 else {key: torch.cat([one[key] for one in pieces]) for key in pieces[0]}


def may_own(table: RowTable, file: PartFile) -> bool:
    """Whether a part may hold a row of the table's own, as its lowest and highest id tell."""
    ids_N = mapped_torch(file.path, "ids")
    if not len(ids_N) or table.placement.kind != "contiguous":
        return True
    first, final = table.placement.owner(ids_N[[0, -1]]).tolist()
    # Ids that nobody owns are damage: who reads them says so.
    return first <= table.rank <= final or not 0 <= first <= final < table.placement.size
