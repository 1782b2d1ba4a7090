"""What is minimised and what is reported.

Lives here: cross_entropy, token_nats, head_logits.
Not here: the kernels below them (kernels/cross_entropy.py), the backbone (mome/gpt.py).
"""

from __future__ import annotations

from mome.loss.cross_entropy import cross_entropy, head_logits, token_nats

__all__ = ["cross_entropy", "head_logits", "token_nats"]
