"""CautiousAdam against torch.optim.AdamW, and against loops over elements.

Lives here: the gated decay, its chunks, saving and loading.
Not here: AdamW itself, which is torch's.
"""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch.nn import Parameter

import optim.adam
from optim.adam import CautiousAdam

SHAPES = [(7, 5), (3,), (), (2, 3, 4), (0, 4)]


def parameters(dtype=torch.float64, shapes=SHAPES) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def fill_grads(params, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        # A third of the elements has no gradient, most of the time.
        p.grad = grad.where(torch.rand(p.shape, generator=generator) > 0.3, 0).to(p.dtype)


def values(params) -> list[torch.Tensor]:
    return [p.detach().clone() for p in params]


def test_without_cautious_decay_is_adamw():
    ours, theirs = parameters(), parameters()
    optimizer = CautiousAdam(ours, lr=0.03, betas=(0.8, 0.95), eps=1e-9, weight_decay=0.2)
    oracle = torch.optim.AdamW(theirs, lr=0.03, betas=(0.8, 0.95), eps=1e-9, weight_decay=0.2, foreach=False)
    for step in range(6):
        for params, one in ((ours, optimizer), (theirs, oracle)):
            fill_grads(params, step)
            one.param_groups[0]["lr"] = 0.03 / (step + 1)
            one.step()
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def plain_step(w, g, state, lr, b1, b2, eps, decay) -> float:
    """One element of the rule."""
    state["t"] = t = state.get("t", 0) + 1
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g * g
    u = (state["m"] / (1 - b1**t)) / (math.sqrt(state["v"] / (1 - b2**t)) + eps)
    return w - lr * (u + (lr * decay * w if u * w > 0 else 0.0))


@pytest.mark.parametrize("chunk", [1, 8, 1 << 16])
def test_cautious_equals_the_rule_element_by_element(chunk, monkeypatch, poison_empty):
    monkeypatch.setattr(optim.adam, "CHUNK", chunk)
    params = parameters()
    optimizer = CautiousAdam(params, betas=(0.5, 0.9), eps=1e-8, cautious_decay=7.0)
    expected = [p.detach().flatten().tolist() for p in params]
    states = [[{} for _ in one] for one in expected]
    for step, lr in enumerate([0.1, 0.05, 0.2, 0.1, 0.01]):
        fill_grads(params, step)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        for p, one, state in zip(params, expected, states):
            for i, g in enumerate(p.grad.flatten().tolist()):
                one[i] = plain_step(one[i], g, state[i], lr, 0.5, 0.9, 1e-8, 7.0)
            torch.testing.assert_close(p.detach().flatten().tolist(), one, rtol=1e-10, atol=1e-12)


def test_the_gate_is_strict_where_nothing_came():
    """An embedding row that no batch has had stays as it is, to the bit."""
    (p,) = parameters(torch.float32, [(6, 4)])
    before = p.detach().clone()
    optimizer = CautiousAdam([p], lr=0.1, betas=(0.5, 0.95), cautious_decay=20.0)
    for _ in range(4):
        p.grad = torch.zeros_like(p)
        p.grad[2] = 1.0
        optimizer.step()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(p.detach()[rest], before[rest]) and not torch.equal(p.detach()[2], before[2])


def test_decay_is_quadratic_in_the_learning_rate():
    def extra(lr: float) -> torch.Tensor:
        moved = []
        for decay in (0.0, 1.0):
            (p,) = parameters(shapes=[(50,)])
            fill_grads([p], 0)
            CautiousAdam([p], lr=lr, cautious_decay=decay).step()
            moved.append(p.detach())
        return moved[0] - moved[1]

    torch.testing.assert_close(extra(0.02), 4 * extra(0.01), rtol=1e-6, atol=1e-15)
    assert extra(0.02).any()


def test_groups_have_their_own_decay_and_missing_gradients_are_left():
    one, other, missing = parameters(shapes=[(40,), (40,), (40,)])
    kept, plain = missing.detach().clone(), Parameter(other.detach().clone())
    optimizer = CautiousAdam(
        [{"params": [one, missing], "cautious_decay": 5.0}, {"params": [other]}], lr=0.1, betas=(0.9, 0.99)
    )
    fill_grads([one, other], 0)
    plain.grad = other.grad.clone()
    optimizer.step()
    torch.optim.AdamW([plain], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0, fused=True).step()
    assert torch.equal(other, plain) and torch.equal(missing.detach(), kept)
    assert [group["cautious_decay"] for group in optimizer.param_groups] == [5.0, 0.0]


@pytest.mark.parametrize("contiguous", [True, False])
def test_layout_does_not_matter(contiguous):
    base = torch.arange(1.0, 13.0, dtype=torch.float64).view(3, 4)
    p = Parameter(base.clone() if contiguous else base.T.contiguous().T)
    # In the layout of the parameter, as autograd makes it: the fused kernel reads both in the order of memory.
    p.grad = (p - 6).detach()
    CautiousAdam([p], lr=0.1, cautious_decay=1.0).step()
    expected = [plain_step(w, w - 6, {}, 0.1, 0.9, 0.999, 1e-8, 1.0) for w in base.flatten().tolist()]
    torch.testing.assert_close(p.detach().flatten().tolist(), expected, rtol=1e-10, atol=1e-12)


def test_saved_and_loaded_goes_on_bit_for_bit():
    def make(params):
        groups = [{"params": params[:2], "cautious_decay": 3.0, "betas": (0.5, 0.95)}, {"params": params[2:]}]
        return CautiousAdam(groups, cautious_decay=1.0)

    def run(params, optimizer, steps):
        for step in steps:
            fill_grads(params, step)
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (step + 1)
            optimizer.step()

    whole = parameters(torch.float32)
    run(whole, make(whole), range(6))
    first = parameters(torch.float32)
    optimizer = make(first)
    run(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": values(first)}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second = [Parameter(p) for p in saved["params"]]
    optimizer = make(second)
    optimizer.load_state_dict(saved["optimizer"])
    run(second, optimizer, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(whole, second))
