"""What gives the same bits as something else, for every rule and row format, and what a refusal leaves as it was.

Lives here: letters a, f, g, h, j, l, n and p of the list of what an exact table must show, rows that are fetched long
before they are taken among them.
Not here: dense training (test_table_dense.py), damaged checkpoints (test_parts.py), threads (test_prefetch.py), disks
that fail (test_table_file.py), bytes (test_table.py).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.initial import initial_values
from mome.table.parts import load_parts, state_parts
from mome.table.rows import PLACES, RowTable, TableSpec
from mome.table.working import WorkingSet
from optim.rows import KINDS, RowRule
from tests.mome.dense import Dense, history, loss_of, mixed, state_of

FORMATS = ("fp32", "bf16", "bf16+16", "fp8")
SPEC = TableSpec(rows=40, lanes=2, dim=5, init=0.3)
EVERYTHING = torch.arange(SPEC.rows)
# Some rows are never touched, some once, some always; two events touch nothing.
EVENTS = history(7, 10, mixed(SPEC.rows), "restarts", peak=0.3, beta2s=(0.9, 0.99), empty={4, 8})

every_case = pytest.mark.parametrize(
    ("kind", "format"), [pytest.param(kind, format, id=f"{kind}-{format}") for kind in KINDS for format in FORMATS]
)


def make(kind="adam", format="fp32", place="device", folder=None, spec=SPEC, seed=3, **rule) -> RowTable:
    where = {"folder": folder, "resident_bytes": 64} if place == "file" else {}
    rule = RowRule(kind, **{"weight_decay": 0.4, "momentum": 0.8, **rule})
    return RowTable(spec, rule, seed, name="words", format=format, place=place, **where)


def step(ws: WorkingSet, slots: Tensor, seed: int) -> None:
    loss_of(ws.gather_slots(slots), ws.gather_slots(slots.flip(0)), seed).backward()


def train(table: RowTable, first: int = 0, final: int = len(EVENTS)) -> RowTable:
    for number in range(first, final):
        ws = table.pull(EVENTS[number].steps)
        for k in range(len(EVENTS[number].steps)):
            step(ws, ws.slots(k), 10 * number + k)
        table.push(ws, EVENTS[number].lr, EVENTS[number].beta2)
    return table


def bits(table: RowTable) -> dict[str, Tensor]:
    """The whole state as it is kept, the clock and all."""
    (part,) = state_parts(table)
    return {key: tensor.clone() for key, tensor in part.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit: torch.equal would take -0.0 for 0.0."""
    pairs = [(one[key].flatten(), other[key].flatten()) for key in one] if one.keys() == other.keys() else []
    return bool(pairs) and all(
        a.dtype == b.dtype
        and len(a) == len(b)
        and (not len(a) or torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
        for a, b in pairs
    )


def worth(ws: WorkingSet) -> dict[str, Tensor]:
    """Copies of a working set's rows and state."""
    return {key: value.clone() for key, value in ws.state.items()} | {"rows": ws.rows.detach().clone()}


def whole(number: float, *shape: int) -> Tensor:
    """Small multiples of `number`, a power of two: any order and grouping of their sums is exact."""
    return torch.randint(-3, 4, shape).float() * number


# a, h, j: order, repeats, steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_the_order_among_lookups_of_one_row_is_what_fixes_the_bits(kind):
    """Lookups of other rows may stand anywhere between, in any shape; exact sums may come in any order at all."""
    ids = torch.randint(6, (60,))
    stable = torch.randperm(60)
    for row in range(6):
        places = (ids[stable] == row).nonzero().flatten()
        stable[places] = stable[places].sort().values
    assert not torch.equal(stable, torch.arange(60))
    orders = {"as it is": torch.arange(60), "stable": stable, "reversed": torch.arange(59, -1, -1)}

    def trained(order, grad, shape=(60,)):
        table = make(kind)
        for _ in range(3):
            ws = table.pull([ids[order].view(shape)])
            ws.gather(0).backward(grad[order].view(*shape, 2, 5))
            sums = ws.rows.grad.clone()
            table.push(ws, 0.1)
        return bits(table) | {"sums": sums}

    grad = torch.randn(60, 2, 5)
    once = trained(orders["as it is"], grad)
    one_by_one = torch.zeros(6, 2, 5)
    for row, lookup in zip(ids.tolist(), grad):
        one_by_one[row] += lookup
    assert same({"sums": once["sums"]}, {"sums": one_by_one})
    assert same(trained(orders["stable"], grad), once)
    assert same(trained(orders["as it is"], grad, (3, 4, 5)), once)
    reversed_ = trained(orders["reversed"], grad)["sums"]
    bound = 60 * 2.0**-24 * torch.zeros(6, 2, 5).index_add_(0, ids, grad.abs())
    assert not torch.equal(reversed_, once["sums"]) and bool(((reversed_ - once["sums"]).abs() <= bound).all())
    exact = whole(0.25, 60, 2, 5)
    once = trained(orders["as it is"], exact)
    assert all(same(trained(order, exact), once) for order in orders.values())


@every_case
def test_h_the_steps_of_a_cycle_are_one_big_batch_bit_for_bit_where_sums_are_exact(kind, format):
    many, one = make(kind, format), make(kind, format)
    for number in range(4):
        parts, grads = [torch.randint(20, (9,)) for _ in range(3)], [whole(0.5, 9, 2, 5) for _ in range(3)]
        ws = many.pull(parts)
        for k in (0, 1, 2):
            ws.gather(k).backward(grads[k])
        many.push(ws, 0.1 + 0.1 * number)
        ws = one.pull([torch.cat(parts)])
        ws.gather(0).backward(torch.cat(grads))
        one.push(ws, 0.1 + 0.1 * number)
    assert same(bits(many), bits(one))


@every_case
def test_j_the_clip_does_not_see_how_many_lookups_a_gradient_came_in(kind, format):
    """One lookup of row 3, or five whose gradients add up to the same: the norm and every bit are the same."""
    norms, found = [], []
    parts = whole(0.5, 5, 2, 5)
    for split in (True, False):
        table = make(kind, format)
        for _ in range(3):
            ws = table.pull([torch.tensor([3] * 5 if split else [3]), torch.tensor([7])])
            ws.gather(0).backward(parts if split else parts.sum(0, keepdim=True))
            ws.gather(1).backward(parts[:1])
            norms.append(math.sqrt(table.grad_square(ws)))
            assert norms[-1] > 0.7
            table.push(ws, 0.1, scale=0.7 / norms[-1])
        found.append(bits(table))
    assert len(set(norms)) == 1 and same(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_j_a_scale_is_a_factor_on_the_gradient(kind):
    """A power of two, so that both ways of multiplying are exact."""
    found = []
    for scale in (0.25, 1.0):
        table = make(kind)
        for number in range(4):
            ws = table.pull(EVENTS[number].steps)
            grad = torch.randn(len(ws.ids), 2, 5, generator=torch.Generator().manual_seed(number))
            ws.rows.grad = grad * (0.25 / scale)
            table.push(ws, 0.2, scale=scale)
        found.append(bits(table))
    assert same(*found)


# f, g: reading, saving, fetching early


@every_case
def test_f_reading_any_number_of_times_changes_no_bit(kind, format):
    table, twin = make(kind, format), make(kind, format)
    for begin, end in ((0, 3), (3, len(EVENTS))):
        train(table, begin, end)
        before, first = bits(table), state_of(table)
        for _ in range(2):
            list(table.iter_rows(7)), list(state_parts(table, 100)), table.read_rows(EVERYTHING.flip(0))
            step(table.pull([EVERYTHING]), EVERYTHING, 0)
            table.fetch(table.plan([EVERYTHING]))
        assert same(state_of(table), first) and same(bits(table), before)
    assert same(bits(table), bits(train(twin)))


@every_case
def test_g_saved_in_mid_cycle_and_loaded_equals_uninterrupted(kind, format, tmp_path):
    """Into a used table in another place; with momentum after more events than a block of its sums has."""
    place, idle = "host" if format.startswith("bf16") else "file", 260 if kind == "momentum" else 3
    straight, first = make(kind, format), make(kind, format)
    for _ in range(idle):
        for table in (straight, first):
            table.push(table.pull([]), 0.001)
    train(straight)
    second = train(make(kind, format, place, tmp_path), 0, 2)
    # Some of these are rows that the saved table never touches.
    second.push(second.pull([EVERYTHING]), 0.1)

    stop = next(n for n, event in enumerate(EVENTS) if n > 4 and len(event.steps) > 1)
    ws = train(first, 0, stop).pull(EVENTS[stop].steps)
    step(ws, ws.slots(0), 10 * stop)
    parts, ids, grad = list(state_parts(first, 400)), ws.ids.clone(), ws.rows.grad.clone()
    train(first, stop, stop + 1)
    assert len(parts) > 1

    load_parts(second, parts)
    restored = second.pull([ids])
    restored.add_gradient(torch.arange(len(ids)), grad)
    for k, one in enumerate(EVENTS[stop].steps[1:], start=1):
        step(restored, restored.slots_of(one), 10 * stop + k)
    second.push(restored, EVENTS[stop].lr, EVENTS[stop].beta2)
    train(second, stop + 1)
    assert second.event == idle + len(EVENTS) and same(bits(second), bits(straight))
    assert same(state_of(second), state_of(straight))
    second.close()


@every_case
def test_a_repeats_in_any_place_and_rows_fetched_early_and_taken_late_give_the_same_bits(kind, format, tmp_path):
    """Every fetch is older by one push than the next: touched since, untouched, and never touched rows are in each."""
    expected = None
    for place in PLACES:
        table, early = make(kind, format, place, tmp_path), []
        plan = table.plan([torch.tensor([5, 1, 5]), EVERYTHING[::2]])
        for number in range(len(EVENTS)):
            early.append(table.fetch(plan))
            train(table, number, number + 1)
        now = worth(table.pull([plan.ids]))
        for raw in early:
            late = table.take(raw)
            assert same(worth(late), now)
            assert all(torch.equal(late.ids[late.slots(k)], plan.ids[slots]) for k, slots in enumerate(plan.slots))
        # The last of them is as good as a pull for a push, too.
        ws = table.pull([plan.ids]) if expected is None else late
        ws.rows.grad = torch.full_like(ws.rows, 0.5)
        table.push(ws, 0.1)
        expected = expected or bits(table)
        assert same(bits(table), expected)
        table.close()


# l, p: refusals


@every_case
def test_l_p_refusals_leave_clock_state_and_bits_as_they_were(kind, format):
    table, twin = train(make(kind, format)), train(make(kind, format))
    other, reading = make(kind, format).pull([EVERYTHING]), table.pull([EVERYTHING], grad=False)
    old = table.pull([torch.tensor([2])])
    for one in (table, twin):
        one.push(one.pull([]), 0.1)
    before, ids = bits(table), torch.tensor([3, 11, 12])
    ws = table.pull([ids])
    rows = ws.rows.detach().clone()
    good = torch.randn(3, 2, 5)

    def refused(match, grad=good, of=ws, lr=0.1, **given):
        if grad is not None:
            of.rows.grad = grad.clone()
        with pytest.raises(ValueError, match=match):
            table.push(of, lr, **given)
        assert table.event == len(EVENTS) + 1 and same(bits(table), before) and torch.equal(ws.rows.detach(), rows)

    for bad in (math.nan, math.inf, -math.inf, 1e30):
        refused("row 11 ", torch.where(torch.arange(30).view(3, 2, 5) == 14, bad, good))
    for lr in (-0.1, math.nan, math.inf, 2.5, 100.0):
        refused("learning rate", lr=lr)
    for beta2 in (0.0, 1.0, math.nan):
        refused("beta2", beta2=beta2)
    for scale in (0.0, -1.0, math.inf, math.nan):
        refused("times", scale=scale)
    refused("pull again", None, other)
    refused("pull again", None, old)
    refused("grad=True|pull again", None, reading)
    refused("grad=True", None, table.pull([ids], grad=False))
    for wrong in (-1, 40, 1 << 40, -(1 << 40)):
        for call in (lambda ids: table.plan([ids]), table.read_rows):
            with pytest.raises(ValueError, match=f"words.* {wrong} .*39"):
                call(torch.tensor([wrong]))
    refused("not finite", torch.full_like(good, math.nan))

    # Once it is refused no more, the set is as good as ever, and nothing was forgotten on the way.
    ws.rows.grad = good.clone()
    other = twin.pull([ids])
    other.rows.grad = good.clone()
    assert table.push(ws, 0.1) == twin.push(other, 0.1) == 3
    assert table.event == twin.event and same(bits(table), bits(twin))


# n: formats


@pytest.mark.parametrize("kind", KINDS)
def test_n_bf16_and_its_low_half_are_float32_bit_for_bit(kind, tmp_path):
    halves, plain = make(kind, "bf16+16", "file", tmp_path), make(kind)
    for _ in range(3):
        assert same(state_of(train(halves)), state_of(train(plain)))
    kept = bits(halves)
    high, low = kept.pop("rows").view(torch.int16).int(), kept.pop("low").int() & 0xFFFF
    expected = bits(plain)
    assert torch.equal(((high << 16) | low).view(torch.float32), expected.pop("rows")) and same(kept, expected)
    halves.close()


# Rows of equal gradients: each is a sample of the same chance; and as many events with updates below half a code.
SAMPLES = TableSpec(rows=128, lanes=2, dim=4, init=0.0)
SEEDS, SMALL = 10, 20


def nearest(rows: Tensor, format: str) -> Tensor:
    """Rounded as a format that knows no chance would round."""
    if format == "bf16":
        return rows.bfloat16().float()
    scale = rows.abs().amax(-1, keepdim=True) / 448
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("format", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_n_rounded_rows_are_unbiased_over_seeds(kind, format):
    """Their mean is what float32 gives, to 5 standard errors, where rounding to nearest is off by far more.

    Seeds and events draw apart: the means of the seeds spread as those of independent rows do, and no row as if an
    event's roundings repeated those of the last.
    """
    grads = [torch.randn(2, 4, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    # A tenth of a code of the largest numbers of a lane.
    rates = [1.0] + [0.0008 if format == "bf16" else 0.006] * SMALL
    rates = [lr * (0.1 if kind == "momentum" and n else 1.0) for n, lr in enumerate(rates)]

    def trained(format: str, seed: int) -> Tensor:
        table = make(kind, format, spec=SAMPLES, seed=seed, weight_decay=0.01, eps=1e-8, momentum=0.9)
        for lr in rates:
            ws = table.pull([torch.arange(128)])
            ws.rows.grad = grads[lr < 1].expand(128, 2, 4).contiguous()
            table.push(ws, lr, 0.99)
        return table.read_rows(torch.arange(128)).double()

    truth = trained("fp32", 0)
    assert torch.equal(truth[:1].expand_as(truth), truth)
    found = torch.stack([trained(format, seed) for seed in range(SEEDS)])
    spread = found.flatten(0, 1).std(0)
    error = spread / (SEEDS * 128) ** 0.5
    # The mean of one rounding may be off by 2**-17 of a code of fp8, of which the largest is a fourteenth.
    least = (SMALL + 1) * 2.0**-17 / 14 * truth[0].abs().amax(-1, keepdim=True) + 1e-6
    bias = (found.mean((0, 1)) - truth[0]).abs()
    assert bool((bias <= 5 * error + least).all())

    stuck = Dense(make(kind, "fp32", weight_decay=0.01, eps=1e-8, momentum=0.9).rule, torch.zeros(1, 2, 4))
    for lr in rates:
        stuck.weight_RLD.grad = grads[lr < 1].view(1, 2, 4).clone()
        stuck.push(lr, 0.99, torch.tensor([0]))
        stuck.weight_RLD = nearest(stuck.weight_RLD.detach(), format).requires_grad_()
    missed = (stuck.weight_RLD.detach()[0].double() - truth[0]).abs()
    assert bool((missed > 5 * error + least).any(-1).all())

    moving = spread > 10 * least
    ratio = (found.mean(1).std(0) * 128**0.5 / spread)[moving].square().mean()
    assert moving.sum() >= 4 and 0.5 < ratio < 2.0
    # An event's rounding has a variance of at most a quarter of a squared code, above a number of 1 or a lane's top.
    code = truth[0].abs() * (2.0**-7 if format == "bf16" else 2.0**-3) * 1.5
    assert bool((spread <= (SMALL + 1) ** 0.5 * 0.5 * code + least)[moving].all())


@pytest.mark.parametrize("kind", KINDS)
def test_n_decay_moves_the_scales_of_fp8_rows_and_never_their_codes(kind):
    """Retroactive decay with gradients of zero, touched and untouched events mixed; momentum's buffer must be empty."""
    table = train(make(kind, "fp8", momentum=0.0))
    ids = table.touched_ids()
    codes, scale = table.stores["rows"].read(ids), table.stores["scale"].read(ids)
    start, decay = table.read_rows(ids), 1.0
    seen = []
    for number in range(40):
        # At first events only every third of which touches the rows, then each.
        lr = 0.02 * (number % 5)
        table.push(table.pull([ids if number > 20 or number % 3 == 0 else torch.tensor([], dtype=torch.int64)]), lr)
        decay *= 1.0 - lr * 0.4
        seen.append(table.stores["scale"].read(ids))
        assert torch.equal(table.stores["rows"].read(ids), codes)
    torch.testing.assert_close(table.read_rows(ids), start * decay, rtol=1e-5, atol=0.0)
    assert bool((seen[-1] < 0.6 * scale).all()) and len({float(one[0, 0]) for one in seen}) > 10


def test_n_never_touched_rows_are_worth_the_same_in_every_format():
    """They have no codes: what decays is their initial values, in float32."""
    found = [state_of(train(make(format=format)))["rows"] for format in FORMATS]
    never = torch.ones(SPEC.rows, dtype=torch.bool)
    never[torch.cat([ids.flatten() for event in EVENTS for ids in event.steps])] = False
    start = initial_values(EVERYTHING, 10, make().seed, 0.3, torch.float32).view(40, 2, 5)
    assert int(never.sum()) >= 8 and bool((found[0][never].abs() < start[never].abs()).all())
    assert all(torch.equal(rows[never], found[0][never]) for rows in found)
