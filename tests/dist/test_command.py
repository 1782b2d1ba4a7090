"""The command itself on several processes: its folder and result, stops and resumptions, and what it refuses.

Lives here: train_gpt.main as torchrun would start it. Not here: torchrun, and dead peers (test_watchdog.py).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import time

import pytest
import torch

import train_gpt
from mome.__main__ import main as mome
from mome.checkpoint import whole_checkpoints
from tests import tiny
from tests.dist.processes import launch, start

# The runs are shared: one worker runs all that looks at them.
pytestmark = pytest.mark.xdist_group("dist_command")
FLAGS = ("--cycle", "2", "--save-every", "4", "--val-every", "6", "--table.ngram.weight-decay", "0.1")


def command(words):
    """Exit status, stdout and stderr of one rank."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = train_gpt.main(words)
    return status, out.getvalue(), err.getvalue()


def rank_command(words):
    """The same with the words of this rank, where they are given by rank."""
    return command(words[int(os.environ["RANK"])] if isinstance(words[0], list) else words)


def on(size, words, **named):
    """What each of `size` ranks came to."""
    return start(rank_command, size, words, join=False, **named)


def exits(words):
    """The command as a process ends with it."""
    raise SystemExit(train_gpt.main(words))


def stopping(words, step):
    """The same; the last rank alone is asked to stop, during that step."""
    timed = train_gpt.timed_step

    def step_and_signal(training, *args):
        if training.step + 1 == step and training.world.rank == training.world.size - 1:
            signal.raise_signal(signal.SIGTERM)
        return timed(training, *args)

    train_gpt.timed_step = step_and_signal
    return command(words)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A whole run on 1, 2 and 4 ranks, by number: (folder, what each rank printed)."""
    found = {}
    for size in (1, 2, 4):
        folder = tmp_path_factory.mktemp(f"runs_{size}")
        ranks = on(size, tiny.tiny_flags(corpus, folder, *FLAGS))
        assert [status for status, _, _ in ranks] == [0] * size, ranks
        found[size] = tiny.only_run(folder), ranks
    return found


def numbers(folder):
    """The metrics as a tensor; of bytes sent nothing, which one process does not do."""
    names = ("step", "loss", "grad_norm", "row_grad_norm", "lr", "tokens", "rows_touched", "val_loss", "val_bpb")
    return torch.tensor([[line.get(name, 0.0) for name in names] for line in tiny.metrics(folder)])


def test_one_rank_speaks_and_the_folder_is_that_of_one_process(runs):
    for size, (folder, ranks) in runs.items():
        assert ranks[0][1].count("report.html") == 1 and all(out == "" for _, out, _ in ranks[1:])
        assert all(err == "" for _, _, err in ranks)
        assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in runs[1][0].iterdir())
        result = json.loads((folder / "result.json").read_text())
        assert result["world"] == size
        assert result["rank_tokens"] == [result["tokens"] // size] * size
        assert len(result["rank_table_bytes"]) == len(result["rank_bytes_sent"]) == size
        assert (min(result["rank_bytes_sent"]) > 0) == (size > 1)
        assert (folder / "sample.txt").read_text().strip()
        assert [path.name for path in whole_checkpoints(folder / "checkpoint")] == ["step_000008", "step_000012"]
        assert mome(["ckpt", "verify", str(folder)]) == 0
        for name in ("rows_touched", "tokens"):
            assert [line[name] for line in tiny.metrics(folder)] == [line[name] for line in tiny.metrics(runs[1][0])]
    tables = {size: json.loads((runs[size][0] / "result.json").read_text())["rank_table_bytes"] for size in runs}
    assert all(max(tables[size]) < 1.1 * tables[1][0] / size for size in runs)


def test_metrics_are_those_of_one_process_up_to_the_order_of_sums(runs):
    for size in (2, 4):
        torch.testing.assert_close(numbers(runs[size][0]), numbers(runs[1][0]), rtol=2e-3, atol=1e-4)
        sent = [line["bytes_sent"] for line in tiny.metrics(runs[size][0])]
        assert min(sent) > 0 and [line["bytes_sent"] for line in tiny.metrics(runs[1][0])] == [0] * 12


def test_one_rank_is_asked_to_stop_and_all_stop_save_and_go_on_bit_for_bit(runs, corpus, tmp_path):
    """In mid-cycle, and a step later: the ranks agree in the sums of the step after the one that was disturbed."""
    words = tiny.tiny_flags(corpus, tmp_path, *FLAGS)
    ranks = start(stopping, 2, words, 4, join=False)
    assert [status for status, _, _ in ranks] == [128 + signal.SIGTERM] * 2, ranks
    folder = tiny.only_run(tmp_path)
    assert len(tiny.metrics(folder)) == 5 and "stopped after step 5" in ranks[0][1]
    assert [status for status, _, _ in on(2, ["--resume", str(folder)])] == [0, 0]
    assert torch.equal(numbers(folder), numbers(runs[2][0]))


def test_a_run_goes_on_with_more_ranks_and_with_one(runs, corpus, tmp_path):
    words = tiny.tiny_flags(corpus, tmp_path, *FLAGS)
    start(stopping, 2, words, 3, join=False)
    folder = tiny.only_run(tmp_path)
    for size in (4, 1):
        ranks = start(stopping, size, ["--resume", str(folder)], 7 if size == 4 else 99, join=False)
        assert {status for status, _, _ in ranks} == ({128 + signal.SIGTERM} if size == 4 else {0}), ranks
        if size == 4:
            assert "not as at the start of this run" in ranks[0][1] and "world 2 -> 4" in ranks[0][1]
    torch.testing.assert_close(numbers(folder), numbers(runs[1][0]), rtol=2e-3, atol=1e-4)


def attempt(number):
    """What torchrun sets for an attempt of a job."""
    return {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(number)}


def test_a_restart_goes_on_in_the_folder_of_its_job_and_leaves_a_result_and_a_stop_alone(corpus, tmp_path):
    words = tiny.tiny_flags(corpus, tmp_path, *FLAGS)
    ranks = start(poisoned, 2, words, "gradient", join=False, env=attempt(0))
    assert [status for status, _, _ in ranks] == [1, 1]
    folder = tiny.only_run(tmp_path)
    # Of another job by the same name there is nothing to go on with.
    other = on(2, [*words, "--seed", "9", "--steps", "2"], env=attempt(1))
    assert [status for status, _, _ in other] == [0, 0] and len(list(tmp_path.glob("*_local*"))) == 2
    ranks = on(2, words, env=attempt(1))
    assert [status for status, _, _ in ranks] == [0, 0] and f"going on with {folder} after step" in ranks[0][1]
    again = on(2, words, env=attempt(2))
    assert [status for status, _, _ in again] == [0, 0] and "has come to its result" in again[0][1]
    start(stopping, 2, [*words, "--seed", "3"], 3, join=False, env=attempt(0))
    assert "stopped on request" in refused(2, [*words, "--seed", "3"], env=attempt(1))
    assert len(list(tmp_path.glob("*_local*"))) == 3


def refused(size, words, **named):
    """The one line on stderr of all ranks together."""
    ranks = on(size, words, **named)
    assert {status for status, _, _ in ranks} == {1}, ranks
    lines = [line for _, _, err in ranks for line in err.splitlines()]
    assert len(lines) == 1, lines
    return lines[0]


def test_a_number_of_ranks_that_cannot_share_the_rows_is_refused_with_those_that_can(corpus, tmp_path):
    err = refused(3, tiny.tiny_flags(corpus, tmp_path))
    assert "4 micro-rows a step cannot be shared out evenly to 3 processes: --nproc_per_node=2 or 4" in err
    assert not list(tmp_path.iterdir())


def test_ranks_that_disagree_say_on_what_and_do_not_start(corpus, tmp_path):
    words = tiny.tiny_flags(corpus, tmp_path)
    err = refused(2, [words, [*words, "--seed", "1", "--memory.ngram.rows", "600", "--paranoid", "3"]])
    assert "--seed on rank 1 (1 instead of 0 on rank 0)" in err and "--memory.ngram.rows on rank 1" in err
    # Who alone compares weights leaves the others waiting.
    assert "--paranoid on rank 1" in err
    assert "--model.width" not in err and not list(tmp_path.iterdir())


def test_a_word_that_no_rank_knows_is_said_once(corpus, tmp_path):
    assert "did you mean" in refused(2, ["locl"])


def poisoned(words, where):
    """One rank's weights, or gradient, are damaged in step 3."""
    step = train_gpt.Training.train_step

    def damaged(training, *args):
        sums = step(training, *args)
        if training.step == 3 and training.world.rank == 1 and where == "weight":
            with torch.no_grad():
                training.parts.model.blocks[0].up[3, 5] += 1e-6
        return sums

    squares = train_gpt.Training.gradient_squares

    def measured(training, last):
        found = squares(training, last)
        if training.step == 2 and training.world.rank == 1 and where == "gradient":
            return torch.full_like(found[0], float("nan")), found[1]
        return found

    train_gpt.Training.train_step, train_gpt.Training.gradient_squares = damaged, measured
    return command(words)


def test_paranoid_finds_a_weight_that_differs_in_one_bit(corpus, tmp_path):
    words = tiny.tiny_flags(corpus, tmp_path, "--paranoid", "3", "--val-every", "0")
    ranks = start(poisoned, 2, words, "weight", join=False)
    assert [status for status, _, _ in ranks] == [1, 1] and ranks[1][2] == ""
    assert "step 3: blocks.0.up on rank 1 is not what it is on rank 0" in ranks[0][2]


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_before_anything_changes(corpus, tmp_path):
    words = tiny.tiny_flags(corpus, tmp_path, "--save-every", "1", "--val-every", "0")
    ranks = start(poisoned, 2, words, "gradient", join=False)
    assert [status for status, _, _ in ranks] == [1, 1] and ranks[1][2] == ""
    assert "step 3: loss" in ranks[0][2] and "gradient norm nan" in ranks[0][2]
    folder = tiny.only_run(tmp_path)
    assert [path.name for path in whole_checkpoints(folder / "checkpoint")] == ["step_000001", "step_000002"]
    assert [status for status, _, _ in on(2, ["--resume", str(folder)])] == [0, 0]


def test_a_dead_rank_ends_the_other_and_leaves_the_last_checkpoint(corpus, tmp_path):
    words = tiny.tiny_flags(corpus, tmp_path, "--save-every", "5", "--steps", "5000", "--val-every", "0")
    with launch(exits, 2, words, join=False) as ranks:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*/checkpoint/step_*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks.kill(1)
        ended = ranks.wait(30.0)
    assert ended[1].code == -signal.SIGKILL and ended[0].code == 1
    (line,) = ended[0].err.splitlines()
    assert "rank 1" in line and "died" in line and "step" in line
    folder = tiny.only_run(tmp_path)
    assert whole_checkpoints(folder / "checkpoint")
    assert mome(["ckpt", "verify", str(folder)]) == 0
