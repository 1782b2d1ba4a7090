"""N processes train what one trains: weights, row state and metrics, for every memory, rule, cycle and placement.

Lives here: whole trainings (train_gpt.Training) on 1 to 4 ranks side by side; with MOME_MANY=1 on 3 and 8 too, longer.
Not here: one exchange on odd ids (test_exchange.py), dense parameters alone (test_dense.py), checkpoints
(test_resume.py).
"""

from __future__ import annotations

import os

import pytest
import torch

from mome.world import ORDER
from tests import tiny
from tests.dist.processes import start
from tests.dist.trainings import STEPS, assert_alike, make, outcome, train, whole_rows

MANY = bool(os.environ.get("MOME_MANY"))
LATE = ("--cycle", "2", "--cycle-late", "4", "--cycle-late-from", "0.4")

# Every memory, row rule, decay, cycle, placement and depth is in one of these, each beside others than before.
CASES = {
    "adam": (),
    "cycles": (*LATE, "--row-clip", "0.02", "--prefetch", "3", "--table.ngram.weight-decay", "0.1"),
    "late reads": ("--prefetch", "0", "--cycle", "4", "--table.routed.placement", "contiguous"),
    "adagrad": (
        "--memories", "value", "ngram", "--table.value.rule", "adagrad", "--table.ngram.rule", "sgd",
        "--table.ngram.placement", "contiguous", "--table.value.weight-decay", "0.1", "--table.value.decay", "gated",
    ),
    "factored": (
        "--table.ngram.rule", "factored", "--table.routed.rule", "momentum", "--table.routed.lr", "0.1",
        "--table.routed.placement", "balanced", "--cycle", "4", "--table.routed.weight-decay", "0.05",
    ),
    "file": ("--table.ngram.place", "file", "--table.ngram.placement", "balanced", "--cycle", "3"),
    "one owner": ("--memories", "ngram", "--memory.ngram.rows", "5", "--memory.ngram.orders", "2"),
    "adamw": ("--memories", "ngram", "--optim.kind", "adamw", "--table.ngram.beta2-by", "step", "--cycle", "2"),
    "no memory": (),
}  # fmt: skip


def trained(world, corpus, folder, case, steps, dtype):
    """What a training came to on this rank."""
    flags = CASES[case]
    if depth := os.environ.get("MOME_TEST_PREFETCH"):
        flags = (*flags, "--prefetch", depth)
    training = make(world, corpus, folder, flags, steps, dtype, memories=case != "no memory")
    world.calls = []
    metrics = train(training, steps)
    score = training.score(4)
    knocked = training.score(4, "shuffled_rows") if training.parts.tables else None
    found = outcome(training) | {
        "metrics": metrics, "score": (score, knocked), "tokens": training.own_tokens, "calls": world.calls,
        "ends": {training.cycles.cadence.cycle(step)[1] for step in range(steps)},
        "table_bytes": sum(table.table_bytes() for table in training.parts.tables.values()),
    }  # fmt: skip
    training.close()
    return found


def all_cases(world, corpus, folder, steps, dtype=torch.float64):
    return {case: trained(world, corpus, folder / case, case, steps, dtype) for case in CASES}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny.make_corpus(tmp_path_factory.mktemp("corpus"))


def alone_of(corpus, folder, steps, dtype=torch.float64):
    return start(all_cases, 1, corpus, folder, steps, dtype, timeout=900)[0]


def assert_equal(found, alone, size, tolerance):
    """Outcomes of all cases on some ranks, and of one process."""
    for case, one in alone.items():
        ranks = [rank[case] for rank in found]
        for rank in ranks:
            assert rank["metrics"] == ranks[0]["metrics"] and rank["score"] == ranks[0]["score"], case
            # Whoever calls something else hangs sooner or later.
            assert rank["calls"] == ranks[0]["calls"], case
        torch.testing.assert_close(
            torch.tensor(ranks[0]["metrics"]), torch.tensor(one["metrics"]), rtol=tolerance, atol=tolerance
        )
        for mine, theirs in zip(ranks[0]["score"], one["score"]):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.tokens == theirs.tokens
                assert abs(mine.val_loss - theirs.val_loss) < tolerance
                assert abs(mine.val_bpb - theirs.val_bpb) < tolerance
        assert_alike(ranks, [one], tolerance, case)
        # A share each: of the tokens exactly, of the tables to the rows that do not divide.
        assert [rank["tokens"] for rank in ranks] == [one["tokens"] // size] * size
        assert sum(rank["table_bytes"] for rank in ranks) >= one["table_bytes"]
        if case not in ("one owner", "no memory"):
            # Balanced loads are not balanced rows.
            most = 2.0 if "balanced" in CASES[case] else 1.3
            assert max(rank["table_bytes"] for rank in ranks) < most * one["table_bytes"] / size, case


def assert_in_order(calls, cycle_ends):
    """Collectives come in the order of ORDER from the second step on, those of rows in a cycle's first and last one."""
    names, step, steps = [name for name, _, _ in ORDER], -1, []
    for name in calls:
        if name == "step":
            steps.append([])
        elif name in names:
            steps[-1].append(name)
    for step, called in enumerate(steps[1:], start=2):
        places = [names.index(name) for name in called]
        assert places == sorted(places), (step, called)
        last, first = step in cycle_ends, step - 1 in cycle_ends
        assert ("row gradients" in called) == last
        assert "row counts" not in called or first
        assert called.count("step sums") == 1 and {"dense gradients", "dense weights"} <= set(called)
        assert ("rows" in called) == (last and step < len(steps))


def test_ranks_train_what_one_process_trains(corpus, tmp_path):
    alone = alone_of(corpus, tmp_path / "1", STEPS)
    for size in (2, 4):
        found = start(all_cases, size, corpus, tmp_path / str(size), STEPS, timeout=600)
        assert_equal(found, alone, size, 1e-10)
        for case in ("adam", "cycles"):
            assert_in_order(found[0][case]["calls"], found[0][case]["ends"])
        assert found[0]["cycles"]["ends"] == {2, 4, 5, 6, 9, 12}


def deviation(one, other):
    """How far two outcomes of one process are apart, at most."""
    pairs = [(torch.tensor(one["metrics"]), torch.tensor(other["metrics"]))]
    pairs += [(weight, other["weights"][name]) for name, weight in one["weights"].items()]
    for name, (_, planes) in one["rows"].items():
        pairs += [(plane, other["rows"][name][1][key]) for key, plane in planes.items()]
    return max(float((mine.double() - theirs.double()).abs().max()) for mine, theirs in pairs)


@pytest.mark.skipif(not MANY, reason="minutes on two cores: MOME_MANY=1 runs it")
def test_many_ranks_and_more_steps(corpus, tmp_path):
    """After 60 steps the order of sums shows in one process too, in rows of high learning rates and small gradients: more
    than 1e-10 apart only where passes of 4 micro-rows in place of 3 part one process by as much."""
    alone = alone_of(corpus, tmp_path / "1", 60)
    other = start(all_cases, 1, corpus, tmp_path / "other", 60, timeout=900, env={"MOME_TEST_MICRO": "4"})[0]
    spread = {case: max(1e-10, 10 * deviation(alone[case], other[case])) for case in CASES}
    print({case: deviation(alone[case], other[case]) for case in CASES})
    for size in (2, 3, 4, 8):
        found = start(all_cases, size, corpus, tmp_path / str(size), 60, timeout=1800)
        for case in CASES:
            assert_equal([{case: rank[case]} for rank in found], {case: alone[case]}, size, spread[case])


def errors(found, truth):
    """How far a float32 outcome is from the float64 one: the largest deviation of each tensor, by name."""
    off = {"metrics": (torch.tensor(found["metrics"]) - torch.tensor(truth["metrics"])).abs().max()}
    off |= {name: (w.double() - truth["weights"][name]).abs().max() for name, w in found["weights"].items()}
    return off


def test_float32_errs_as_one_process_does_and_neither_repeats_nor_depth_change_a_bit(corpus, tmp_path):
    steps = 3
    one, again = (start(all_cases, 2, corpus, tmp_path / name, steps, torch.float32, timeout=600, env=env)
                  for name, env in (("one", {}), ("again", {"MOME_TEST_PREFETCH": "2"})))  # fmt: skip
    alone = alone_of(corpus, tmp_path / "alone", steps, torch.float32)
    truth = alone_of(corpus, tmp_path / "truth", steps)
    for mine, theirs in zip(one, again):
        for case in CASES:
            assert mine[case]["metrics"] == theirs[case]["metrics"], case
            assert all(torch.equal(w, theirs[case]["weights"][n]) for n, w in mine[case]["weights"].items())
            for name, (_, planes) in mine[case]["rows"].items():
                assert all(torch.equal(x, theirs[case]["rows"][name][1][key]) for key, x in planes.items())
    for case in CASES:
        two, single = errors(one[0][case], truth[case]), errors(alone[case], truth[case])
        for name, off in two.items():
            # Orthogonalization makes much of little: a hundredth of a step of a matrix.
            assert off <= 4 * single[name] + 2e-4, (case, name, off, single[name])
        for name in truth[case]["rows"]:
            exact = whole_rows([truth[case]], name)["rows"]
            off, naive = (
                (whole_rows(ranks, name)["rows"].double() - exact).abs().max()
                for ranks in ([rank[case] for rank in one], [alone[case]])
            )
            assert off <= 4 * naive + 2e-4, (case, name, off, naive)
