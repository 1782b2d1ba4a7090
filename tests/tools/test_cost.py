"""The cost of a step in the report: time, memory and traffic with the disk, of runs that counted them and of others.

Lives here: what is drawn and said, and the medians and counters behind it.
Not here: the rest of the page (test_report.py), the counters themselves (tests/mome/test_usage.py).
"""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from matplotlib.image import imread

from mome.tools.plots import Cost, cost_figure
from mome.tools.report import cost, in_all, main, running_median, write_report
from mome.tools.runs import read_run


@pytest.fixture
def counted(lines):
    """Lines of a run with a table in a file: it was stopped after step 25 and gone on with, by a process that counts
    from 0 again."""
    rows = lines(40)
    for row in rows:
        since = row["step"] - 25 * (row["step"] > 25)
        row |= {"resident_bytes": 2**20 * (600 + row["step"]), "read_bytes": 2**20 * since, "written_bytes": 0}
    return rows


def coloured(png):
    """Whether there is a strong colour, [height, width]."""
    pixels = imread(png)[..., :3]
    return pixels.max(-1) - pixels.min(-1) > 0.25


def test_the_cost_of_a_step_is_drawn_and_said(make_run, counted):
    folder = make_run(lines=counted)
    write_report(folder)
    said = (folder / "report.html").read_text()
    assert "Cost of a step" in said
    assert "at most 640 MiB lay in RAM" in said and "since the run began: 40 MiB read and 0 MiB written." in said
    drawn = coloured(folder / "cost.png")
    height, width = drawn.shape
    assert width >= 1000 and all(half.any(0).sum() > width / 2 for half in (drawn[: height // 2], drawn[height // 2 :]))
    each = cost(read_run(folder), "x")
    assert each.label == "x: 150.2 ms" and each.steps.tolist() == list(range(1, 41))
    assert each.ms == pytest.approx(np.full(40, 250.0)) and each.typical == pytest.approx(np.full(40, 250.0))
    assert each.resident[[0, -1]].tolist() == [601 * 2**20, 640 * 2**20]
    assert each.read.tolist() == [2**20 * step for step in range(1, 41)]


def test_a_run_that_did_not_count_has_its_time_drawn(make_run, counted, tmp_path):
    old, new = make_run("a"), make_run("b", lines=counted)
    write_report(old)
    said = (old / "report.html").read_text()
    assert "Cost of a step" in said and "Memory and disk were not recorded." in said
    assert imread(old / "cost.png").shape[0] < 600  # one panel
    assert main([str(old), str(new), "--out", str(tmp_path / "both")]) == 0
    said = (tmp_path / "both/report.html").read_text()
    assert "a: Memory and disk were not recorded." in said and "b: After a step at most 640 MiB lay in RAM" in said
    assert imread(tmp_path / "both/cost.png").shape[0] > 600


def test_without_times_there_is_no_picture_of_them(make_run):
    for number, rows in enumerate(([], [{"step": 1, "loss": 2.0}], [{"step": 7, "loss": 2.0, "seconds": 9.0}])):
        folder = make_run(str(number), lines=rows)
        write_report(folder)
        assert not (folder / "cost.png").exists() and "Cost of a step" not in (folder / "report.html").read_text()


def test_a_time_over_lost_lines_is_no_step(make_run):
    rows = [{"step": step, "seconds": 0.1 * step} for step in (1, 2, 5, 6)]
    rows += [{"step": 7, "seconds": 0.2}, {"step": 8}, {"step": 9, "seconds": None}]
    ms = cost(read_run(make_run(lines=rows, result=None)), "x").ms
    assert ms[[0, 1, 3]] == pytest.approx([100.0, 100.0, 100.0]) and np.isnan(ms[[2, 4, 5, 6]]).all()


def test_counters_of_several_processes_add_up():
    assert in_all(np.array([3.0, 5.0, 2.0, 2.0, 9.0])).tolist() == [3.0, 5.0, 7.0, 7.0, 14.0]
    mixed = in_all(np.array([math.nan, 4.0, math.nan, 1.0]))
    assert mixed[[1, 3]].tolist() == [4.0, 5.0] and np.isnan(mixed[[0, 2]]).all()
    assert in_all(np.zeros(0)).tolist() == []


@pytest.mark.parametrize(("size", "span"), [(0, 4.0), (1, 4.0), (2, 0.3), (7, 0.3), (7, 5.0), (31, 6.2), (5, 99.0)])
def test_a_running_median_is_that_of_a_window(size, span):
    values = np.random.default_rng(size).normal(size=size)
    values[1::5] = math.nan
    width = 2 * max(1, int(span / 2)) + 1
    found = running_median(values, span)
    assert len(found) == size
    for i, one in enumerate(found):
        first = min(max(0, i - width // 2), max(0, size - width))
        assert one == pytest.approx(np.nanmedian(values[first : first + width]), nan_ok=True)


def test_one_slow_step_does_not_flatten_the_others():
    steps, nothing = np.arange(1.0, 101.0), np.full(100, math.nan)
    ms = np.full(100, 10.0)
    ms[0] = 5000.0
    quiet = cost_figure([Cost("x", steps, np.full(100, 10.0), running_median(ms, 4), nothing, nothing)])
    slow = cost_figure([Cost("x", steps, ms, running_median(ms, 4), nothing, nothing)])
    lines = [coloured(io.BytesIO(png))[:300].any(1).nonzero()[0] for png in (quiet, slow)]
    assert lines[0].tolist() == lines[1].tolist() and 50 < lines[0].mean() < 250
