"""How a run ends: validated, the memory knocked out, and its result, sample, plot and page left in its folder.

Lives here: the last score, knock-outs, result.json, the sample. Every rank calls it; the first one writes.
Not here: training (train_gpt.py), one validation (mome/evaluate.py), the page itself (mome/tools/report.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data.tokenizer import Tokenizer
from mome.config import RunConfig
from mome.describe import parameter_counts
from mome.evaluate import Score, knockouts
from mome.files import write_atomic, write_json
from mome.generate import generate
from mome.run import Parts, load_run
from mome.runfolder import RunFolder
from mome.usage import peak_bytes
from mome.world import World


def bits(score: Score) -> str:
    """Bits a byte, as a person reads them."""
    if score.val_bpb is None:
        return "no bits a byte (the tokenizer states no bytes)"
    return f"{score.val_bpb:.4f} bits a byte"


def result_of(
    config: RunConfig, parts: Parts, score: Callable[..., Score], folder: RunFolder, world: World,
    counts: dict[str, Any], say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Validate, knock the memory out, and write result.json. counts: steps, tokens, seconds, and this rank's tokens.

    score: rows of validation, and what is in the memory's place -> Score.
    """
    final = score(config.final_val_rows)
    say(f"validation  {final.val_loss:.4f} nats a token  {bits(final)}  over {final.tokens:,} tokens")
    # A comparison among themselves: never on more rows than the run's own validation.
    rows, names = min(config.val_rows, config.final_val_rows or config.val_rows), knockouts(parts)
    if names:
        say(f"the memory knocked out, on {rows} of the validation rows:")
    knockout: dict[str, float] = {}
    for name in names:
        knockout[name] = score(rows, name).val_loss
        rise = "" if name == "full" else f"  ({knockout[name] - knockout['full']:+.4f})"
        say(f"  memory {name.replace('_', ' '):15} {knockout[name]:.4f}{rise}")
    active, memory = parameter_counts(parts.model, parts.memories)
    mine = {
        "tokens": counts["rank_tokens"], "bytes_sent": counts["rank_bytes_sent"], "peak": peak_bytes(world.device),
        "table_bytes": sum(table.table_bytes() + table.state_bytes() for table in parts.tables.values()),
    }  # fmt: skip
    ranks = world.gather_objects("result", mine)
    typical = folder.typical_step_seconds() if world.first else None
    result = {
        "val_loss": final.val_loss, "val_bpb": final.val_bpb, "val_tokens": final.tokens, "seconds": counts["seconds"],
        "steps": counts["step"], "tokens": counts["tokens"], "step_ms": typical and 1000 * typical,
        "active_params": active, "memory_params": memory, "peak_bytes": max(one["peak"] for one in ranks),
        "world": world.size, **{f"rank_{key}": [one[key] for one in ranks] for key in mine if key != "peak"},
        "knockout": knockout,
    }  # fmt: skip
    if world.first:
        folder.log_validation(counts["step"], final.val_loss, final.val_bpb)
        write_json(folder.path / "result.json", result)
    return result


def write_sample(
    config: RunConfig, parts: Parts, tokenizer: Tokenizer, folder: RunFolder, dtype: torch.dtype, saved: Path | None
) -> None:
    """A short continuation of nothing, so that a person sees what the model has learnt; the first rank alone calls it.

    saved: the run's last checkpoint. Of several processes the rows come from there: those of others are not to be had
    without them.
    """
    if not config.sample_tokens:
        return
    if any(not table.placement.whole for table in parts.tables.values()):
        parts, dtype = load_run(folder.path, saved=saved).parts, torch.float32
    windows = config.make_schedule().at(config.steps - 1).windows
    drawn = generate(
        parts, [], config.sample_tokens, windows, tokenizer.bos, seed=config.seed, dtype=dtype,
        limit=config.model.max_tokens,
    )  # fmt: skip
    text = tokenizer.decode(list(drawn))
    write_atomic(folder.path / "sample.txt", text + "\n")
    print(f"sample:\n{text}")
