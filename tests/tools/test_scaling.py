"""Loss and time against a setting: the fit against oracles, what is said of a tail, what is refused.

Lives here: runs of synthetic results, two tiny real runs, and the command.
Not here: the paired test (test_stats.py), the trainer (tests/test_train.py).
"""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from matplotlib.image import imread
from scipy import stats

import train_gpt
from mome import usage
from mome.__main__ import main
from mome.tools.fit import block_line, interval
from mome.tools.runs import read_run
from mome.tools.scaling import find_runs, group, measure, sentences
from tests import tiny

KEY = "memory.ngram.rows"
ROWS = [2**k for k in range(12, 24, 2)]
OFFSETS = {0: -0.25, 1: 0.0, 2: 0.5}


@pytest.fixture
def made(make_run, config, result):
    """made({(rows, seed): loss}, ms=..., **changes) -> run folders; ms: rows, seed -> milliseconds or None."""
    numbers = itertools.count()

    def make(losses, ms=lambda rows, seed: 100.0, config=config, **more):
        folders = []
        for (rows, seed), loss in losses.items():
            one = config | {"seed": seed, "memory": {"ngram": {"rows": rows, "orders": [2, 3]}}}
            found = result | {"val_loss": loss, "val_bpb": loss / 2, "step_ms": ms(rows, seed)}
            folders.append(make_run(f"{next(numbers)}_local", config=one, result=found, lines="", **more))
        return folders

    return make


def line(a=5.0, b=0.125, rows=ROWS, offsets=OFFSETS, noise=0.0):
    """Losses on a line, an offset for each seed and noise that no seed shares."""
    random = np.random.default_rng(3)
    return {
        (size, seed): a - b * math.log10(size) + offset + noise * random.normal()
        for size in rows
        for seed, offset in offsets.items()
    }


def measured(folders, key=KEY):
    return measure(group(find_runs(folders), key))


def refused(words, capsys):
    assert main(["scaling", *map(str, words)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
    return err


def dummies(x, y, blocks):
    """The same fit with a column for each block: slope, its error, F and p of the lack of fit, the scatter."""
    x, y = np.asarray(x), np.asarray(y)
    offsets = np.array([[block == name for name in sorted(set(blocks))] for block in blocks], float)
    levels = np.array([[one == level for level in sorted(set(x))] for one in x], float)

    def left(design):
        residual = y - design @ np.linalg.pinv(design) @ y
        return float(residual @ residual), len(y) - np.linalg.matrix_rank(design)

    design = np.column_stack([x, offsets])
    (rough, df), (fine, fine_df) = left(design), left(np.column_stack([levels, offsets]))
    se = math.sqrt(rough / df * np.linalg.inv(design.T @ design)[0, 0])
    ratio = (rough - fine) / (df - fine_df) / (fine / fine_df)
    return (
        (np.linalg.pinv(design) @ y)[0],
        se,
        ratio,
        stats.f.sf(ratio, df - fine_df, fine_df),
        math.sqrt(fine / fine_df),
    )


def test_a_known_line_is_found_whatever_the_seeds_have_in_common(made):
    found = measured(made(line()))
    loss = found["loss"]
    assert loss["b"] == pytest.approx(0.125, rel=1e-9) and loss["b_se"] < 1e-9
    assert loss["a"] == pytest.approx(5.0 + sum(OFFSETS.values()) / 3, rel=1e-9)
    assert loss["doubling"] == pytest.approx(0.125 * math.log10(2)) and (loss["seeds"], loss["runs"]) == (3, 18)
    assert loss["doubling_low"] == pytest.approx(loss["doubling"]) == pytest.approx(loss["doubling_high"])
    assert [row["value"] for row in found["values"]] == ROWS and {row["n"] for row in found["values"]} == {3}
    assert found["values"][0]["val_loss_sd"] == pytest.approx(np.std([*OFFSETS.values()], ddof=1))
    assert found["values"][0]["val_bpb_mean"] == pytest.approx(found["values"][0]["val_loss_mean"] / 2)
    assert all(step["gain"] == pytest.approx(0.125 * math.log10(4)) and step["n"] == 3 for step in found["steps"])
    assert found["tail"] is None


@pytest.mark.parametrize("missing", [0, 1, 7])
def test_the_fit_is_that_of_a_column_for_each_seed(missing):
    random = np.random.default_rng(missing)
    points = [(math.log10(rows), seed) for rows in ROWS for seed in range(3)]
    kept = [points[i] for i in sorted(random.permutation(len(points))[missing:])]
    x, blocks = zip(*kept)
    y = [4.0 - 0.02 * one + 0.3 * seed + 0.01 * random.normal() for one, seed in kept]
    fit = block_line(x, y, blocks)
    found = (fit.slope, fit.se, fit.bend, fit.bend_p, fit.scatter)
    assert found == pytest.approx(dummies(x, y, blocks), rel=1e-7)
    assert fit.df == len(kept) - 4
    half = stats.t.ppf(0.975, fit.df) * fit.se
    assert fit.interval() == pytest.approx((fit.slope - half, fit.slope + half))


def test_a_fit_of_few_points():
    two = block_line([1.0, 2.0], [5.0, 4.0], [0, 0])
    assert (two.slope, two.intercept, two.df) == (-1.0, 6.0, 0) and math.isnan(two.se) and math.isnan(two.bend_p)
    assert math.isnan(two.scatter)
    assert all(map(math.isnan, two.interval())) and all(map(math.isnan, interval(1.0, math.nan, 3)))
    bent = block_line([0.0, 1.0, 2.0] * 2, [0.0, 1.0, 0.0, 2.0, 3.0, 2.0], [0, 0, 0, 1, 1, 1])
    assert bent.slope == pytest.approx(0.0) and bent.bend_p < 1e-9
    with pytest.raises(ValueError, match="two different x"):
        block_line([1.0, 2.0], [1.0, 2.0], [0, 1])
    with pytest.raises(ValueError, match="as many x, y and blocks"):
        block_line([1.0, 2.0], [1.0], [0, 0])


def test_a_slope_of_noise_is_no_evidence(made):
    found = measured(made(line(b=0.0, noise=0.01)))
    said = " ".join(sentences(KEY, found))
    assert found["loss"]["doubling_low"] < 0 < found["loss"]["doubling_high"]
    assert said.count("no evidence of a gain") == 2 and "All 10 doublings (4096 to 4,194,304)" in said


def tail_of(made, change):
    """What is said of runs that gain 0.1 a step up to 65,536 rows and `change` (rows, seed) after that."""
    losses = line(b=0.0, noise=0.002)
    for rows, seed in losses:
        losses[rows, seed] += 0.1 * max(0, 2 - ROWS.index(rows)) + change(rows, seed)
    found = measured(made(losses))
    return found, " ".join(sentences(KEY, found))


def test_a_flat_tail_is_said(made):
    found, said = tail_of(made, lambda rows, seed: 0.0)
    assert (found["tail"]["from"], found["tail"]["to"]) == (65_536, 4_194_304)
    assert found["tail"]["n"] == 3 and abs(found["tail"]["gain"]) < 0.01
    assert "The last 6 doublings (65,536 to 4,194,304) gained" in said and "no evidence of a gain" in said
    assert "But the points leave the line" in said and "95 % confidence" in said


def test_a_tail_that_loses_is_said(made):
    found, said = tail_of(made, lambda rows, seed: 0.1 * (rows == ROWS[-1]))
    assert found["tail"]["gain"] == pytest.approx(-0.1, abs=0.01)
    assert "The last 6 doublings (65,536 to 4,194,304) gained -0." in said and ": evidence of a loss." in said


def test_a_gain_to_the_end_is_said(made):
    found, said = tail_of(made, lambda rows, seed: -0.1 * max(0, ROWS.index(rows) - 2))
    assert found["tail"] is None
    assert "The last 2 doublings (1,048,576 to 4,194,304) gained +0." in said
    assert ": evidence of a gain to the end." in said and "no evidence of a gain" not in said


def test_gains_are_of_the_seeds_that_both_values_have(made):
    losses = line(noise=0.01)
    del losses[ROWS[1], 0], losses[ROWS[2], 1]
    steps = measured(made(losses))["steps"]
    assert [step["n"] for step in steps] == [2, 1, 2, 3, 3]
    differences = [losses[ROWS[0], seed] - losses[ROWS[1], seed] for seed in (1, 2)]
    assert steps[0]["gain"] == pytest.approx(np.mean(differences))
    assert steps[0]["se"] == pytest.approx(np.std(differences, ddof=1) / math.sqrt(2))
    assert steps[1]["gain"] == pytest.approx(losses[ROWS[1], 2] - losses[ROWS[2], 2]) and math.isnan(steps[1]["se"])


def test_the_scatter_of_two_values_is_that_of_their_pairs(made):
    (step,) = measured(made(line(rows=ROWS[:2], noise=0.01)))["steps"]
    assert step["pooled_se"] == pytest.approx(step["se"])
    half = stats.t.ppf(0.975, 2) * step["se"]
    assert (step["low"], step["high"]) == pytest.approx((step["gain"] - half, step["gain"] + half))


def test_two_seeds_of_four_values_are_enough_to_tell(made):
    """Of two pairs alone the t-test says nothing; the scatter of all eight runs has three degrees of freedom."""
    offsets = {0: 0.0, 1: 0.3}
    found = measured(made(line(b=0.1, rows=ROWS[:4], offsets=offsets, noise=0.002)))
    assert found["tail"] is None and found["loss"]["scatter_df"] == 3
    assert "evidence of a gain to the end" in " ".join(sentences(KEY, found))


def test_one_seed_has_no_error_and_says_so(made, tmp_path, capsys):
    folders = made(line(offsets={4: 0.0}, rows=ROWS[:2]))
    assert main(["scaling", *map(str, folders), "--against", KEY, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "b has no error to be stated" in said and "no evidence either way" in said and "nan" not in said.lower()
    record = json.loads((tmp_path / "out/scaling.json").read_text())
    assert record["loss"]["b_se"] is None and record["loss"]["b"] == pytest.approx(0.125)


def test_what_a_doubling_costs(made):
    found = measured(made(line(), ms=lambda rows, seed: 50.0 + 3.0 * math.log2(rows) + (40.0 if seed == 2 else seed)))
    assert found["time"]["doubling"] == pytest.approx(3.0) and found["time"]["doubling_se"] < 1e-9
    middle = found["values"][0]["step_ms_median"]
    assert middle == pytest.approx(50 + 3 * 12 + 1) and found["time"]["most_ratio_of_one_value"] > 1.4
    said = sentences(KEY, found)[-1]
    assert "costs +3.00 ms a step" in said and "as good as the machine was quiet" in said and "1.47 times" in said
    noisy = sentences(KEY, measured(made(line(), ms=lambda rows, seed: 100.0 + ROWS.index(rows) % 2)))[-1]
    assert "no evidence of a cost" in noisy
    silent = measured(made(line(), ms=lambda rows, seed: None if rows > ROWS[0] else 1.0))
    assert silent["time"] is None and "not known" in sentences(KEY, silent)[-1]


def test_the_three_files(made, tmp_path, capsys):
    where = {"processor": "abacus", "data": "d1", "revision": "r1"}
    made(line(noise=0.01), ms=lambda rows, seed: 100.0 + 20.0 * seed, environment=where)
    runs, out = tmp_path / "runs", tmp_path / "out"
    (runs / ".starting_1").mkdir()
    (runs / ".starting_1/config.json").write_text("{}")
    again = next(runs.glob("0_*"))
    words = [str(runs), str(again), "--against", "memory.ngram.rows", "--out", str(out)]
    assert main(["scaling", *words]) == 0
    said = capsys.readouterr().out
    table = said.split("\n\n")[0]
    assert said.endswith(f"{out}/scaling.md, scaling.json and scaling.png\n") and "warning" not in said
    assert len(table.splitlines()) == 2 + len(ROWS) and len({len(one) for one in table.splitlines()}) == 1
    page, record = (out / "scaling.md").read_text(), json.loads((out / "scaling.json").read_text())
    assert table in page and "scaling.png" in page and "abacus" in page and f"--against {KEY}" in page
    assert all(one in page for one in record["said"])
    assert page.count("\n- memory.ngram.rows") == len(record["runs"]) == 18
    assert {run["folder"] for run in record["runs"]} == {str(one) for one in runs.glob("*_local")}
    pixels = imread(out / "scaling.png")[..., :3]
    coloured = (pixels.max(-1) - pixels.min(-1) > 0.25).any(0)
    half = pixels.shape[1] // 2
    assert half >= 500 and coloured[:half].sum() > half / 2 and coloured[half:].sum() > half / 2


def test_another_revision_of_the_code_is_a_warning(made, tmp_path, capsys):
    folders = made(line(rows=ROWS[:2]), environment={"revision": "r1"})
    (folders[0] / "environment.json").write_text(json.dumps({"revision": "r2"}))
    assert main(["scaling", *map(str, folders), "--against", KEY, "--out", str(tmp_path / "out")]) == 0
    assert "warning: the runs do not come from one revision" in capsys.readouterr().out
    assert "**Warning:**" in (tmp_path / "out/scaling.md").read_text()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("memory.ngram.row", "did you mean memory.ngram.rows?"),
        ("model.width", "192 in all of them: a line needs two values"),
        ("memory.ngram.orders", "has [2, 3], and a scale has numbers above 0"),
        ("preset", "has 'local', and"),
        ("seed", "seeds are what runs are paired by"),
    ],
)
def test_a_setting_that_is_no_scale(made, capsys, key, said):
    folders = made({(4096, 0): 4.0})
    assert said in refused([*folders, "--against", key], capsys)


@pytest.mark.parametrize("value", [0, -1, True, None, math.inf])
def test_a_value_that_has_no_logarithm(made, capsys, value):
    assert "numbers above 0" in refused([*made({(value, 0): 4.0, (4096, 0): 4.0}), "--against", KEY], capsys)


def test_runs_that_differ_in_more_are_named_with_what_differs(made, config, capsys):
    folders = made({(4096, 0): 4.0}) + made({(8192, 0): 4.0}, config=config | {"steps": 50, "runs_dir": "x"})
    said = refused([*folders, "--against", KEY], capsys)
    assert "(steps: 40 -> 50)" in said and "runs_dir" not in said and all(str(one) in said for one in folders)
    folders = made({(4096, 0): 4.0}, environment={"data": "one"}) + made({(8192, 0): 4.0}, environment={"data": "two"})
    assert "(data: one -> two)" in refused([*folders, "--against", KEY], capsys)


def test_runs_that_cannot_be_paired(made, capsys):
    twins = made({(4096, 0): 4.0, (8192, 0): 3.9}) + made({(4096, 0): 4.1})
    assert "one memory.ngram.rows and one seed" in refused([*twins, "--against", KEY], capsys)
    strangers = made({(4096, 0): 4.0, (8192, 1): 3.9})
    assert "no seed was trained at two values" in refused([*strangers, "--against", KEY], capsys)


@pytest.mark.parametrize("damage", ["gone", "{", '{"val_loss": null}', '{"seconds": 1}'])
def test_a_run_without_a_result_is_named(made, tmp_path, capsys, damage):
    folders = made({(4096, 0): 4.0, (8192, 0): 3.9})
    path = folders[1] / "result.json"
    path.unlink() if damage == "gone" else path.write_text(damage)
    for given in (folders, [tmp_path / "runs"]):
        said = refused([*given, "--against", KEY], capsys)
        assert str(folders[1]) in said and "--resume" in said


def test_places_without_runs(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for place in ("empty", "missing"):
        said = refused([tmp_path / place, "--against", KEY], capsys)
        assert f"{place} is no run folder and holds none" in said
    assert "needs run folders" in refused(["--against", KEY], capsys)
    assert "--against" in refused([tmp_path], capsys)


def test_two_runs_of_the_trainer(tmp_path, capsys):
    """Rows in files: their lines count memory and traffic, their pages draw it, and a line goes through both."""
    corpus = tiny.make_corpus(tmp_path)
    for rows in ("256", "1024"):
        words = ("--memory.ngram.rows", rows, "--table.ngram.place", "file", "--steps", "4", "--sample-tokens", "0")
        assert train_gpt.main(tiny.tiny_flags(corpus, tmp_path / "runs", *words)) == 0
    capsys.readouterr()
    words = [str(tmp_path / "runs"), "--against", "memory.ngram.rows", "--out", str(tmp_path / "out")]
    assert main(["scaling", *words]) == 0
    said = capsys.readouterr().out
    assert " 256 " in said and " 1024 " in said and "All 2 doublings (256 to 1024)" in said
    for folder in (tmp_path / "runs").glob("2*"):
        lines = read_run(folder).lines
        counted = {"resident_bytes", "read_bytes", "written_bytes"} if usage.IO.exists() else set()
        assert len(lines) == 4 and all(counted <= line.keys() for line in lines)
        assert (folder / "cost.png").exists()
        assert ("lay in RAM" in (folder / "report.html").read_text()) == bool(counted)
