"""python -m mome bench: who takes turns when, counts that can fail, keys as documented, mistakes in one line.

Lives here: streams, small races, allocating sides that must be found, the command in this process.
Not here: what the sides of a race compute (test_bench_sides.py); how fast they are: a bench is run by hand.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import backend
from mome.__main__ import dispatch, main
from mome.command import parse
from mome.errors import UserError
from mome.tools.bench import BENCHES, sides
from mome.tools.bench.counting import count_allocations, distinct
from mome.tools.bench.flat import WholeStep
from mome.tools.bench.options import TablesOptions
from mome.tools.bench.output import require_memory
from mome.tools.bench.race import Race, Timed, run_jobs, units_of
from mome.tools.bench.streams import hashed_keys, uniform_ids, zipf_ids, zipf_ranks
from mome.tools.bench.tables import OPS
from tests import tiny

README = tiny.ROOT / "records/bench/README.md"
SMALL = ["--quick", "--batches", "2", "--visits", "2", "--steps", "1"]


def test_ranks_follow_zipf():
    ranks_N = zipf_ranks(200_000, 50, torch.Generator().manual_seed(1))
    share_R = torch.bincount(ranks_N, minlength=50).double() / len(ranks_N)
    wanted_R = 1 / torch.arange(1, 51, dtype=torch.float64)
    wanted_R /= wanted_R.sum()
    error_R = (share_R - wanted_R).abs() / (wanted_R / len(ranks_N)).sqrt()
    assert ranks_N.dtype == torch.int64 and error_R.max() < 4.5
    assert zipf_ranks(3, 1, torch.Generator()).tolist() == [0, 0, 0]


def test_streams_are_fixed_scattered_and_differ_from_step_to_step():
    for draw in (zipf_ids, uniform_ids):
        one, again, other = draw(3, 400, 97, 5), draw(3, 400, 97, 5), draw(3, 400, 97, 6)
        assert all(torch.equal(a, b) for a, b in zip(one, again)) and not torch.equal(one[0], other[0])
        assert not torch.equal(one[0], one[1])
        ids = torch.cat(one)
        assert ids.dtype == torch.int64 and 0 <= ids.min() and ids.max() < 97
    common = torch.cat(zipf_ids(4, 1000, 97, 5)).bincount(minlength=97).argsort(descending=True)[:5]
    assert sorted(common.tolist()) != [0, 1, 2, 3, 4]
    (keys_N,) = hashed_keys(1, 4000, 1 << 20, 0)
    assert keys_N.min() >= 0 and keys_N.max() > 1 << 60
    # The same keys: two that share a row of the larger table share one of the smaller.
    assert torch.equal(keys_N % 256 % 64, keys_N % 64)


def test_sides_take_turns_there_and_back_and_the_first_step_of_a_turn_is_not_timed():
    now, calls = [0.0], []

    def make(name):
        def step(number):
            calls.append((name, number))
            now[0] += {"a": 1.0, "b": 10.0}[name] + 0.5 * number

        return step

    counts = {"a": [1, 2, 4], "b": [5]}
    race = Race(
        "x", ("a", "b"), make, warm=2, visits=3, steps=2, units=units_of(counts), clock=lambda: now[0]
    )  # fmt: skip
    run_jobs(race.jobs())
    turns = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]
    later = [(name, number + 3) for name, number in [*turns[3:], *turns[:3]]]
    last = [(name, number + 6) for name, number in turns]
    assert calls == [("a", 0), ("a", 1), ("b", 0), ("b", 1), *turns, *later, *last]
    timed = race.timed()
    expected = [tuple((1 + 0.5 * n) / (1e-9 * counts["a"][n % 3]) for n in visit) for visit in ((1, 2), (4, 5), (7, 8))]
    assert np.allclose(timed["a"].visits, expected)
    assert np.allclose(timed["b"].visits[1], [12 / 5e-9, 12.5 / 5e-9])


def test_a_ratio_is_of_medians_with_the_range_of_single_turns():
    one, other = Timed(((1.0, 3.0), (2.0, 2.0), (9.0, 9.0))), Timed(((1.0, 1.0), (4.0, 4.0), (9.0, 9.0)))
    assert (one.median, one.least, one.most) == (2.5, 1.0, 9.0)
    assert one.over(other) == (2.5 / 4.0, 0.5, 2.0)


def test_a_failing_step_leaves_the_collector_on():
    import gc

    def step(number):
        assert number != 1
        assert gc.isenabled() == (number == 0 and not race.timed()["a"] and started == [])
        started.append(number)

    started: list[int] = []
    race = Race("x", ("a",), lambda name: step, warm=1, visits=1, steps=1)
    with pytest.raises(AssertionError):
        run_jobs(race.jobs())
    assert gc.isenabled()


SIZE = 1 << 20
SOURCE, IDS = torch.zeros(1 << 12, 64), torch.arange(1 << 12)
REUSED = torch.empty_like(SOURCE)
ALLOCATING = {
    "an operator's output": (1, lambda number: SOURCE + 1),
    "two of them": (2, lambda number: (SOURCE + 1).mul(2)),
    "memory within an operator": (2, lambda number: torch.argsort(SOURCE.view(-1)[: 1 << 17])),
    "numpy's": (1, lambda number: np.ones(SIZE // 8)),
    "a reused buffer": (0, lambda number: torch.index_select(SOURCE, 0, IDS, out=REUSED)),
    "one that is small": (0, lambda number: (torch.ones(100), np.ones(100))),
    "every second step": (0.5, lambda number: SOURCE + 1 if number % 2 else None),
}


@pytest.mark.parametrize("name", ALLOCATING)
def test_allocations_are_counted(name):
    expected, step = ALLOCATING[name]
    step(0)
    found = count_allocations(step, {number: SIZE for number in range(4)})
    assert found.rows >= expected and (expected > 1 or found.rows == expected)


def test_an_allocation_counts_from_its_threshold():
    exact = SOURCE.nbytes
    assert count_allocations(lambda number: SOURCE + 1, {0: exact, 1: exact + 1}).rows == 0.5


def test_page_faults_show_fresh_memory_of_any_origin():
    pages = 2000

    def step(number):
        with mmap.mmap(-1, pages << 12) as fresh:
            fresh.write(bytes(1) * len(fresh))

    found, quiet = (count_allocations(one, {0: 1 << 60}) for one in (step, lambda number: REUSED.fill_(1)))
    # A huge page is one fault for 512 small ones.
    assert found.rows == quiet.rows == 0 and quiet.faults < found.faults and found.faults >= pages // 512


def test_a_side_that_allocates_its_rows_is_found_and_ours_is_not():
    """In the steady state; the same counter on the same ids."""
    # So many numbers a row that buffers of ids, two int64 a lookup, are no tenth of the rows.
    rows, lookups, dim = 16_384, 2048, 128
    ids, grad_ND = zipf_ids(4, lookups, rows, 0), torch.randn(lookups, dim)
    thresholds = {number: 4 * dim * count // 10 for number, count in enumerate(distinct(ids))}
    found = {}
    for name, side in (("ours", sides.Ours(rows, dim, sides.RULES["ours"])), ("eager", sides.Eager(rows, dim))):
        for number in range(8):
            side.step(ids[number % 4], grad_ND)
        found[name] = count_allocations(lambda number, side=side: side.step(ids[number], grad_ND), thresholds).rows
    assert found["eager"] >= 4
    assert found["ours"] == 0 or not compiled()


def compiled() -> bool:
    """Whether a step of ours runs on numba's kernels; torch's allocate."""
    return all(backend(op, "cpu") == "numba" for op in OPS)


def documented() -> list[re.Pattern]:
    """The keys of the README's tables as patterns; what is in capitals stands for what its text says."""
    ours, peer = "(ours|ours_adagrad|ours_decay)", "(fbgemm|fbgemm_bags|sparseadam|eager)"
    sort = "(unique_ids|torch_unique|numpy_unique|segments_of|torch_segments)"
    stand_for = {
        "STREAM": "(zipf|uniform)", "OURS": ours, "PEER": peer, "SORT": sort, "BITS": r"\d+", "ORDER": r"\d",
        "SIDE": f"({ours}|{peer}|gather_fresh|gather_reused|copy)", "KIND": "(xor|mix)", "HASH": r"(xor|mix)_[\w]+",
    }  # fmt: skip
    lines = [line.split("|")[1] for line in README.read_text().splitlines() if line.startswith("| `")]
    keys = [key for line in lines for key in re.findall(r"`(\w+)`", line)]
    for word, pattern in stand_for.items():
        keys = [key.replace(word, pattern) for key in keys]
    return [re.compile(f"{key}(_min|_max)?") for key in keys]


def run(name, words, tmp_path) -> dict:
    """The results that a bench leaves, checked for form."""
    path = tmp_path / "deep" / "found.json"
    assert dispatch(["bench", name, *words, "--json", str(path)]) == 0
    left = json.loads(path.read_text())
    assert set(left) == {"bench", "environment", "results"} and left["bench"] == name
    assert left["environment"]["threads"] == torch.get_num_threads() and left["environment"]["kernels"]
    assert [one.name for one in path.parent.iterdir()] == ["found.json"]
    for key, value in left["results"].items():
        assert isinstance(value, int | float) and math.isfinite(value), key
        assert any(pattern.fullmatch(key) for pattern in documented()), f"{key} is not in records/bench/README.md"
    return left["results"]


def test_tables_without_fbgemm(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == sides.FBGEMM]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, sides.FBGEMM, None)
    results = run("tables", SMALL, tmp_path)
    out = capsys.readouterr().out
    assert out.count("missing: FBGEMM TBE (pip install fbgemm-gpu-cpu)") == 2
    assert not [key for key in results if "fbgemm" in key]
    for stream in ("zipf", "uniform"):
        assert {f"{side}_ms_{stream}" for side in ("ours", "sparseadam", "eager")} <= set(results)
        ratio = results[f"ours_ms_{stream}"] / results[f"sparseadam_ms_{stream}"]
        assert results[f"ours_over_sparseadam_{stream}"] == pytest.approx(ratio)
        assert results[f"row_allocations_eager_{stream}"] >= 4
    assert 0 < results["copy_fraction"] and 0 < results["copy_fraction_uniform"]
    assert results["row_allocations_per_step"] == 0 or not compiled()
    assert results["flat_unique_10"] < results["flat_unique_14"]
    assert results["flat_10_14"] == pytest.approx(results["flat_ns_14"] / results["flat_ns_10"])
    assert results["unique_rows_uniform"] > results["unique_rows_zipf"]
    assert "ours, row-wise Adam" in out and "2^14 rows / these" in out


@pytest.mark.skipif(sides.fbgemm_missing() is not None, reason="fbgemm-gpu-cpu is not installed")
def test_tables_with_fbgemm(tmp_path, capsys):
    results = run("tables", [*SMALL, "--parts", "peers"], tmp_path)
    assert {"fbgemm_ms_zipf", "ours_over_fbgemm_zipf", "ours_adagrad_over_fbgemm_bags_uniform"} <= set(results)
    assert "missing" not in capsys.readouterr().out and not [key for key in results if key.startswith("flat")]


def test_the_sizes_of_the_record_have_the_documented_names():
    from mome.tools.bench.flat import Flat

    options = TablesOptions()
    assert (options.rows, options.dim, options.lookups) == (1_000_000, 128, 16_384)
    flat = Flat(options)
    assert flat.names == ["16", "20", "24"]
    for name, seconds in zip(flat.names, (1.0, 2.0, 3.0)):
        flat.unique[name] = [100]
        flat.race._taken[name] = [(seconds,)]
    assert (flat.results()["flat_16_24"], flat.results()["flat_20_24"]) == (3.0, 1.5)


FAKE = """
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
with open(Path(__file__).with_name("calls.jsonl"), "a") as file:
    file.write(json.dumps([words, os.environ["OMP_NUM_THREADS"]]) + "\\n")
flag = lambda name: words[words.index(name) + 1]
if flag("--memory.ngram.rows") == "8":
    sys.exit("train_gpt.py: the disk is full")
folder = Path(flag("--runs-dir")) / "20260101-000000_local"
folder.mkdir()
(folder / "result.json").write_text(json.dumps({"step_ms": 2.0 * int(flag("--memory.ngram.rows")) ** 0.5}))
"""


def test_whole_steps_are_runs_of_the_trainer_in_turns(tmp_path, capsys):
    (tmp_path / "trainer.py").write_text(FAKE)
    command = (sys.executable, "-S", str(tmp_path / "trainer.py"))
    whole = WholeStep(TablesOptions(step_bits=(11, 13), step_steps=5, step_runs=2), command)
    run_jobs(whole.jobs())
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [words[words.index("--memory.ngram.rows") + 1] for words, _ in calls] == ["1024", "4096", "4096", "1024"]
    assert {threads for _, threads in calls} == {str(torch.get_num_threads())}
    for word, value in (("--steps", "5"), ("--val-every", "0"), ("--save-every", "0"), ("--sample-tokens", "0")):
        assert all(words[words.index(word) + 1] == value for words, _ in calls)
    assert whole.results() == {
        "flat_step": 2.0, "flat_step_min": 2.0, "flat_step_max": 2.0, "step_ms_11": 64.0, "step_ms_13": 128.0
    }  # fmt: skip
    whole.show()
    assert "2^13 over 2^11, pair by pair: 2.000" in capsys.readouterr().out
    broken = WholeStep(TablesOptions(step_bits=(4, 13), step_steps=5, step_runs=1), command)
    with pytest.raises(UserError, match=r"2\^4 n-gram rows failed, status 1: train_gpt.py: the disk is full"):
        run_jobs(broken.jobs())


def test_the_real_trainer_takes_those_words(tmp_path):
    whole = WholeStep(TablesOptions(step_steps=7))
    for bits in (16, 24):
        config = parse(whole.words(bits, str(tmp_path))).config
        assert config.memory.ngram.rows * len(config.memory.ngram.orders) == 1 << bits
        assert (config.preset, config.steps, config.runs_dir) == ("local", 7, tmp_path)
        assert config.val_every == config.save_every == config.sample_tokens == 0
    assert Path(whole.command[-1]).samefile(tiny.ROOT / "train_gpt.py")


def test_hashing(tmp_path, capsys):
    results = run("hashing", ["--quick", "--corpus-tokens", "3000"], tmp_path)
    for stream in ("zipf", "uniform"):
        ratio = results[f"unique_ids_ms_{stream}"] / results[f"torch_unique_ms_{stream}"]
        assert results[f"unique_ids_over_torch_unique_{stream}"] == pytest.approx(ratio)
    assert results["hash_mids_mix_2_to_8"] > 0 and 0 < results["minority_xor_2"] < 1
    assert "segments_of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "bench needs a name: tables, hashing"),
        (["tabels"], "did you mean tables?"),
        (["tables", "--rows", "1"], "--rows 1: give a whole number of 2 or more"),
        (["tables", "--flat-bits", "20", "16"], "--flat-bits 20 16: give two or more, ascending"),
        (["tables", "--flat-bits", "16"], "--flat-bits 16"),
        (["tables", "--parts"], "--parts"),
        (["tables", "--setps", "3"], "did you mean --steps?"),
        (["tables", "--rows", "4000000000000"], "this bench needs"),
        (["tables", "--seed", "-1"], "--seed -1"),
        (["hashing", "--tokens", "1000"], "--tokens 1000: give a multiple of 512"),
        (["hashing", "--rows", "3000000000"], "--rows 3000000000: the hash xor takes fewer"),
        (["tables", "--json", "."], "--json .: this is a folder"),
        (["hashing", "--json", "file/x.json"], "file"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["bench", *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err


def test_memory_that_is_not_there_is_said():
    require_memory(1 << 20, "x")
    with pytest.raises(UserError, match=r"needs 1048576.0 GiB and [\d.]+ are available: take less"):
        require_memory(1 << 50, "take less")


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        dispatch(["bench", name, "--help"])
    assert not stop.value.code and f"usage: python -m mome bench {name}" in capsys.readouterr().out
