"""python -m mome sample RUN "prompt": continue a prompt, token by token.

Lives here: the command.
Not here: the cache and the drawing of tokens (mome/generate.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mome.config import require
from mome.options import parse
from mome.pretrained import Pretrained, from_pretrained
from mome.run import load_run


@dataclass(frozen=True)
class SampleOptions:
    """Continue a prompt with the model of a run, or of an export."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, or of an export."""
    prompt: Annotated[str, tyro.conf.Positional] = ""
    """Text to continue."""
    tokens: int = 128
    """Tokens at most; a new document ends the sample."""
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int = 50
    """Draw among this many likeliest tokens (0: all)."""
    seed: int = 0
    """Of the drawing."""

    def __post_init__(self):
        require(self.tokens >= 1, "tokens", self.tokens, "give 1 or more")
        require(self.temperature >= 0, "temperature", self.temperature, "give 0 or more")
        require(self.top_k >= 0, "top-k", self.top_k, "give 0 or more")
        require(0 <= self.seed < 2**63, "seed", self.seed, "give a whole number from 0 to 2**63 - 1")


def main(words: Sequence[str]) -> None:
    """The command."""
    options = parse(SampleOptions, words, "python -m mome sample")
    if (options.run / "model.safetensors").exists():
        model = from_pretrained(options.run)
    else:
        run = load_run(options.run)
        model = Pretrained(run.parts, run.tokenizer, run.config)
    prompt, limit = model.tokenizer.encode(options.prompt), model.config.model.max_tokens
    require(
        len(prompt) < limit, "prompt", f"of {len(prompt)} tokens", f"the model takes {limit - 1} at most; shorten it"
    )
    drawn = model.generate(
        prompt, options.tokens, temperature=options.temperature, top_k=options.top_k, seed=options.seed
    )
    print(options.prompt + model.tokenizer.decode(list(drawn)))
