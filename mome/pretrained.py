"""A trained model as files to hand on: written from a run, read back in a fresh process.

Lives here: export (safetensors, configuration, tokenizer, rows in shards) and from_pretrained.
Not here: checkpoints to go on training from (mome/checkpoint.py).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.tokenizer import Tokenizer, load_tokenizer
from mome.config import RunConfig, from_dict, to_dict
from mome.errors import UserError
from mome.files import sync, write_json
from mome.generate import Decoder, generate
from mome.run import LoadedRun, Parts, build_model
from mome.table.file import FileTable

FORMAT = "mome-1"
SHARD_BYTES = 256 << 20
# What a configuration holds of the machine that it ran on.
PATHS = ("runs_dir", "train_glob", "val_glob", "tokenizer")


def export(run: LoadedRun, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `run`, whose tables are read from its checkpoint piece by piece, into a new or empty folder, whole or not
    at all: what an export that was killed left beside it is removed by the next one.

    Files: config.json (with the run's validation, when it has finished), model.safetensors (dense weights),
    rows_NAME_nnnnn.safetensors (`rows` [n, lanes, dim], decay materialised, at most shard_bytes each), tokenizer.json.
    Raises UserError for a folder in use, OSError when it cannot be written.
    """
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is in use; name a new or empty folder")
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        _write(run, draft, shard_bytes)
        for path in draft.iterdir():
            # safetensors makes its files for the owner alone; these are to be handed on.
            path.chmod(0o644)
            sync(path)
        sync(draft)
        draft.rename(folder)
        sync(folder.parent)
    except SafetensorError as error:
        # It wraps a full disk.
        raise OSError(f"{folder}: cannot be written ({str(error).splitlines()[0]}); free space, then again") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(run: LoadedRun, folder: Path, shard_bytes: int) -> None:
    shards = {}
    for name, table in run.parts.tables.items():
        row_bytes = 4 * table.spec.lanes * table.spec.dim
        chunk = max(1, shard_bytes // row_bytes)
        shards[name] = [f"rows_{name}_{n:05d}.safetensors" for n in range(math.ceil(table.spec.rows / chunk))]
        for file, rows_ULD in zip(shards[name], table.iter_rows(chunk)):
            save_file({"rows": rows_ULD}, folder / file)
    dense = {key: value.contiguous() for key, value in run.parts.model.state_dict().items()}
    save_file(dense, folder / "model.safetensors")
    run.tokenizer.save(folder / "tokenizer.json")
    # The maker's folders are nobody's business.
    paths = {key: Path(value).name for key, value in to_dict(run.config).items() if key in PATHS}
    write_json(folder / "config.json", {
        "format": FORMAT, "step": run.step, "vocab_size": run.tokenizer.vocab_size, "bos": run.tokenizer.bos,
        **_validation(run), "shards": shards, "run": to_dict(run.config) | paths,
    })  # fmt: skip


def _validation(run: LoadedRun) -> dict[str, Any]:
    """val_loss (nats a token) and val_bpb of the run's result, when they were measured on these very weights."""
    try:
        result = json.loads((run.folder.path / "result.json").read_text())
        return {key: result[key] for key in ("val_loss", "val_bpb")} if result["steps"] == run.step else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@dataclass
class Pretrained:
    """An exported model: its parts, whose tables stay in their files, its tokenizer and the run's configuration."""

    parts: Parts
    tokenizer: Tokenizer
    config: RunConfig

    @property
    def windows(self) -> tuple[int, int]:
        """Attention windows (short, long) that the training ended with."""
        return self.config.make_schedule().at(self.config.steps - 1).windows

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [n + 1, V] of what follows a document's start and each of these n ids, softcap applied."""
        return Decoder(self.parts, self.windows, self.tokenizer.bos).feed([self.tokenizer.bos, *ids])

    def generate(self, ids: Sequence[int], tokens: int, **options: Any) -> Iterator[int]:
        """Ids that continue these; options: temperature, top_k, seed as in mome.generate.generate."""
        limit = self.config.model.max_tokens
        return generate(self.parts, ids, tokens, self.windows, self.tokenizer.bos, limit=limit, **options)


def from_pretrained(folder: Path | str) -> Pretrained:
    """Read what `export` wrote, on the CPU in float32. Raises UserError for a folder that holds no whole export."""
    folder = Path(folder)
    try:
        kept = json.loads((folder / "config.json").read_text())
        if not isinstance(kept, dict):
            raise ValueError("its config.json is damaged")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: no exported model in it ({error}); write one with: python -m mome export RUN {folder}"
        ) from error
    if (folder / "checkpoint").exists():
        raise UserError(f"{folder} is a run, not an export; write one with: python -m mome export {folder} DIR")
    if kept.get("format") != FORMAT:
        raise UserError(
            f"{folder}: its format is {kept.get('format')}, this version reads {FORMAT}; export the run again"
        )
    if not {"run", "vocab_size", "bos", "shards"} <= kept.keys():
        raise UserError(f"{folder / 'config.json'} is damaged; export the run again")
    config = from_dict(RunConfig, kept["run"])
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    model, memories = build_model(config, kept["vocab_size"], kept["bos"])
    try:
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{folder / 'model.safetensors'}: cannot be read ({reason}); export the run again") from error
    tables = {
        name: FileTable(memory.spec, [folder / file for file in kept["shards"][name]])
        for name, memory in memories.items()
    }
    return Pretrained(Parts(model.requires_grad_(False), memories, tables), tokenizer, config)
