"""Sampling: token by token with a cache that carries the n-gram history.

Lives here: prompt and continuation for one sequence.
Not here: what the model does with the cache (mome/gpt.py), the command (mome/tools/sample.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mome.loss import head_logits
from mome.run import Parts


class Decoder:
    """One sequence fed piece by piece; equals the full forward pass over all pieces."""

    def __init__(self, parts: Parts, windows: tuple[int, int], bos: int, dtype: torch.dtype = torch.float32):
        self.parts, self.windows, self.bos, self.dtype = parts, windows, bos, dtype
        self.device = next(parts.model.parameters()).device
        self.state = parts.model.new_state(1, windows)
        self.history_BH = torch.full(
            (1, max((m.history for m in parts.memories.values()), default=0)), -1, device=self.device
        )
        self.documents = 0

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Take in ids [n] and return the logits [n, V] for what follows each."""
        tokens_BT = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        docs_BT = (self.documents + (tokens_BT == self.bos).cumsum(1)).int()
        self.documents = int(docs_BT[0, -1])
        hidden_BTD = self.parts.forward(
            *self.parts.read(tokens_BT, self.history_BH), tokens_BT, docs_BT, windows=self.windows, dtype=self.dtype,
            history_BH=self.history_BH, state=self.state,
        )  # fmt: skip
        joined = torch.cat([self.history_BH, tokens_BT], 1)
        self.history_BH = joined[:, joined.shape[1] - self.history_BH.shape[1] :]
        return head_logits(hidden_BTD[0], self.parts.model.head, softcap=self.parts.model.softcap)


def generate(
    parts: Parts, prompt: Sequence[int], tokens: int, windows: tuple[int, int], bos: int, *,
    temperature: float = 0.8, top_k: int = 50, seed: int = 0, dtype: torch.dtype = torch.float32,
    limit: int | None = None,
) -> Iterator[int]:  # fmt: skip
    """Yield up to `tokens` ids that continue bos + prompt; ends at a new bos, or when `limit` positions are used.

    temperature 0 takes the likeliest id. top_k 0 samples among all.
    """
    decoder = Decoder(parts, windows, bos, dtype)
    generator = torch.Generator().manual_seed(seed)
    logits_V = decoder.feed([bos, *prompt])[-1]
    used = 1 + len(prompt)
    for _ in range(tokens):
        token = draw(logits_V.float().cpu(), temperature, top_k, generator)
        if token == bos:
            return
        yield token
        used += 1
        if limit is not None and used > limit:
            return
        logits_V = decoder.feed([token])[-1]


def draw(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One id from softmax(logits / temperature) over the top_k likeliest ids."""
    if temperature == 0:
        return int(logits_V.argmax())
    values, ids = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    picked = torch.multinomial((values / temperature).softmax(0), 1, generator=generator)
    return int(ids[picked])
