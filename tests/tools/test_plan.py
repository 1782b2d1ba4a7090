"""python -m mome plan: published figures come out, memory is that of tables and optimizers, and what it says holds.

Lives here: memory against a table's and an optimizer's, what does not fit, the figures of the record's table and of a
released dense path, the command on a tiny corpus.
Not here: the rows that are sent (test_plan_traffic.py), and whether predicted times come true: nothing measures any.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mome.__main__ import main
from mome.dense import MOST_PADDED, DenseOptimizers, share_out
from mome.errors import UserError
from mome.run import build_model
from mome.table.placement import KINDS, Placement
from mome.table.rows import RowTable
from mome.tools.plan import options_of
from mome.tools.plan.clock import orthogonal_flops, step_of
from mome.tools.plan.counted import dense_exchange, make_plan
from mome.tools.plan.links import Node
from mome.tools.plan.memory import TableUse, dense_memory, holding, meta_model, table_memory, updated_bytes
from mome.tools.plan.ranks import lines_of
from mome.tools.plan.stream import Shape, heaviest_cycle, make_memories, open_tokens
from mome.tools.plan.traffic import Wire
from mome.world import ORDER, World
from tests import tiny

# The record's table (modded-nanogpt, pull request 360): 84,602,880 rows x 768 in bf16, 49,152 tokens a rank and step.
RECORD = (
    "--memories ngram --memory.ngram.rows 42301440 --model.width 768 --model.layers 12 --model.heads 6 "
    "--model.max-tokens 2048 --row-tokens 2048 --schedule.stages.0.rows 192 --table.ngram.format bf16 "
    "--table.ngram.wire bf16 --cycle 4"
).split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    """The flags that name a tiny corpus: its tokenizer, its training and its validation shards."""
    return tiny.make_corpus(tmp_path_factory.mktemp("corpus"))


def asked(corpus, *words: str):
    """Options of the plan of a small model on the tiny corpus, and its tokens."""
    options = options_of(tiny_words(corpus, *words))
    return options, open_tokens(options.config, options.tokens_from)


def tiny_words(corpus, *words: str) -> list[str]:
    small = ["--row-tokens", "32", "--steps", "12", "--model.layers", "2", "--model.width", "32", "--model.heads", "2"]
    rows = [] if "--memories" in words else ["--memory.ngram.rows", "512"]
    return ["local", *corpus, *small, *rows, *words]


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["fp32", "bf16", "bf16+16", "fp8"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_and_state_are_those_of_the_table(corpus, format, size):
    options, tokens = asked(corpus, "--table.ngram.format", format)
    memory = make_memories(options.config, tokens.tokenizer)["ngram"]
    held = []
    placement = Placement(memory.spec.rows, size, "cyclic")
    for rank in range(size):
        rule = options.config.table.ngram.row_rule()
        table = RowTable(memory.spec, rule, seed=0, format=format, placement=placement, rank=rank)
        held.append((table.table_bytes(), table.state_bytes()))
    use = TableUse(0, 0, 0, 0, placement.rows_of(0))
    found = table_memory(options.config, "ngram", memory, use, size, 0)
    state = sum(bytes for kind, bytes in found.items() if kind.startswith("table state"))
    assert (found["table rows"], state) == max(held)
    assert found["working set"] == 0


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_state_of_the_dense_parameters_is_that_of_the_optimizers(corpus, kind):
    config = replace(asked(corpus)[0].config, optim=replace(asked(corpus)[0].config.optim, kind=kind))
    model, _ = build_model(config, 300, 0)
    held = dense_memory(config, model, 1)
    real = DenseOptimizers(model.named_parameters(), config.optim, World()).state_dict()
    assert held["dense optimizer state"] == sum(one.nbytes for one in real.values())
    assert held["dense weights"] == sum(one.nbytes for one in model.parameters()) and held["dense buffers"] == 0
    # So small a model is all replicated at 64 ranks.
    model, _ = meta_model(config, 300)
    alone, two, many = (dense_memory(config, model, size)["dense optimizer state"] for size in (1, 2, 64))
    assert alone == held["dense optimizer state"] and 0.4 * alone < two < 0.7 * alone
    assert many == alone


def test_what_every_rank_updates_is_each_ranks_work(corpus):
    config = asked(corpus)[0].config
    model, _ = meta_model(config, 300)
    weights = sum(one.nbytes for one in model.parameters())
    flops = orthogonal_flops(config, model, 1)
    paddings = {}
    for size in (1, 2, 3, 4, 8, 64):
        shares = share_out(model.named_parameters(), config.optim, size)
        each = [share for label in shares.values() for share in label.values()]
        for rank, (own, _) in enumerate(updated_bytes(config, model, size)):
            held = 4 * sum(len(share.owned(rank)) for share in each)
            # A sliced parameter's last parts may be shorter than counted.
            assert held <= own <= held + 4 * size * len(each)
        paddings[size], replicated = dense_exchange(config, model, size)
        assert 1 <= paddings[size] <= MOST_PADDED and 0 <= 4 * replicated <= weights
        assert flops / size <= orthogonal_flops(config, model, size) <= flops
    assert updated_bytes(config, model, 64) == updated_bytes(config, model, 1) * 64
    # All is replicated: no padding, but a flag a parameter, and the work of one rank on each.
    assert (pytest.approx(1, abs=0.01), weights // 4) == dense_exchange(config, model, 64)
    assert orthogonal_flops(config, model, 64) == flops
    assert paddings[1] == 1 and updated_bytes(config, model, 1)[0][0] == weights
    assert orthogonal_flops(config, model, 2) < 0.75 * flops


def test_what_does_not_fit_says_what_would(corpus):
    options, tokens = asked(corpus, "--memory.ngram.rows", "2000000000", "--memory.ngram.hash", "mix")
    plan = make_plan(options.config, tokens, 2, cycles=1, say=lambda line: None)
    lines = {line.split(":")[0].split(" (")[0]: line for line in plan.verdict}
    assert lines["does not fit"].startswith("does not fit: 272 GB a GPU, 196 GB more than the 76 GB there are")
    assert lines["fp8 rows"].endswith("still too much") and "rows in files" in lines
    # 4e9 rows of 136 bytes over two GPUs and 76 GB of each.
    assert lines["fewer rows"] == "fewer rows: 1/4 of them fit, if a cycle touches as many"
    assert "8 GPUs would fit, with as many tokens each" in plan.verdict
    assert lines["rows in host memory"].endswith("still too much") and lines["rows in files"].endswith("fits")
    for rows, fits in (("500000000", True), ("1000000000", False)):
        other, _ = asked(corpus, "--memory.ngram.rows", rows, "--memory.ngram.hash", "mix")
        assert make_plan(other.config, tokens, 2, cycles=1, say=print).memory.fits(Node()) == fits
        assert make_plan(other.config, tokens, 8, cycles=1, say=print).verdict == ["fits"]


def test_rows_placed_elsewhere_are_not_on_the_gpu(corpus):
    for place in ("host", "file"):
        options, tokens = asked(corpus, "--table.ngram.place", place)
        memories = make_memories(options.config, tokens.tokenizer)
        model, use = meta_model(options.config, 300)[0], TableUse(9, 5, 9, 9, 512)
        rest = {"rank_tokens": 32, "pass_tokens": 32, "vocab_size": 300}
        held = holding(options.config, model, memories, dict.fromkeys(memories, use), 2, **rest)
        away, not_here = (held.host, held.file) if place == "host" else (held.file, held.host)
        assert away["table rows"] == 512 * 32 * 4 and not not_here and held.gpu["table rows"] > 0


def test_the_cycle_with_the_most_tokens_is_planned(corpus):
    config = asked(corpus, "--cycle", "4")[0].config
    now, steps = heaviest_cycle(config)
    assert (now.rows, steps) == (8, 4)
    assert heaviest_cycle(replace(config, cycle=1, cycle_late=3))[1] == 3


# Published figures ---------------------------------------------------------------------------------------------------


def test_the_records_table_comes_out_as_published(corpus):
    options = options_of(["local", *corpus, *RECORD])
    tokens = open_tokens(options.config, options.tokens_from)
    plan = make_plan(options.config, tokens, 8, cycles=1, most_tokens=1 << 14, say=lambda line: None)
    table, gpu = plan.tables["ngram"], plan.memory.gpu
    assert (table.rows, table.use.owns) == (84_602_880, 10_575_360)
    # 16.2 GB of rows and 42 + 42 MB of state a rank.
    assert gpu["table rows"] == 10_575_360 * 1536 == 16_243_752_960
    assert gpu["table state, second"] == gpu["table state, last event"] == 42_301_440
    # A rank's rows of an event: 2 orders x 4 steps x 49,152 tokens at most, 0.8 GB at most each way.
    assert table.capacity == 2 * 4 * 49_152 and table.capacity * table.wire.row <= 0.8e9
    assert table.wire == Wire(4, 1536, 1536) and plan.shape.rank_tokens == 4 * 49_152
    # The cache that the record allocates, 528,384 rows, is that of 65,536 tokens a rank and step, and a page of 4,096.
    assert 528_384 == 2 * 4 * 65_536 + 4096 and 528_384 * table.wire.row == 774 * 2**20
    assert plan.verdict == ["fits"]


def test_the_released_dense_path_beside_a_four_to_one_table(corpus):
    words = (
        "--memories routed --model.layers 20 --model.width 2048 --model.heads 16 --memory.routed.slots 62 "
        "--memory.routed.top-k 2 --model.max-tokens 2048 --row-tokens 32"
    )
    options = options_of(["local", *corpus, *words.split()])
    tokens = open_tokens(options.config, options.tokens_from)
    plan = make_plan(options.config, tokens, 8, cycles=1, most_tokens=1 << 12, say=lambda line: None)
    memory = make_memories(options.config, tokens.tokenizer)["routed"]
    numbers = memory.spec.rows * memory.spec.lanes * memory.spec.dim
    bf16, fp32, ours = plan.tables["routed"].schemes
    for one, wide in ((bf16, 2), (fp32, 4)):
        assert (one.weights, one.gradients, one.traffic) == (wide * numbers, wide * numbers, 2 * wide * numbers)
        assert one.state == 2 * wide * numbers // 8
    # 4 P / ranks of rows, and of state a number a lane and the last event of a row.
    rows = -(-memory.spec.rows // 8)
    assert ours.weights == rows * memory.spec.lanes * memory.spec.dim * 4
    assert ours.state == rows * (memory.spec.lanes + 1) * 4
    assert ours.traffic < bf16.traffic and ours.gradients < fp32.gradients


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_order_and_writes_both_files(corpus, tmp_path, capsys):
    paths = tmp_path / "deep" / "plan.json", tmp_path / "plan.md"
    words = [*tiny_words(corpus), "--gpus", "4", "--json", str(paths[0]), "--markdown", str(paths[1])]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    kept = json.loads(paths[0].read_text())
    page = paths[1].read_text()
    for name, _, what in ORDER:
        assert name in out and what in page and name in kept["sent"]
    assert {"memory", "tables", "step", "verdict", "config", "node"} <= set(kept)
    assert kept["size"] == kept["counted"] == 4 and set(kept["tables"]) == {"routed", "ngram"}
    assert sum(kept["memory"]["gpu"].values()) > 0 and kept["step"]["behind"] <= kept["step"]["apart"]
    sent = sum(table["mean_sent"] for table in kept["tables"].values())
    names = ("row counts", "row ids", "row gradients", "rows")
    assert sum(kept["sent"][name] for name in names) > 0 and sent > 0
    # The folders of a machine are nobody else's business.
    assert str(tmp_path) not in page and "python -m mome plan local" in page


def test_many_ranks(corpus, tmp_path, capsys):
    path = tmp_path / "ranks.json"
    words = [*tiny_words(corpus), "--ranks", "1", "2", "4", "--rank-rows", "2", "--json", str(path)]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "64 tokens a rank and cycle" in out and "Replicas of the hottest rows" in out
    kept = json.loads(path.read_text())
    assert [(line["ranks"], line["table"]) for line in kept["lines"][:3]] == [
        (1, "routed"),
        (1, "ngram"),
        (2, "routed"),
    ]
    for line in kept["lines"]:
        assert set(line["serves"]) == set(KINDS) and line["counted"] == line["ranks"]
        assert all(load >= 1 for load in line["serves"].values())
        assert (line["sparse"] == 0) == (line["ranks"] == 1) and line["busiest"] >= line["sparse"]


def test_a_cycle_that_is_too_long_is_counted_over_its_first_ranks(corpus):
    options, tokens = asked(corpus)
    memories = make_memories(options.config, tokens.tokenizer)
    (routed, ngram) = lines_of(
        options.config, tokens, memories, Shape(1, 2, 32, 512), [16], cycles=1, most_tokens=256, node=Node(), say=print
    )
    assert routed.counted == ngram.counted == 4 and routed.sparse > 0
    plan = make_plan(options.config, tokens, 16, rank_rows=2, cycles=1, most_tokens=256, say=lambda line: None)
    table = plan.tables["ngram"]
    assert plan.counted == 4 and table.fitted == (16 * 64 > table.growth.lengths_K[-1])
    assert table.use.touches <= table.use.owns and table.touched > 0
    long = make_plan(options.config, tokens, 1024, rank_rows=2, cycles=1, most_tokens=256, say=lambda line: None)
    assert long.tables["ngram"].fitted and long.tables["ngram"].touched <= 1024


def test_one_gpu_and_no_memory(corpus):
    options, tokens = asked(corpus)
    alone = make_plan(options.config, tokens, 1, cycles=1, say=print)
    assert not any(alone.sent.values()) and not sum(alone.step.links.values())
    dense = replace(options.config, memories=())
    plan = make_plan(dense, tokens, 4, cycles=1, say=print)
    assert not plan.tables and plan.sent["dense gradients"] > 0 and plan.sent["rows"] == 0
    numbers = alone.memory.gpu["dense weights"] // 4
    assert (alone.padding, alone.replicated) == (1, numbers) and 1 <= plan.padding < 1.5
    assert 0 < plan.replicated < numbers
    shape, model = plan.shape, meta_model(dense, 300)[0]
    seconds = step_of(dense, model, {}, {}, {}, {}, 4, shape, (128, 256), 300, Node())
    assert seconds.apart == plan.step.apart or plan.now.windows != (128, 256)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["locla"], "locla: no such preset (did you mean local?)"),
        (["docs"], "give some with --tokens-from"),
        (["local", "--tokens-from", "x_*.bin"], "name its tokenizer too"),
        (["local", "--gpus", "0"], "--gpus 0: give 1 or more"),
        (["local", "--ranks", "2", "0"], "--ranks 0: give numbers of 1 or more"),
        (["local", "--rank-rows", "-1"], "--rank-rows -1: give 0 or more"),
        (["local", "--table.value.lr", "1"], "the memory value is off"),
        (["local", "--gpsu", "8"], "did you mean --gpus"),
        (["local-dense", "--ranks", "2"], "has no memory, and so no rows to send"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys, monkeypatch, corpus):
    monkeypatch.setattr("mome.tools.plan.open_tokens", open_tokens if "docs" in words or "x_*.bin" in words else none)
    assert main(["plan", *words]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def none(config, globs):
    """No corpus is built for a mistake."""


def test_a_missing_corpus_is_a_user_error(corpus):
    with pytest.raises(UserError, match="tokens-from"):
        open_tokens(options_of(["docs"]).config, ())
