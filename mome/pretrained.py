"""A trained model as files to hand on: written from a run, read back in a fresh process.

Lives here: export (safetensors, configuration, tokenizer, rows in shards) and from_pretrained.
Not here: checkpoints to go on training from (mome/checkpoint.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from safetensors.torch import load_file, save_file

from data.tokenizer import Tokenizer, load_tokenizer
from mome.config import RunConfig, from_dict, to_dict
from mome.errors import UserError
from mome.run import LoadedRun, Parts, build_model
from mome.runfolder import write_json
from mome.table.file import FileTable

FORMAT = "mome-1"
SHARD_BYTES = 256 << 20


def export(run: LoadedRun, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `run`, whose tables are read from its checkpoint piece by piece, into a new or empty folder.

    Files: config.json, model.safetensors (dense weights), rows_NAME_nnnnn.safetensors (`rows` [n, lanes, dim], decay
    materialised, at most shard_bytes each), tokenizer.json. Raises UserError for a folder in use.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is in use; name a new or empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    shards = {}
    for name, table in run.parts.tables.items():
        row_bytes = 4 * table.spec.lanes * table.spec.dim
        chunk = max(1, shard_bytes // row_bytes)
        shards[name] = [f"rows_{name}_{n:05d}.safetensors" for n in range(math.ceil(table.spec.rows / chunk))]
        for file, rows_ULD in zip(shards[name], table.iter_rows(chunk)):
            save_file({"rows": rows_ULD}, folder / file)
    save_file(
        {key: value.contiguous() for key, value in run.parts.model.state_dict().items()}, folder / "model.safetensors"
    )
    run.tokenizer.save(folder / "tokenizer.json")
    # The configuration comes last: a folder without it was not finished.
    write_json(folder / "config.json", {
        "format": FORMAT, "step": run.step, "vocab_size": run.tokenizer.vocab_size, "bos": run.tokenizer.bos,
        "shards": shards, "run": to_dict(run.config),
    })  # fmt: skip


def from_pretrained(folder: Path | str) -> tuple[Parts, Tokenizer, RunConfig]:
    """The model with its tables, which stay in their files, on the CPU in float32; the tokenizer; the configuration."""
    folder = Path(folder)
    try:
        kept = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"{folder}: no exported model in it ({error}); write one with: python -m mome export RUN {folder}"
        ) from error
    if kept.get("format") != FORMAT:
        raise UserError(
            f"{folder}: its format is {kept.get('format')}, this version reads {FORMAT}; export the run again"
        )
    config = from_dict(RunConfig, kept["run"])
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    model, memories = build_model(config, kept["vocab_size"], kept["bos"])
    model.load_state_dict(load_file(folder / "model.safetensors"))
    tables = {
        name: FileTable(memory.spec, [folder / file for file in kept["shards"][name]])
        for name, memory in memories.items()
    }
    return Parts(model.requires_grad_(False), memories, tables), tokenizer, config
