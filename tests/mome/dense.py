"""Dense training of every row, what a table must be equal to, and drawn histories of events to train both by.

Lives here: Dense, the oracle; every legal rule; histories of touches, schedules, duplicates and clipping; `train_both`.
Not here: the proofs (test_table_dense.py: numbers; test_table_exact.py: bits), the formulas of one event
(kernels/row_update.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.row_update import RowEvent, row_update_reference
from mome.table.rows import RowTable
from optim.rows import DECAYS, KINDS, RowRule

RULES = [
    RowRule(kind, beta2=0.9, eps=1e-8, weight_decay=0.0 if decay == "none" else 0.4, decay=decay, momentum=0.8)
    for kind in KINDS
    for decay in DECAYS
    if not (kind == "momentum" and decay.startswith("gated"))
]
NAMES = [f"{rule.kind}-{rule.decay}" for rule in RULES]
PATTERNS = ("never", "once", "burst", "seldom", "always")
SHAPES = ("constant", "warm-up", "cooldown to zero", "restarts")


def mixed(rows: int) -> list[str]:
    """Every pattern in turn."""
    return [PATTERNS[row % len(PATTERNS)] for row in range(rows)]


@dataclass(frozen=True)
class Event:
    """What one push sees: the ids of each step of its cycle, its rates, and the norm to clip to (None: no clipping)."""

    steps: list[Tensor]
    lr: float
    beta2: float
    clip: float | None = None


class Dense:
    """Every row is a parameter, every event an update of all of them; decay `touched` is told the rows of the event.

    start_RLD: the rows before training, of the dtype to train in. rows: those of the whole table, if these are a part.
    """

    def __init__(self, rule: RowRule, start_RLD: Tensor, rows: int | None = None) -> None:
        self.rule, self.rows = rule, rows or len(start_RLD)
        self.weight_RLD = start_RLD.detach().clone().requires_grad_()
        self.second_RL = torch.zeros_like(start_RLD[..., 0])
        self.moment_RLD = torch.zeros_like(start_RLD)
        self.columns_LD = torch.zeros(start_RLD.shape[1:], dtype=torch.float64)
        # The product of all beta2 as a fraction: while it is near 1, floats would leave 1 - product few right digits.
        self._product = 1, 1

    def norm(self) -> float:
        """Of the gradient so far, over all rows."""
        grad_RLD = self.weight_RLD.grad
        return 0.0 if grad_RLD is None else float(torch.linalg.vector_norm(grad_RLD, dtype=torch.float64))

    def push(self, lr: float, beta2: float, touched_U: Tensor, scale: float = 1.0) -> None:
        """One event with the gradient so far."""
        rule = self.rule
        grad_RLD = self.weight_RLD.grad
        if grad_RLD is None:
            grad_RLD = torch.zeros_like(self.weight_RLD)
        above, below = (a * b for a, b in zip(self._product, beta2.as_integer_ratio()))
        self._product = above, below
        event = RowEvent(
            rule.kind, lr=lr, factor=1.0 - lr * rule.weight_decay,
            gate={"gated": "strict", "gated-retroactive": "loose"}.get(rule.decay, "none"), beta2=beta2,
            correction=(below - above) / below, eps=rule.eps, momentum=rule.momentum, scale=scale,
        )  # fmt: skip
        touched_R = None
        if rule.decay == "touched":
            touched_R = torch.zeros(len(grad_RLD), dtype=torch.bool)
            touched_R[touched_U] = True
        weight_RLD, self.second_RL, self.moment_RLD, self.columns_LD = row_update_reference(
            self.weight_RLD.detach(), grad_RLD, self.second_RL, self.moment_RLD, self.columns_LD, event, self.rows,
            touched_R,
        )  # fmt: skip
        self.weight_RLD = weight_RLD.requires_grad_()

    def state(self) -> dict[str, Tensor]:
        """What the rule keeps of weights, second, moment and columns."""
        rule, found = self.rule, {"rows": self.weight_RLD.detach()}
        if rule.keeps_second:
            found["second"] = self.second_RL
        if rule.keeps_moment:
            found["moment"] = self.moment_RLD
        if rule.keeps_columns:
            found["columns"] = self.columns_LD
        return found


def state_of(table: RowTable, ids: Tensor | None = None) -> dict[str, Tensor]:
    """The same of a table's rows with these ids (None: all), as they are worth now."""
    ids = torch.arange(table.spec.rows) if ids is None else ids
    ws = table.pull([ids], grad=False)
    assert torch.equal(ws.ids, ids)
    found = {"rows": ws.rows} | {key: ws.state[key] for key in ("second", "moment") if key in ws.state}
    return found if table.columns_LD is None else found | {"columns": table.columns_LD.clone()}


def close(found: Tensor, expected: Tensor, least: float = 1e-15) -> None:
    """Equal to 1e-12 relative; to `least` where numbers of about 1 cancel."""
    # assert_close takes longer than a push; NaN fails the comparison.
    alike = found.shape == expected.shape and found.dtype == expected.dtype
    if not alike or not bool(((found - expected).abs() <= 1e-12 * expected.abs() + least).all()):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=least)


def loss_of(rows: Tensor, again: Tensor, seed: int) -> Tensor:
    """Of a step's rows, gathered twice: its gradient depends on them, so that a stale read shows.

    Some lookups have gradients of exactly zero, others small ones.
    """
    generator = torch.Generator().manual_seed(seed)
    push = torch.randn(rows.shape, generator=generator, dtype=torch.float64).to(rows.dtype)
    weight = torch.tensor([0.0, 0.0, 1e-3, 0.1, 0.3, 1.0])[torch.randint(6, rows.shape[:-2], generator=generator)]
    weight = weight[..., None, None].to(rows.dtype)
    return ((rows + push).square() * weight).sum() + (again * push.flip(0) * weight.flip(0)).sum()


def train_both(table: RowTable, denses: Sequence[Dense], events: Sequence[Event], check: bool = True) -> None:
    """Train a table and dense twins by the same events.

    check: compare what each forward pass reads, the norm, and after each event all rows and state with the first twin.
    """
    step, never_R = 0, torch.ones(table.spec.rows, dtype=torch.bool)
    for event in events:
        ws = table.pull(event.steps)
        for k, ids in enumerate(event.steps):
            rows, again = ws.gather(k), ws.gather_slots(ws.slots(k).flip(0))
            if check:
                close(rows.detach(), denses[0].weight_RLD.detach()[ids])
            loss_of(rows, again, step).backward()
            for dense in denses:
                loss_of(dense.weight_RLD[ids], dense.weight_RLD[ids.flip(0)], step).backward()
            step += 1
        norm, touched_U = math.sqrt(table.grad_square(ws)), ws.ids
        never_R[touched_U] = False
        assert table.push(ws, event.lr, event.beta2, _scale(event, norm)) == len(touched_U)
        for n, dense in enumerate(denses):
            truth = dense.norm()
            assert n or not check or math.isclose(norm, truth, rel_tol=1e-12)
            dense.push(event.lr, event.beta2, touched_U, _scale(event, truth))
        if check:
            assert_same(table, denses[0], never_R)
    assert table.event == len(events) and table.touched_rows == int((~never_R).sum())


def assert_same(table: RowTable, dense: Dense, never_R: Tensor) -> None:
    """All rows and state; the rows that were never touched, where nothing cancels, without a least number."""
    found, expected = state_of(table), dense.state()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        close(found[key], value)
    close(found["rows"][never_R], expected["rows"][never_R], least=0.0)


def _scale(event: Event, norm: float) -> float:
    return 1.0 if event.clip is None or norm <= event.clip else event.clip / norm


@st.composite
def histories(draw, rows: int = 9, most: int = 16) -> list[Event]:
    """Events by a pattern of touches for each row, one of the learning rate, and empty events in between.

    A row that is touched is looked up one to four times; beta2 is one number, or another one at every event.
    """
    count = draw(st.integers(1, most))
    patterns = draw(st.lists(st.sampled_from(PATTERNS), min_size=rows, max_size=rows))
    empty = draw(st.sets(st.integers(0, count - 1), max_size=4))
    shape, peak = draw(st.sampled_from(SHAPES)), draw(st.sampled_from([0.5, 0.03]))
    beta2s = draw(st.sampled_from([(0.9,), (0.5, 0.9, 0.999)]))
    clip = draw(st.sampled_from([None, 0.5]))
    return history(draw(st.integers(0, 1 << 30)), count, patterns, shape, peak, beta2s, clip, empty)


def history(
    seed: int, count: int, patterns: Sequence[str], shape: str = "constant", peak: float = 0.5,
    beta2s: Sequence[float] = (0.9,), clip: float | None = None, empty: set[int] = frozenset(),
) -> list[Event]:  # fmt: skip
    """The events that these choices and a seed make."""
    below = random.Random(seed).randrange
    starts, events = [below(count) for _ in patterns], []
    for e in range(count):
        steps = [[] for _ in range(1 + below(3))]
        for row, (pattern, start) in enumerate(zip(patterns, starts)):
            wanted = {
                "never": False, "once": e == start, "burst": start <= e < start + 3, "always": True,
                "seldom": below(4) == 0,
            }[pattern]  # fmt: skip
            for _ in range((1 + below(4)) * wanted):
                one = steps[below(len(steps))]
                one.insert(below(len(one) + 1), row)
        if e in empty:
            steps = [[] for _ in steps[1:]]
        ids = [torch.tensor(one, dtype=torch.int64) for one in steps]
        ids = [one.view(2, -1) if len(one) % 2 == 0 else one for one in ids]
        at = {
            "constant": 1.0, "warm-up": (e + 1) / count, "cooldown to zero": (count - 1 - e) / max(1, count - 1),
            "restarts": (4 - e % 4) / 4 if e % 5 else 0.0,
        }[shape]  # fmt: skip
        events.append(Event(ids, peak * at, beta2s[below(len(beta2s))], clip))
    return events
