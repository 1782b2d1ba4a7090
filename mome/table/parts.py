"""A table on its way to a checkpoint and back: its rows, raw, in parts of bounded size.

Lives here: state_parts and load_parts (a whole table in memory), and what they are made of: clock_part and row_parts on
the way out, Loading on the way in. What was never touched follows from the seed and is not saved.
Not here: files of parts and deltas (deltas.py), reading rows out of them without a table that trains (file.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from mome.table.rows import RowTable

PART_BYTES = 1 << 28


def clock_part(table: RowTable) -> dict[str, Tensor]:
    """What a table keeps once: its clock's sums, and `columns` where the rule keeps them; copies, on the CPU."""
    whole = dict(table.clock.state_dict())
    if table.columns_LD is not None:
        whole["columns"] = table.columns_LD.cpu().clone()
    return whole


def row_parts(table: RowTable, ids_U: Tensor, part_bytes: int = PART_BYTES) -> Iterator[dict[str, Tensor]]:
    """What a table keeps of these rows (int64 [U], sorted, distinct, its own), raw, about part_bytes at a time.

    Every part: ids (int64 [n], ascending over all parts) and the planes, all on the CPU. No row: no part.
    """
    for ids_N in ids_U.split(max(1, part_bytes // bytes_a_row(table.kept))) if len(ids_U) else ():
        # A copy: a part may outlive the list that it was split from.
        yield {"ids": ids_N.clone()} | table.read_planes(ids_N)


def bytes_a_row(kept: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    """Bytes of one row in a part, its id with it."""
    return 8 + sum(torch.Size(tail).numel() * kind.itemsize for tail, kind in kept.values())


def state_parts(table: RowTable, part_bytes: int = PART_BYTES) -> Iterator[dict[str, Tensor]]:
    """The table's state, at least one part, each of about part_bytes; the first has the clock too.

    A cycle in progress is the caller's to save: ws.ids and ws.rows.grad.
    """
    table.refuse_broken()
    whole, ids_U = clock_part(table), table.touched_ids()
    if not len(ids_U):
        yield whole | {"ids": ids_U} | table.read_planes(ids_U)
    for part in row_parts(table, ids_U, part_bytes):
        yield whole | part
        whole = {}


def load_parts(table: RowTable, parts: Iterable[dict[str, Tensor]]) -> None:
    """Make a table what it was when `state_parts` read it; working sets pulled before are refused from then on.

    Raises ValueError for a part that lacks or adds a tensor, or has one of another shape or dtype, for ids that are not
    ascending or out of range, and for events that the clock lacks. Nothing has changed when the first part is refused;
    later ones leave a table that refuses to be used.
    """
    loading = Loading(table)
    for part in parts:
        part = dict(part)
        if not loading.begun:
            clock = {key: part.pop(key) for key in clock_names(table) if key in part}
            loading.begin(clock, part)
        loading.add(part)
    loading.end()


def clock_names(table: RowTable) -> tuple[str, ...]:
    """The names of clock_part."""
    return (*table.clock.state_names, *(("columns",) if table.columns_LD is not None else ()))


class Loading:
    """The way of a saved state into a table, checked as it comes: begin, then add each part, then end.

    Parts come in lists, the ids of one ascending over its parts; a later list wins where both have a row, and the table
    takes the rows that are its own. Raises ValueError as load_parts says.
    """

    def __init__(self, table: RowTable) -> None:
        self.table = table
        self.begun = False
        self._final = -1
        self._touched: list[Tensor] = []

    def begin(self, clock: dict[str, Tensor], first: Mapping[str, Tensor] | None = None) -> None:
        """Take the clock and the columns over and empty the table, once they, and the first part, are found fit."""
        table = self.table
        if missing := [key for key in clock_names(table) if key not in clock]:
            raise ValueError(f"table {table.name!r}: a checkpoint of another kind of table: {missing[0]} missing")
        if first is not None:
            self._check_form(first)
            self._check_events(first["last_event"], len(clock["log_decay"]) - 1)
        given = dict(clock)
        columns = given.pop("columns", None)
        if columns is not None and _described(columns) != _described(table.columns_LD):
            raise ValueError(
                f"table {table.name!r}: a checkpoint of another shape: its columns are {_described(columns)}, this "
                f"table's {_described(table.columns_LD)}"
            )
        table.clock.load_state_dict(given)
        table.broken = "its checkpoint was read only in part"
        if columns is not None:
            table.columns_LD.copy_(columns)
        for store in table.stores.values():
            store.clear()
        table.forget(table.broken)
        self.begun = True

    def next_list(self) -> None:
        """The parts that follow begin with lower ids again."""
        self._final = -1

    def add(self, part: Mapping[str, Tensor]) -> None:
        """Write the rows of a part that are this table's own; only those of its planes are read."""
        table = self.table
        self._check_form(part)
        ids_N = part["ids"]
        if not len(ids_N):
            return
        self._final = int(ids_N[-1])
        own_N = table.owned(ids_N)
        planes = {key: part[key] for key in table.kept}
        if not bool(own_N.all()):
            where_U = own_N.nonzero().flatten()
            ids_N = ids_N[where_U]
            planes = {key: plane.index_select(0, where_U) for key, plane in planes.items()}
        if len(ids_N):
            self._check_events(planes["last_event"], table.event)
            table.write_planes(ids_N, planes)
            self._touched.append(ids_N.clone())

    def end(self) -> None:
        """Every part is there: the table may be used."""
        if not self.begun:
            raise ValueError(f"table {self.table.name!r}: a checkpoint without a part: it is damaged")
        if self._touched:
            # Lists overlap: a row counts once.
            self.table.first_touched = [torch.unique(torch.cat(self._touched))]
        self.table.broken = None

    def _check_form(self, part: Mapping[str, Tensor]) -> None:
        table, expected = self.table, {"ids": ((), torch.int64)} | self.table.kept
        if set(part) != set(expected):
            odd = ", ".join(sorted(set(part) ^ set(expected)))
            raise ValueError(f"table {table.name!r}: a checkpoint of another kind of table: {odd} missing or unknown")
        ids_N = part["ids"]
        for key, (tail, kind) in expected.items():
            if part[key].shape != (len(ids_N), *tail) or part[key].dtype != kind:
                raise ValueError(
                    f"table {table.name!r}: a checkpoint of another shape: its {key} is {_described(part[key])}, this "
                    f"table's is {[len(ids_N), *tail]} {kind}: load it with the configuration that saved it"
                )
        rows = table.spec.rows
        if len(ids_N) and (
            int(ids_N[0]) <= self._final or not bool((ids_N.diff() > 0).all()) or int(ids_N[-1]) >= rows
        ):
            raise ValueError(
                f"table {table.name!r}: a damaged checkpoint, or one of another shape: its row ids are not ascending "
                f"below {rows}"
            )

    def _check_events(self, last_U: Tensor, event: int) -> None:
        if not len(last_U):
            return
        first, final = (int(x) for x in last_U.aminmax())
        if first < 1 or final > event:
            raise ValueError(
                f"table {self.table.name!r}: a damaged checkpoint: its rows name an event that its clock lacks"
            )


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
