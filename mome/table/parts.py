"""A table on its way to a checkpoint and back: its touched rows, raw, in parts of bounded size.

Lives here: state_parts and load_parts. What was never touched follows from the seed and is not saved.
Not here: files (mome/checkpoint.py), reading rows out of saved parts (file.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mome.table.rows import RowTable

PART_BYTES = 1 << 28


def state_parts(table: RowTable, part_bytes: int = PART_BYTES) -> Iterator[dict[str, Tensor]]:
    """The table's state, at least one part, each of about part_bytes.

    Every part: ids (int64 [n], ascending over all parts) and what the table keeps for these rows, raw, all on the CPU.
    The first has the clock's sums too, and `columns` where the rule keeps them. A cycle in progress is the caller's to
    save: ws.ids and ws.rows.grad.
    """
    table.refuse_broken()
    ids_U = table.touched_ids()
    whole = dict(table.clock.state_dict())
    if table.columns_LD is not None:
        whole["columns"] = table.columns_LD.cpu().clone()
    a_row = 8 + sum(torch.Size(tail).numel() * kind.itemsize for tail, kind in table.kept.values())
    for ids_N in ids_U.split(max(1, part_bytes // a_row)) if len(ids_U) else (ids_U,):
        here = ids_N.to(table.device)
        yield whole | {"ids": ids_N} | {key: store.read(here).cpu() for key, store in table.stores.items()}
        whole = {}


def load_parts(table: RowTable, parts: Iterable[dict[str, Tensor]]) -> None:
    """Make a table what it was when `state_parts` read it; working sets pulled before are refused from then on.

    Raises ValueError for a part that lacks or adds a tensor, or has one of another shape or dtype, for ids that are not
    ascending or out of range, and for events that the clock lacks. Nothing has changed when the first part is refused;
    later ones leave a table that refuses to be used.
    """
    final, number = -1, -1
    for number, part in enumerate(parts):
        part = dict(part)
        if number == 0:
            _begin(table, part)
        _check(table, part, final, table.event)
        ids_N = part.pop("ids")
        if len(ids_N):
            final = int(ids_N[-1])
            here = ids_N.to(table.device)
            for key, store in table.stores.items():
                store.write(here, part[key].to(table.device))
            table.first_touched.append(ids_N.clone())
    if number < 0:
        raise ValueError(f"table {table.name!r}: a checkpoint without a part: it is damaged")
    table.broken = None


def _begin(table: RowTable, part: dict[str, Tensor]) -> None:
    """Take the clock and the columns out of the first part and empty the table, once the part is found fit."""
    whole = dict(table.clock.state_dict())
    if table.columns_LD is not None:
        whole["columns"] = table.columns_LD
    if missing := [key for key in whole if key not in part]:
        raise ValueError(f"table {table.name!r}: a checkpoint of another kind of table: {missing[0]} missing")
    given = {key: part.pop(key) for key in whole}
    _check(table, part, -1, len(given["log_decay"]) - 1)
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


def _check(table: RowTable, part: dict[str, Tensor], after: int, event: int) -> None:
    expected = {"ids": ((), torch.int64)} | table.kept
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
    if not len(ids_N):
        return
    if int(ids_N[0]) <= after or not bool((ids_N.diff() > 0).all()) or int(ids_N[-1]) >= table.spec.rows:
        raise ValueError(
            f"table {table.name!r}: a damaged checkpoint, or one of another shape: its row ids are not ascending below "
            f"{table.spec.rows}"
        )
    first, final = (int(x) for x in part["last_event"].aminmax())
    if first < 1 or final > event:
        raise ValueError(f"table {table.name!r}: a damaged checkpoint: its rows name an event that its clock lacks")


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
