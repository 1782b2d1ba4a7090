"""A frozen plain GPT in torch alone, for one purpose: to be measured beside. 4 layers, width 128, 4 heads, GELU, AdamW.

Lives here: model, loop and validation of the reference in one file, which imports nothing of this project.
Not here: anything to improve; `docs-plain` is the same model inside the trainer, and must be as fast.

    python records/baselines/plain_gpt.py TRAIN.bin VAL.bin STEPS
"""

import math
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

V, T, B, D, H, L = 50257, 256, 8, 128, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = (y.view(*y.shape[:2], H, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(L))), nn.LayerNorm(D)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(
                    p, std=0.02 / math.sqrt(2 * L) if name.endswith(("out.weight", "down.weight")) else 0.02
                )
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.norm(self.blocks(self.embed(tokens) + self.position.weight))
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), targets.flatten())


def rows(data, starts):
    both = torch.from_numpy(np.stack([data[s : s + T + 1] for s in starts]).astype(np.int64))
    return both[:, :-1], both[:, 1:]


def main(train_path, val_path, steps):
    torch.manual_seed(0)
    train, val = (np.memmap(path, np.uint16, "r", 1024) for path in (train_path, val_path))
    model, random, seconds = Model(), np.random.default_rng(0), []
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        started = time.perf_counter()
        lr = min((step + 1) / 30, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * lr
        loss = model(*rows(train, random.integers(0, len(train) - T - 1, B)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step + 1} loss {loss.item():.4f} {B * T / np.median(seconds):.0f} tokens/s", flush=True)
    with torch.no_grad():
        losses = [model(*rows(val, range(s, s + B * T, T))).item() for s in range(0, len(val) - B * T - 1, B * T)]
    print(f"val_loss {np.mean(losses):.4f} train_seconds {sum(seconds):.1f} tokens/s {B * T / np.median(seconds):.0f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
