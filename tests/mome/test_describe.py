"""What --dry-run counts is what a run then holds: shapes, parameters, bytes.

Lives here: the counts against real models, optimizers and tables; the text; that nothing is fetched for it.
Not here: FLOPs (tests/mome/test_gpt.py) and the table of groups (tests/optim/test_groups.py).
"""

from __future__ import annotations

import re

import pytest
import torch

import mome.run
from data.tokenizer import GPT2_VOCAB
from mome.command import parse
from mome.describe import (
    byte_counts,
    cycle_tokens,
    describe,
    kept_bytes,
    parameter_counts,
    ranges,
    tables_of,
    tensors_of,
)
from mome.run import build
from optim.groups import build_optimizers, label_of

TINY = ["--model.layers", "3", "--model.width", "32", "--model.heads", "2", "--row-tokens", "16", "--steps", "5"]
TABLES = ["--memory.ngram.rows", "512", "--table.routed.rule", "sgd", "--table.ngram.rule", "adagrad"]
STATE = ["--table.routed.rule", "momentum", "--table.ngram.rule", "factored", "--table.value.weight-decay", "0.1"]
FORMATS = ["--table.routed.format", "bf16+16", "--table.ngram.format", "fp8", "--table.value.format", "bf16"]
CONFIGS = {
    "all memories": ["local", *TINY, *TABLES, "--memories", "routed", "ngram", "value", "--cycle", "2"],
    "every state": ["local", *TINY, *TABLES[:2], *STATE, *FORMATS, "--memories", "routed", "ngram", "value"],
    "no memory": ["local-dense", *TINY],
    "plain": ["docs-plain", *TINY],
}
VOCAB = 300


def number(text: str) -> int:
    return int(text.replace(",", ""))


def nbytes(value) -> int:
    """Bytes of all tensors in nested dictionaries."""
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


@pytest.fixture(params=CONFIGS)
def built(request):
    config = parse(CONFIGS[request.param]).config
    return config, build(config, VOCAB, bos=0)


def test_the_table_of_tensors_holds_every_parameter_once(built):
    config, parts = built
    lines = [line.split() for line in tensors_of(parts.model, config.optim).splitlines()]
    assert lines[0] == ["tensor", "shape", "group", "tensors", "parameters"]
    told = {}
    for name, *size, label, count, total in lines[1:]:
        shape = tuple(int(one) for one in size if one != "x")
        first, _, last = (re.search(r"\d+-\d+", name) or re.search("^", name))[0].partition("-")
        names = (
            [name] if not last else [name.replace(f"{first}-{last}", str(n)) for n in range(int(first), int(last) + 1)]
        )
        assert len(names) == int(count) and number(total) == len(names) * torch.Size(shape).numel()
        told |= {one: (shape, label) for one in names}
    real = {
        name: (tuple(one.shape) if one.ndim else (1,), label_of(name, one, config.optim))
        for name, one in parts.model.named_parameters()
    }
    assert told == real
    # Blocks are alike, so they take as many lines as one of them.
    assert sum(line[0].startswith("blocks.0-2.") for line in lines) == len(list(parts.model.blocks[0].parameters()))


def test_bytes_are_those_of_the_real_parts(built):
    config, parts = built
    optimizers = build_optimizers(parts.model.named_parameters(), config.optim)
    for parameter in parts.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    counts = byte_counts(config, parts.model, parts.memories)
    assert list(counts) == ["dense", *parts.tables]
    dense = counts["dense"]
    assert dense.weights == nbytes(dict(parts.model.named_parameters())) and dense.working_set == 0
    assert dense.gradients == sum(parameter.grad.nbytes for parameter in parts.model.parameters())
    for optimizer in optimizers:
        optimizer.step()
    assert dense.state == sum(nbytes(optimizer.state_dict()["state"]) for optimizer in optimizers)
    for name, table in parts.tables.items():
        assert (counts[name].weights, counts[name].state) == (table.table_bytes(), table.state_bytes())
        weights, kinds = kept_bytes(config, name, parts.memories[name])
        assert kinds == table.bytes_by_kind() and weights == table.table_bytes()
        # What the stores hold, the columns of the rule factored aside.
        held = {key: store.nbytes for key, store in table.stores.items()}
        assert {key: size for key, size in kinds.items() if key != "columns"} == held


def test_the_table_of_tables_has_every_kind_of_bytes():
    config = parse(CONFIGS["every state"]).config
    parts = build(config, VOCAB, bos=0)
    shapes, kept = ([line.split() for line in text.splitlines()] for text in
                    tables_of(config, parts.memories).split("\n\n"))  # fmt: skip
    assert [line[0] for line in shapes] == [line[0] for line in kept] == ["table", *parts.tables]
    assert shapes[-1][-2:] == ["0.1", "retroactive"]
    assert [line[1:3] for line in kept[1:]] == [["bf16+16", "device"], ["fp8", "device"], ["bf16", "device"]]
    kinds = " ".join(kept[0][3:]).split("bytes of ")[1:]
    assert {"rows", "second", "moment", "columns", "last event"} < {kind.strip() for kind in kinds}
    for line, table in zip(kept[1:], parts.tables.values()):
        told = {kind.strip().replace(" ", "_"): number(cell) for kind, cell in zip(kinds, line[3:])}
        assert {kind: size for kind, size in told.items() if size} == table.bytes_by_kind()


def test_a_working_set_is_at_most_what_is_said():
    words = ["--steps", "6", "--memories", "routed", "ngram", "--cycle", "2", "--memory.ngram.rows", "99999"]
    config = parse(["local", *TINY, *words]).config
    parts = build(config, 8192, bos=0)
    # The largest cycle: two steps of the second stage, 8 rows of 16 tokens each.
    assert cycle_tokens(config) == 2 * 8 * 16
    counts = byte_counts(config, parts.model, parts.memories)
    # Ids that are all different.
    steps = [torch.arange(128).view(8, 16), 1000 + torch.arange(128).view(8, 16)]
    ids = [parts.row_ids(step) for step in steps]
    sets = {name: table.pull([step[name] for step in ids]) for name, table in parts.tables.items()}
    assert sets["routed"].rows.nbytes == counts["routed"].working_set == counts["routed"].gradients
    # Each micro-row begins without an n-gram, and few of the others collide.
    assert 0.8 * counts["ngram"].working_set < sets["ngram"].rows.nbytes <= counts["ngram"].working_set


def test_a_cycle_ends_with_its_stage_and_a_working_set_with_its_table():
    config = parse(["local", *TINY, "--cycle", "100"]).config
    # Five steps: the second stage has the last two or three, of 8 rows, and the first has 4 rows.
    assert cycle_tokens(config) == 2 * 8 * 16
    parts = build(config, 20, bos=0)
    counts = byte_counts(config, parts.model, parts.memories)
    assert counts["routed"].working_set == counts["routed"].weights


@pytest.mark.parametrize("steps", [1, 2, 7, 24, 31])
@pytest.mark.parametrize("cycle", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("late", [0, 1, 2, 7])
def test_the_longest_cycle_is_that_of_all(steps, cycle, late):
    flags = ["--cycle-late-from", "0.6"] if late else []
    words = ["--steps", str(steps), "--cycle", str(cycle), "--cycle-late", str(late), *flags]
    config = parse(["local", *TINY, *words]).config
    cadence, step, most = config.make_cadence(), 0, 0
    while step < steps:
        first, step = cadence.cycle(step)
        most = max(most, sum(cadence.schedule.at(one).rows * 16 for one in range(first, step)))
    assert cycle_tokens(config) == most


def test_the_text_is_ascii_and_its_sums_are_sums():
    text = describe(parse(CONFIGS["all memories"]).config)
    assert text.isascii() and max(map(len, text.splitlines())) <= 120
    lines = [line.split() for line in text.splitlines()]
    at = next(i for i, line in enumerate(lines) if line[:1] == ["bytes"])
    rows = [[number(cell) for cell in line[-4:]] for line in lines[at + 1 : at + 6]]
    assert [line[0] for line in lines[at + 1 : at + 6]] == ["dense", "table", "table", "table", "all"]
    assert rows[-1] == [sum(column) for column in zip(*rows[:-1])]


def test_counts_of_a_result(built):
    _, parts = built
    active, memory = parameter_counts(parts.model, parts.memories)
    specs = [one.spec for one in parts.tables.values()]
    assert memory == sum(one.rows * one.lanes * one.dim for one in specs)
    read = sum(part.reads * one.lanes * one.dim for part, one in zip(parts.memories.values(), specs))
    assert active == sum(one.numel() for one in parts.model.parameters()) + read


def test_gpt2_is_counted_without_its_files(monkeypatch):
    def fetched(_):
        raise AssertionError("the tokenizer was loaded")

    monkeypatch.setattr(mome.run, "load_tokenizer", fetched)
    for preset in ("docs", "docs-plain", "local"):
        assert f"vocabulary {GPT2_VOCAB if preset != 'local' else 8192:,}" in describe(parse([preset]).config)


def test_ranges():
    assert [ranges(one) for one in ([], [3], [0, 1, 2, 3], [0, 2], [0, 1, 3, 5, 6])] == [
        "",
        "3",
        "0-3",
        "0,2",
        "0-1,3,5-6",
    ]
