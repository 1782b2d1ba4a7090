"""NorMuon against torch.optim.Muon where they agree, and against the formulas written out matrix by matrix.

Lives here: the update, splitting and stacking, degenerate gradients, saving and loading.
Not here: the orthogonalisation (test_orthogonalize.py) and which parameters come here (test_groups.py).
"""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch.nn import Parameter

from optim.muon import NorMuon
from optim.orthogonalize import NEWTON_SCHULZ, POLAR_EXPRESS, newton_schulz


def parameters(shapes, dtype=torch.float64, seed=0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.1 for shape in shapes)
    return [Parameter(one.to(dtype)) for one in made]


def fill_grads(params, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


class Plain:
    """One matrix, NorMuon as in the reference, nothing shared with the optimizer but its coefficients."""

    def __init__(self, w, beta2=0.9, weight_decay=0.0, lr_mul=1.0):
        self.w, self.beta2, self.weight_decay, self.lr_mul = w.clone(), beta2, weight_decay, lr_mul
        self.m, self.v = torch.zeros_like(w), None

    def step(self, g, lr, mu):
        rows, cols = g.shape
        self.m = mu * self.m + (1 - mu) * g
        x = (1 - mu) * g + mu * self.m
        x = x / (1.02 * x.pow(2).sum().sqrt() + 1e-6)
        for a, b, c in POLAR_EXPRESS:
            x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
        squares = x.pow(2).mean(1 if rows >= cols else 0, keepdim=True)
        self.v = (1 - self.beta2) * squares + (0 if self.v is None else self.beta2 * self.v)
        even = x / self.v.clamp(min=1e-10).sqrt()
        x = even * (x.norm() / even.norm())
        f = lr * self.lr_mul * math.sqrt(max(1, rows / cols))
        for i in range(rows):
            for j in range(cols):
                decay = lr * self.weight_decay * f * self.w[i, j] if x[i, j] * self.w[i, j] >= 0 else 0
                self.w[i, j] = self.w[i, j] - decay - f * x[i, j]


SCHEDULE = [(0.02, 0.85), (0.03, 0.9), (0.03, 0.95), (0.01, 0.95), (0.005, 0.85)]


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
def test_equals_the_plain_rule(shape):
    params = parameters([shape] * 3)
    plain = [Plain(p.detach(), weight_decay=9.0, lr_mul=2.0) for p in params]
    optimizer = NorMuon(params, weight_decay=9.0, lr_mul=2.0)
    for step, (lr, mu) in enumerate(SCHEDULE):
        fill_grads(params, step)
        for p in params:
            # A neuron that is all but dead comes under the bound of its mean square.
            p.grad[0] *= 1e-8
            p.grad[:, 0] *= 1e-8
        optimizer.param_groups[0].update(lr=lr, momentum=mu)
        optimizer.step()
        for p, one in zip(params, plain):
            one.step(p.grad, lr, mu)
            torch.testing.assert_close(p.detach(), one.w, rtol=0, atol=1e-10)
            torch.testing.assert_close(optimizer.state[p]["variance"][0], one.v, rtol=1e-7, atol=1e-20)
            assert one.v.min() < 1e-10


def test_decay_does_something_and_only_where_it_agrees():
    with_decay, without = parameters([(4, 8)]), parameters([(4, 8)])
    for params, weight_decay in ((with_decay, 50.0), (without, 0.0)):
        fill_grads(params, 0)
        NorMuon(params, weight_decay=weight_decay).step()
    start = parameters([(4, 8)])[0]
    moved = (start - without[0]).detach()
    agrees = moved * start > 0
    extra = (without[0] - with_decay[0]).detach()
    torch.testing.assert_close(extra[agrees], 0.023**2 * 50 * start.detach()[agrees], rtol=1e-9, atol=0)
    assert agrees.any() and not extra[~agrees].any()


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)])
def test_equals_torch_muon_without_the_variance(shape):
    ours, theirs = parameters([shape], torch.float32), parameters([shape], torch.float32)
    optimizer = NorMuon(ours, lr=0.1, variance=False, orthogonalize=newton_schulz, dtype=torch.bfloat16)
    oracle = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0, ns_coefficients=NEWTON_SCHULZ, adjust_lr_fn="original")
    for step in range(4):
        for params in (ours, theirs):
            fill_grads(params, step)
        optimizer.step()
        oracle.step()
        torch.testing.assert_close(
            optimizer.state[ours[0]]["momentum"], oracle.state[theirs[0]]["momentum_buffer"], rtol=1e-5, atol=1e-6
        )
    moved = (theirs[0] - parameters([shape], torch.float32)[0]).detach().norm()
    # Both compute in bfloat16, which has 8 bits, and round at different places.
    assert float((ours[0] - theirs[0]).detach().norm() / moved) < 0.02


def test_variance_keeps_the_norm_and_evens_out_neurons():
    (p,) = parameters([(8, 32)])
    before = p.detach().clone()
    p.grad = torch.randn(8, 32, dtype=torch.float64) * torch.linspace(0.01, 1, 32, dtype=torch.float64)
    plain = copy.deepcopy(p)
    plain.grad = p.grad.clone()
    NorMuon([p], lr=1.0).step()
    NorMuon([plain], lr=1.0, variance=False).step()
    even, uneven = ((before - one.detach()) for one in (p, plain))
    torch.testing.assert_close(even.norm(), uneven.norm(), rtol=1e-12, atol=0)
    # The first mean square is a tenth of the step's own, so every column comes out with the same norm.
    assert float(even.norm(dim=0).std() / even.norm(dim=0).mean()) < 1e-9
    assert float(uneven.norm(dim=0).std() / uneven.norm(dim=0).mean()) > 0.1


def test_fused_qkv_is_three_matrices():
    (fused,) = parameters([(24, 8)])
    apart = [Parameter(one.clone()) for one in fused.detach().chunk(3)]
    whole = Parameter(fused.detach().clone())
    optimizers = NorMuon([fused], split=3, weight_decay=1.0), NorMuon(apart, weight_decay=1.0), NorMuon([whole])
    for step in range(3):
        fill_grads([fused], step)
        whole.grad = fused.grad.clone()
        for one, grad in zip(apart, fused.grad.chunk(3)):
            one.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(fused.detach(), torch.cat([one.detach() for one in apart]), rtol=0, atol=1e-12)
    assert not torch.allclose(fused, whole, atol=1e-3)


def test_a_stack_is_its_matrices_and_fused_stacks_too():
    (stack,) = parameters([(2, 3, 12, 4)])
    single = [Parameter(one.clone()) for one in stack.detach().reshape(12, 6, 4)]
    optimizers = NorMuon([stack], split=2), NorMuon(single)
    for step in range(3):
        fill_grads([stack], step)
        for one, grad in zip(single, stack.grad.reshape(12, 6, 4)):
            one.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    flat = torch.stack([one.detach() for one in single]).view_as(stack)
    torch.testing.assert_close(stack.detach(), flat, rtol=0, atol=1e-12)


def test_batched_with_others_or_alone_is_the_same():
    shapes = [(8, 16), (16, 8), (8, 16), (2, 8, 16), (8, 8)]
    together, alone = parameters(shapes), parameters(shapes)
    optimizers = [NorMuon(together, weight_decay=1.0), *(NorMuon([p], weight_decay=1.0) for p in alone)]
    for step in range(3):
        fill_grads(together, step)
        fill_grads(alone, step)
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(together, alone):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_and_missing_gradients(dtype, poison_empty):
    zero, missing, live = parameters([(6, 4), (6, 4), (6, 4)], dtype)
    before = [p.detach().clone() for p in (zero, missing)]
    optimizer = NorMuon([zero, missing, live])
    for step in range(3):
        fill_grads([live], step)
        zero.grad = torch.zeros_like(zero)
        optimizer.step()
    assert torch.equal(zero.detach(), before[0]) and torch.equal(missing.detach(), before[1])
    assert live.isfinite().all() and missing not in optimizer.state
    fill_grads([zero], 9)
    optimizer.step()
    assert zero.isfinite().all() and not torch.equal(zero.detach(), before[0])


def test_saved_and_loaded_goes_on_bit_for_bit():
    shapes = [(8, 16), (24, 8), (8, 16)]

    def make(params):
        return NorMuon([{"params": params[::2]}, {"params": params[1:2], "split": 3, "lr_mul": 2.0}], weight_decay=1.0)

    def run(params, optimizer, steps):
        for step in steps:
            fill_grads(params, step)
            for group in optimizer.param_groups:
                group.update(lr=0.01 * (step + 1), momentum=0.85 + 0.01 * step)
            optimizer.step()

    whole = parameters(shapes, torch.float32)
    run(whole, make(whole), range(6))

    first = parameters(shapes, torch.float32)
    optimizer = make(first)
    run(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in first]}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second = [Parameter(p) for p in saved["params"]]
    optimizer = make(second)
    optimizer.load_state_dict(saved["optimizer"])
    run(second, optimizer, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(whole, second))


@pytest.mark.parametrize(
    ("parameter", "split", "complaint"),
    [
        (torch.zeros(3), 1, "takes matrices"),
        (torch.zeros(8, 4), 3, "don't split into 3"),
        (torch.zeros(8, 4).T, 1, "not contiguous"),
    ],
)
def test_what_is_no_matrix_is_refused(parameter, split, complaint):
    with pytest.raises(ValueError, match=complaint):
        NorMuon([Parameter(parameter)], split=split)
