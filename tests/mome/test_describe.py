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
from mome.describe import byte_counts, cycle_tokens, describe, parameter_counts, ranges, tensors_of
from mome.run import build
from optim.groups import build_optimizers, label_of

TINY = ["--model.layers", "3", "--model.width", "32", "--model.heads", "2", "--row-tokens", "16", "--steps", "5"]
TABLES = ["--memory.ngram.rows", "512", "--table.routed.rule", "sgd", "--table.ngram.rule", "adagrad"]
CONFIGS = {
    "all memories": ["local", *TINY, *TABLES, "--memories", "routed", "ngram", "value", "--cycle", "2"],
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


def test_a_working_set_is_at_most_what_is_said():
    config = parse(
        ["local", *TINY, "--memories", "routed", "ngram", "--cycle", "2", "--memory.ngram.rows", "99999"]
    ).config
    parts = build(config, 8192, bos=0)
    # The largest cycle: two steps of the second stage, 8 rows of 16 tokens each.
    assert cycle_tokens(config) == 2 * 8 * 16
    counts = byte_counts(config, parts.model, parts.memories)
    # Ids that are all different.
    steps = [torch.arange(128).view(8, 16), 1000 + torch.arange(128).view(8, 16)]
    sets = parts.pull([parts.row_ids(step) for step in steps], grad=True)
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
    rows = [one.store.rows_RLD for one in parts.tables.values()]
    assert memory == sum(one.numel() for one in rows)
    read = sum(part.reads * one[0].numel() for part, one in zip(parts.memories.values(), rows))
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
