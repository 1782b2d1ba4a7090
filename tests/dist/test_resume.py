"""Saved on N ranks in the middle of a cycle, gone on with on M: what never stopping would have come to.

Lives here: whole trainings through Training.save and load. Not here: the files (test_checkpoint.py, tests/mome/).
"""

from __future__ import annotations

import os

import pytest
import torch

from mome.checkpoint import Checkpoint, newest
from mome.launch import silent
from mome.saving import Saver
from tests import tiny
from tests.dist.processes import start
from tests.dist.trainings import STEPS, assert_alike, make, outcome, train

SIZES = (1, 2, 3, 4) if os.environ.get("MOME_MANY") else (1, 2, 3)
# The runs are shared: one worker runs all that looks at them.
pytestmark = pytest.mark.xdist_group("dist_resume")
# The save comes at step 5, in mid-cycle; one before it makes its tables two deltas.
FLAGS = (
    "--memories", "routed", "ngram", "value", "--cycle", "4", "--table.ngram.rule", "factored",
    "--table.value.rule", "momentum", "--table.value.lr", "0.1", "--table.routed.weight-decay", "0.05",
    "--table.value.placement", "contiguous", "--table.ngram.place", "file",
)  # fmt: skip
FIRST, STOP = 4, 5


def folder_of(base, size):
    return base / f"saved_by_{size}"


def saved(world, corpus, base):
    """Train, save twice, and go on to the end: metrics after the save, and the outcome."""
    training = make(world, corpus, base / f"first_{world.size}", FLAGS)
    training.saver = Saver(folder_of(base, world.size), world)
    train(training, FIRST)
    training.save(last=False)
    train(training, STOP)
    training.save(last=True)
    metrics = train(training, STEPS)
    found = outcome(training)
    training.close()
    return metrics, found


def gone_on(world, corpus, base):
    """Load what every number of ranks has saved, and train to the end."""
    found = {}
    for size in SIZES:
        folder = folder_of(base, size)
        training = make(world, corpus, base / f"from_{size}_on_{world.size}", FLAGS)
        training.load(Checkpoint(newest(folder, silent, world)))
        assert training.step == STOP and training.cycle.start == FIRST
        metrics = train(training, STEPS)
        found[size] = metrics, outcome(training)
        training.close()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By number of ranks: what never stopping came to; and by (saved on, gone on with on): what that came to."""
    base = tmp_path_factory.mktemp("resume")
    corpus = tiny.make_corpus(base)
    never = {size: start(saved, size, corpus, base, timeout=300) for size in SIZES}
    after = {}
    for size in SIZES:
        ranks = start(gone_on, size, corpus, base, timeout=300)
        after |= {(before, size): [rank[before] for rank in ranks] for before in SIZES}
    return never, after


@pytest.mark.parametrize("size", SIZES)
def test_on_as_many_ranks_it_is_bit_for_bit_what_never_stopping_gives(runs, size):
    never, after = runs
    for (metrics, one), (expected_metrics, expected) in zip(after[size, size], never[size]):
        assert metrics == expected_metrics
        assert all(torch.equal(weight, expected["weights"][name]) for name, weight in one["weights"].items())
        for name, (ids, planes) in one["rows"].items():
            assert torch.equal(ids, expected["rows"][name][0])
            assert all(torch.equal(plane, expected["rows"][name][1][key]) for key, plane in planes.items())


@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("size", SIZES)
def test_on_any_other_number_it_is_equal_up_to_the_order_of_sums(runs, before, size):
    never, after = runs
    metrics, expected = (torch.tensor(one[0][0]) for one in (after[before, size], never[1]))
    torch.testing.assert_close(metrics, expected, rtol=1e-10, atol=1e-10)
    assert_alike([one for _, one in after[before, size]], [one for _, one in never[1]], 1e-10, (before, size))
