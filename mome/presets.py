"""The named configurations.

Lives here: the presets, each a whole RunConfig.
Not here: what the fields mean (mome/config.py).
"""

from __future__ import annotations

from dataclasses import replace

from mome.config import RunConfig, ScheduleConfig, TableConfig, TableConfigs
from mome.gpt import ModelConfig
from optim.groups import OptimConfig
from optim.schedule import Stage

# A row moves by about lr at each touch, and what it is added to sets its scale. Best of a few on `local`.
TABLES = TableConfigs(routed=TableConfig(lr=1.0), ngram=TableConfig(lr=0.02), value=TableConfig(lr=0.4))

LOCAL = RunConfig(
    preset="local",
    steps=320,
    memories=("routed", "ngram"),
    table=TABLES,
    row_tokens=512,
    micro_batch=8,
    final_val_rows=128,
    val_rows=64,
    model=ModelConfig(kind="mome", layers=4, width=192, heads=4, max_tokens=1024),
    schedule=ScheduleConfig(
        stages=(
            Stage(share=0.5, rows=4, windows=(128, 256), document_cap=512),
            Stage(share=0.5, rows=8, windows=(128, 512), lr_mul=1.3, document_cap=512),
        )
    ),
)

DOCS = replace(
    LOCAL,
    preset="docs",
    tokenizer="gpt2",
    steps=300,
    row_tokens=256,
    val_rows=256,
    final_val_rows=0,
    model=ModelConfig(kind="mome", layers=4, width=128, heads=4, max_tokens=1024),
    schedule=ScheduleConfig(stages=(Stage(share=1.0, rows=8, windows=(128, 256), document_cap=256),)),
)

DOCS_PLAIN = replace(
    DOCS,
    preset="docs-plain",
    memories=(),
    model=ModelConfig(kind="plain", layers=4, width=128, heads=4, max_tokens=256),
    optim=OptimConfig(kind="adamw"),
    schedule=ScheduleConfig(
        stages=(Stage(share=1.0, rows=8, windows=(256, 256), document_cap=256),),
        cooldown=1.0,
        floor=0.1,
        warmup=0.1,
        shape="cosine",
    ),
)

PRESETS: dict[str, RunConfig] = {
    preset.preset: preset for preset in (LOCAL, replace(LOCAL, preset="local-dense", memories=()), DOCS, DOCS_PLAIN)
}

ABOUT = {
    "local": "routed memory and n-gram tables on the built-in corpus of Python sources; minutes on two CPU cores",
    "local-dense": "the same backbone without memory",
    "docs": "GPT-2 tokens from shards of your own, with n-gram and routed memory",
    "docs-plain": "a plain GPT with AdamW on the same shards, the reference to beat",
}
