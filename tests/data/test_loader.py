"""The loader against a packer that walks the corpus token by token, and what it promises about position and ranks.

Here: data/loader.py. Not here: broken shard files (test_shards.py), the rows of a validation (test_validation_rows.py).
"""

from __future__ import annotations

import itertools
import json
import struct
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.loader import Batch, DataExhausted, RowPlan, permutation, take
from data.shards import Shard
from tests.data.packer import BOS, CORPORA, assert_equals_brute, load, same, spell, steady


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Makes shards of lists of ids, by struct alone; `vocab_size` goes to each Shard."""
    folder = tmp_path_factory.mktemp("shards")
    numbers = itertools.count()

    def make(*corpus, vocab_size=None):
        made = []
        for ids in corpus:
            path = folder / f"{next(numbers)}.bin"
            path.write_bytes(
                struct.pack("<3i", 20240520, 1, len(ids)) + b"\0" * 1012 + struct.pack(f"<{len(ids)}H", *ids)
            )
            made.append(Shard(path, vocab_size))
        return made

    return make


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize("tails", ["keep", "drop"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("rows, tokens, cap, chunk", [(1, 1, 1, 1), (3, 7, 5, 13), (4, 6, 64, 64), (2, 3, 2, 4)])
def test_equals_the_brute_force_packer(shards, name, tails, shuffle, rows, tokens, cap, chunk):
    corpus = CORPORA[name]
    made = shards(*corpus)
    plan = steady(rows, tokens, cap)
    steps = assert_equals_brute(made, corpus, plan, 40, shuffle=shuffle, chunk=chunk, tails=tails)
    assert steps == 40
    assert_equals_brute(made, corpus, plan, 400, shuffle=shuffle, chunk=chunk, tails=tails, on_exhausted="stop")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equals_the_brute_force_packer_on_random_corpora_and_plans(shards, data):
    one = st.tuples(st.integers(0, 6), st.lists(st.integers(1, 30), max_size=8)).filter(lambda x: x[0] or x[1])
    layout = data.draw(st.lists(one, min_size=1, max_size=4))
    corpus = [spell(*lengths, leading=leading, first=2 + 500 * i) for i, (leading, lengths) in enumerate(layout)]
    longest = min(12, sum(map(len, corpus)) - 1)
    if longest < 1:
        return
    stage = st.builds(RowPlan, st.integers(1, 4), st.integers(1, longest), st.integers(1, 12))
    stages = data.draw(st.lists(stage, min_size=1, max_size=3))

    def plan(step):
        return stages[min(step // 3, len(stages) - 1)]

    options = dict(
        seed=data.draw(st.integers(0, 2**63)),
        shuffle=data.draw(st.booleans()),
        chunk=data.draw(st.integers(max(s.document_cap for s in stages), 20)),
        tails=data.draw(st.sampled_from(["keep", "drop"])),
        on_exhausted=data.draw(st.sampled_from(["repeat", "stop"])),
    )
    assert_equals_brute(shards(*corpus), corpus, plan, 12, **options)


def changing(step):
    return [RowPlan(2, 5, 3), RowPlan(4, 9, 7), RowPlan(1, 16, 11), RowPlan(3, 2, 2)][min(step // 3, 3)]


@pytest.mark.parametrize("tails", ["keep", "drop"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_plan_that_changes_rows_tokens_and_cap(shards, tails, shuffle):
    corpus = CORPORA["several shards"] + CORPORA["leading pieces"]
    assert_equals_brute(shards(*corpus), corpus, changing, 30, shuffle=shuffle, chunk=11, tails=tails)


def test_by_hand_keep(shards):
    made = shards([BOS, 2, 3, 4, 5, BOS, 6, BOS, 7, 8])
    loader = load(made, steady(2, 3, 4), chunk=4, shuffle=False, on_exhausted="stop")
    batch = loader.next()
    # Units: [BOS 2 3 4] [5] [BOS 6] [BOS 7 8]; the first goes on in the second micro-row.
    assert batch.tokens.tolist() == [[BOS, 2, 3], [4, 5, BOS]]
    assert batch.targets.tolist() == [[2, 3, 4], [5, BOS, 6]]
    assert batch.docs.tolist() == [[0, 0, 0], [0, 1, 2]]
    with pytest.raises(DataExhausted, match=r"10 tokens\) ends before step 1 is full"):
        loader.next()


def test_by_hand_drop(shards):
    made = shards([BOS, 2, 3, 4, 5, BOS, 6, BOS, 7, 8, 9, BOS, 10])
    loader = load(made, steady(2, 4, 3), chunk=3, shuffle=False, tails="drop", on_exhausted="stop")
    batch = loader.next()
    # Units: [BOS 2 3] [BOS 6] fill the first micro-row with its last target; [BOS 7 8] [BOS 10] the second.
    assert batch.tokens.tolist() == [[BOS, 2, 3, BOS], [BOS, 7, 8, BOS]]
    assert batch.targets.tolist() == [[2, 3, BOS, 6], [7, 8, BOS, 10]]
    assert batch.docs.tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", CORPORA)
def test_keep_loses_no_token(shards, name, shuffle):
    """Inputs of whole epochs are the corpus, each token as often as there are epochs; targets are the stream's next."""
    corpus = CORPORA[name]
    total = sum(map(len, corpus))
    loader = load(shards(*corpus), changing if total > 17 else steady(3, 4, 2), chunk=11, shuffle=shuffle)
    stream, targets = [], []
    while len(stream) < 3 * total:
        batch = loader.next()
        stream += batch.tokens.flatten().tolist()
        targets += batch.targets.flatten().tolist()
    assert targets[:-1] == stream[1:]
    for epoch in range(3):
        assert Counter(stream[epoch * total : (epoch + 1) * total]) == Counter(itertools.chain(*corpus))


def test_shuffle_off_is_file_order(shards):
    corpus = CORPORA["several shards"]
    batch = load(shards(*corpus), steady(1, 140, 64), shuffle=False).next()
    assert batch.tokens[0].tolist() == list(itertools.chain(*corpus))[:140]


def test_shuffle_changes_with_seed_and_epoch_and_parts_a_long_document(shards):
    made = shards(spell(240))
    orders = []
    for seed in range(2):
        loader = load(made, steady(2, 120, 10), chunk=10, seed=seed)
        orders += [loader.next().tokens.flatten().tolist() for _ in range(2)]
    assert len(set(map(tuple, orders))) == 4
    for order in orders:
        starts = order[5::10]  # the sixth id of each chunk; chunks that follow each other in the document are 10 apart
        assert sum(b == a + 10 for a, b in itertools.pairwise(starts)) < 8
    again = load(made, steady(2, 120, 10), chunk=10, seed=1)
    assert again.next().tokens.flatten().tolist() == orders[2]


def test_permutation_is_fixed_and_depends_on_each_key():
    assert permutation(0, 0, 0, 8).tolist() == [7, 2, 0, 4, 3, 5, 6, 1]
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 256, 0), (2**40, 0, 0)]
    made = [permutation(*key, 100) for key in keys]
    assert len({tuple(p) for p in made}) == len(keys)
    for p in made:
        assert sorted(p) == list(range(100))
    assert permutation(0, 0, 0, 0).tolist() == [] and permutation(0, 0, 0, 1).tolist() == [0]


@pytest.mark.parametrize("tails", ["keep", "drop"])
def test_the_cap_changes_bounds_but_not_the_tokens_of_keep(shards, tails):
    made = shards(*CORPORA["several shards"])
    few, many = (load(made, steady(2, 9, cap), tails=tails) for cap in (2, 64))
    pairs = [(few.next(), many.next()) for _ in range(5)]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in pairs) == (tails == "keep")
    assert not all(torch.equal(a.docs, b.docs) for a, b in pairs)


# Look-ahead, state, ranks.


@pytest.mark.parametrize("tails", ["keep", "drop"])
def test_peek_is_next(shards, tails):
    made = shards(*CORPORA["several shards"])
    plain, ahead = (load(made, changing, tails=tails) for _ in range(2))
    for count in [0, 1, 3, 2, 7, 0, 5]:
        peeked = ahead.peek(count)
        assert len(peeked) == count
        again = ahead.peek(count)
        assert all(a is b for a, b in zip(peeked, again, strict=True))
        assert ahead.state() == plain.state()
        for batch in peeked[: max(1, count - 1)] or [None]:
            got = ahead.next()
            assert batch is None or got is batch
            assert same(got, plain.next())


@pytest.mark.parametrize("tails", ["keep", "drop"])
def test_peek_gives_fewer_where_the_data_stops(shards, tails):
    options = dict(tails=tails, on_exhausted="stop")
    made = shards(spell(*[5] * 12))
    whole = load(made, steady(2, 4, 5), **options)
    count = len(whole.peek(1000))
    assert 2 <= count < 1000
    loader = load(made, steady(2, 4, 5), **options)
    for left in range(count, -1, -1):
        peeked = loader.peek(1000)
        assert len(peeked) == left
        state = loader.state()
        if left:
            assert loader.next() is peeked[0] and same(peeked[0], whole.next())
    with pytest.raises(DataExhausted):
        loader.next()
    restored = load(made, steady(2, 4, 5), **options)
    restored.load_state(state)
    assert restored.peek(1) == []


@pytest.mark.parametrize("tails", ["keep", "drop"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("peeked", [0, 4])
def test_state_of_any_step_restores_the_same_batches(shards, tails, shuffle, peeked):
    made = shards(*CORPORA["several shards"], *CORPORA["shards shorter than a micro-row"])
    lines, lines_again = [], []
    loader = load(made, changing, chunk=11, tails=tails, shuffle=shuffle, log=lines.append)
    states, batches, logged = [], [], []
    for _ in range(40):
        loader.peek(peeked)
        states.append(json.dumps(loader.state()))
        logged.append(len(lines))
        batches.append(loader.next())
    assert len(lines) >= 2
    for step, state in enumerate(states):
        lines_again.clear()
        again = load(made, changing, chunk=11, tails=tails, shuffle=shuffle, log=lines_again.append)
        again.load_state(json.loads(state))
        assert json.dumps(again.state()) == state
        assert all(same(again.next(), batch) for batch in batches[step:])
        assert lines_again == lines[logged[step] :]
    # A loader that already looked ahead forgets what it held.
    loader.peek(3)
    loader.load_state(json.loads(states[7]))
    assert same(loader.next(), batches[7])


@pytest.mark.parametrize(
    "change",
    [
        {"shard": 4},
        {"shard": 3, "offset": 1},
        {"offset": 66},
        {"offset": -1},
        {"step": 1.5},
        {"corpus_tokens": 12},
        {"more": 1},
        {"epoch": None},
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(shards, change):
    made = shards(spell(20, 45), spell(65), spell(60, 5))
    loader = load(made, steady(2, 5, 64))
    loader.next()
    before, peeked = loader.state(), loader.peek(2)
    with pytest.raises(DataError) as caught:
        loader.load_state(before | change)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError):
        loader.load_state({})
    assert loader.state() == before and loader.next() is peeked[0]


def test_ranks_of_any_world_share_the_same_step(shards):
    batch = load(shards(*CORPORA["several shards"]), steady(12, 5, 9)).next()
    for world in (1, 2, 3, 4, 6, 12):
        parts = [take(batch, rank, world) for rank in range(world)]
        assert all(len(part.tokens) == 12 // world for part in parts)
        joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "targets", "docs"))
        assert same(Batch(batch.step, *joined), batch)
        assert all(part.step == batch.step for part in parts)


@pytest.mark.parametrize("world, words", [(5, "4 or 6"), (8, "6 or 12"), (13, "start 12"), (24, "start 12")])
def test_a_world_that_does_not_divide_is_refused_with_the_nearest(shards, world, words):
    batch = load(shards(*CORPORA["several shards"]), steady(12, 5, 9)).next()
    with pytest.raises(DataError, match=f"12 micro-rows .* {world} processes: start") as caught:
        take(batch, 0, world)
    assert str(caught.value).endswith(words)


# The end of the data, and bad arguments.


def test_each_new_epoch_is_one_line_in_the_step_that_begins_it(shards):
    lines = []
    loader = load(shards(spell(8, 4), spell(8)), steady(2, 5, 8), log=lines.append)
    seen = []
    for _ in range(5):
        loader.peek(4)
        loader.next()
        seen.append(len(lines))
    # 20 tokens, 10 a step: steps 0 and 1 use up the first epoch exactly.
    assert seen == [0, 0, 1, 1, 2]
    assert lines == [
        "training data (20 tokens) used up in step 2: epoch 2 begins",
        "training data (20 tokens) used up in step 4: epoch 3 begins",
    ]


def test_a_corpus_shorter_than_a_batch_repeats_within_it_or_stops(shards):
    made = shards(spell(9))
    lines = []
    batch = load(made, steady(4, 8, 9), shuffle=False, log=lines.append).next()
    assert batch.tokens.flatten().tolist() == (spell(9) * 4)[:32]
    assert lines == ["training data (9 tokens) used up in step 0: epoch 4 begins"]
    with pytest.raises(DataExhausted, match=r"\(9 tokens\) ends before step 0 is full"):
        load(made, steady(4, 8, 9), on_exhausted="stop").next()


@pytest.mark.parametrize("tails", ["keep", "drop"])
def test_a_corpus_shorter_than_a_micro_row_is_refused(shards, tails):
    with pytest.raises(DataError, match=r"16 tokens, a micro-row of step 0 needs 17"):
        load(shards(spell(8), spell(8)), steady(1, 16, 8), tails=tails)
    with pytest.raises(DataError, match="0 tokens"):
        load([], steady(1, 16, 8))
    longer = load(shards(spell(8), spell(8)), lambda step: RowPlan(1, 15 + step, 8), tails=tails)
    longer.next()
    with pytest.raises(DataError, match="of step 1 needs 17"):
        longer.next()


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(tails="trim"), "tails must be keep or drop, not 'trim'"),
        (dict(on_exhausted="loop"), "on_exhausted must be repeat or stop, not 'loop'"),
        (dict(seed=-1), "seed >= 0"),
        (dict(chunk=0), "chunk_tokens >= 1"),
        (dict(chunk=8), "document cap of step 0 is 9, chunk_tokens only 8"),
    ],
)
def test_bad_arguments_are_one_clear_line(shards, options, words):
    with pytest.raises(DataError) as caught:
        load(shards(spell(50)), steady(2, 5, 9), **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["rows", "tokens", "document_cap"])
def test_a_plan_of_nothing_is_refused(field):
    with pytest.raises(DataError, match=f"{field} >= 1, not 0"):
        RowPlan(**({"rows": 1, "tokens": 1, "document_cap": 1} | {field: 0}))


def test_an_id_outside_the_vocabulary_is_found_before_it_is_trained_on(shards):
    good, bad = shards(spell(20), vocab_size=40) + shards([*spell(10), 40], vocab_size=40)
    loader = load([good, bad], steady(1, 10, 9), shuffle=False)
    loader.next()
    for _ in range(2):
        with pytest.raises(DataError, match="token id 40 at position 10 "):
            loader.next()


def test_inputs_targets_and_shards_do_not_share_memory(shards):
    for tails in ("keep", "drop"):
        batch = load(shards(spell(40)), steady(2, 5, 9), tails=tails).next()
        before = batch.tokens.clone()
        batch.targets.fill_(-100)
        batch.docs.fill_(-1)
        assert torch.equal(batch.tokens, before)
        assert batch.tokens.is_contiguous() and batch.targets.is_contiguous()


def test_ids_up_to_the_last_of_uint16(shards):
    ids = [BOS, 65535, 32768, 65534]
    batch = load(shards(ids), steady(1, 3, 4), shuffle=False).next()
    assert batch.tokens.tolist() == [ids[:3]] and batch.targets.tolist() == [ids[1:]]
