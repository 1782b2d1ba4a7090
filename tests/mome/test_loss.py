"""The loss that training minimises and the nats that validation reports, against torch's cross entropy.

Lives here: shapes, the scale, ignored targets, the logits that sampling sees.
Not here: pieces, extremes and dtypes (tests/kernels/test_cross_entropy.py).
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mome.loss import cross_entropy, head_logits, token_nats

SOFTCAP = pytest.mark.parametrize("softcap", [True, False])


def problem() -> tuple[Tensor, Tensor, Tensor]:
    hidden_BTD = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(19, 6, dtype=torch.float64, requires_grad=True)
    targets_BT = torch.randint(0, 19, (3, 7))
    targets_BT[1, 4:] = -100
    return hidden_BTD, weight_VD, targets_BT


def expected_nats(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, softcap: bool) -> Tensor:
    logits_BTV = hidden_BTD @ weight_VD.t()
    if softcap:
        logits_BTV = 23 * torch.sigmoid((logits_BTV + 5) / 7.5)
    return F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none")


@SOFTCAP
def test_cross_entropy(softcap):
    hidden_BTD, weight_VD, targets_BT = problem()
    loss = cross_entropy(hidden_BTD, weight_VD, targets_BT, softcap=softcap, scale=0.25)
    oracle = 0.25 * expected_nats(hidden_BTD, weight_VD, targets_BT, softcap).sum()
    torch.testing.assert_close(loss, oracle, rtol=1e-12, atol=0)
    leaves = (hidden_BTD, weight_VD)
    for one, other in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(oracle, leaves)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@SOFTCAP
def test_token_nats(softcap):
    hidden_BTD, weight_VD, targets_BT = problem()
    nats_BT = token_nats(hidden_BTD, weight_VD, targets_BT, softcap=softcap)
    assert not nats_BT.requires_grad and (nats_BT[1, 4:] == 0).all()
    torch.testing.assert_close(
        nats_BT, expected_nats(hidden_BTD, weight_VD, targets_BT, softcap).detach(), rtol=0, atol=1e-12
    )
    total = cross_entropy(hidden_BTD, weight_VD, targets_BT, softcap=softcap)
    torch.testing.assert_close(nats_BT.sum(), total.detach(), rtol=1e-12, atol=0)


@SOFTCAP
def test_head_logits_are_those_of_the_loss(softcap):
    hidden_BTD, weight_VD, targets_BT = problem()
    logits_NV = head_logits(hidden_BTD.flatten(0, 1), weight_VD, softcap=softcap)
    nats_N = F.cross_entropy(logits_NV, targets_BT.flatten(), reduction="none")
    torch.testing.assert_close(nats_N.view(3, 7), expected_nats(hidden_BTD, weight_VD, targets_BT, softcap))
    assert head_logits(hidden_BTD[0].bfloat16(), weight_VD, softcap=softcap).dtype == torch.float32


def test_a_head_of_zeros_knows_nothing():
    hidden_BTD, weight_VD, targets_BT = problem()
    nats_BT = token_nats(hidden_BTD.float(), torch.zeros_like(weight_VD).float(), targets_BT, softcap=True)
    assert nats_BT[0].tolist() == pytest.approx([math.log(19)] * 7, rel=1e-6)
