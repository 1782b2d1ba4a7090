"""A tiny corpus and the words that train on it: what the tests of whole runs share.

Lives here: made text, its shards and tokenizer, the trainer as a process or in this one.
Not here: the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from data.shards import write_shard
from data.tokenizer import train_bpe

ROOT = Path(__file__).resolve().parent.parent
WORDS = (
    "def",
    "return",
    "class",
    "import",
    "self",
    "value",
    "index",
    "table",
    "row",
    "token",
    "sum",
    "for",
    "in",
    "if",
    "else",
)


def made_text(random: np.random.Generator) -> str:
    """Words of which each follows, nine times in ten, from the two before it: what n-gram rows can learn."""
    picked = [0, 1]
    for _ in range(random.integers(5, 80)):
        follows = random.random() < 0.9
        picked.append(
            (7 * picked[-1] + 4 * picked[-2] + 1) % len(WORDS) if follows else int(random.integers(len(WORDS)))
        )
    return " ".join(WORDS[one] for one in picked) + "\n"


def make_corpus(folder: Path, vocab_size: int = 300) -> list[str]:
    """Write train, val and tokenizer files; returns the flags that name them."""
    random = np.random.default_rng(0)
    texts = [made_text(random) for _ in range(300)]
    tokenizer = train_bpe(iter(texts), vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    documents = [[tokenizer.bos, *ids] for ids in tokenizer.encode_batch(texts)]
    for name, part in (("train", documents[:260]), ("val", documents[260:])):
        write_shard(folder / f"{name}_000.bin", np.array([one for ids in part for one in ids]))
    return [
        "--tokenizer", str(folder / "tokenizer.json"),
        "--train-glob", str(folder / "train_*.bin"), "--val-glob", str(folder / "val_*.bin"),
    ]  # fmt: skip


def tiny_flags(corpus: list[str], runs: Path, *more: str) -> list[str]:
    """A model of two layers on that corpus: a step takes milliseconds."""
    return [
        "local", *corpus, "--runs-dir", str(runs), "--row-tokens", "32", "--steps", "12",
        "--model.layers", "2", "--model.width", "32", "--model.heads", "2", "--memory.ngram.rows", "512",
        "--val-rows", "8", "--final-val-rows", "8", "--sample-tokens", "8", *more,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def start(words: list[str], module: list[str] | None = None) -> subprocess.Popen:
    """The trainer, or `python -m module`, as a process."""
    command = [sys.executable, *(module or [str(ROOT / "train_gpt.py")]), *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(words: list[str], module: list[str] | None = None) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the process."""
    process = start(words, module)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def metrics(folder: Path) -> list[dict]:
    """Lines of metrics without their clock and the memory and bytes of their process."""
    left_out = ("seconds", "resident_bytes", "read_bytes", "written_bytes")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in left_out} for line in lines]


def only_run(runs: Path) -> Path:
    (folder,) = [path for path in runs.iterdir() if not path.name.startswith(".")]
    return folder
