"""Softcapped or plain cross entropy of the head, for batches of packed rows.

Lives here: what training minimises, what validation reports, and the logits that sampling draws from.
Not here: how it is computed (kernels/cross_entropy.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cross_entropy import cap, chunked_cross_entropy, chunked_cross_entropy_sum


def cross_entropy(
    hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, *, softcap: bool, scale: float = 1.0
) -> Tensor:
    """scale * the sum of nats over all tokens: a scalar in float32 or more, differentiable in hidden and weight.

    targets: int64, -100 for a token that does not count. Raises ValueError for a target that is no class.
    """
    return chunked_cross_entropy_sum(hidden_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), softcap, scale)


def token_nats(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, *, softcap: bool) -> Tensor:
    """Nats of each token [B, T] in float32 or more, without a gradient; 0 where the target is -100."""
    nats_N = chunked_cross_entropy(hidden_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), softcap)
    return nats_N.view(targets_BT.shape)


def head_logits(hidden_ND: Tensor, weight_VD: Tensor, *, softcap: bool) -> Tensor:
    """What the cross entropy takes the softmax of, [N, V] in float32 or more, for few tokens."""
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    logits_NV = hidden_ND.to(wide) @ weight_VD.to(hidden_ND.dtype).to(wide).t()
    return cap(logits_NV) if softcap else logits_NV
