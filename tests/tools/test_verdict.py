"""What a comparison says: the numbers and the table by hand, and when it warns that the arms differ in more.

Lives here: results and made run folders in, table and files out.
Not here: training the arms (tests/tools/test_compare.py), the formulas (tests/tools/test_stats.py).
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from pathlib import Path

import pytest

from mome.errors import UserError
from mome.tools.verdict import as_markdown, summarise, write_verdict


def results() -> dict:
    numbers = ((0, 4.0, 100.0), (1, 4.5, 300.0), (2, 5.0, 110.0))
    base = {seed: {"val_loss": x, "val_bpb": x / 2, "step_ms": ms} for seed, x, ms in numbers}
    knock = [{"full": 1.0, "off": 1.5, "mean_row": 1.0}, {"full": 1.0, "off": 2.5, "mean_row": 0.9}]
    arm = {
        0: {"val_loss": 3.0, "val_bpb": 1.25, "step_ms": 110.0, "knockout": knock[0]},
        1: {"val_loss": 4.25, "val_bpb": 1.75, "step_ms": 360.0, "knockout": knock[1]},
    }
    return {"base": base, "arm": arm}


def test_the_summary_by_hand():
    base, arm = summarise(results())
    assert (base["n"], base["val_loss_mean"], base["val_loss_sd"], base["val_bpb_mean"]) == (3, 4.5, 0.5, 2.25)
    assert (base["step_ms_median"], base["step_ms_ratio"], base["difference_mean"]) == (110.0, 1.0, 0.0)
    assert base["knockout"] == {}
    # Differences -1 and -0.25: mean -0.625, sd 0.75/sqrt(2), se 0.375, t -5/3; one degree of freedom.
    assert (arm["n"], arm["difference_n"], arm["difference_mean"]) == (2, 2, -0.625)
    assert arm["difference_se"] == pytest.approx(0.375) and arm["t"] == pytest.approx(-5 / 3)
    assert arm["p"] == pytest.approx(1 - 2 / math.pi * math.atan(5 / 3))
    assert (arm["val_loss_mean"], arm["val_bpb_mean"], arm["step_ms_median"]) == (3.625, 1.5, 235.0)
    assert (arm["step_ms_ratio"], arm["step_ms_ratio_min"], arm["step_ms_ratio_max"]) == pytest.approx((1.15, 1.1, 1.2))
    assert arm["knockout"] == pytest.approx({"off": 1.0, "mean_row": -0.05})


def test_the_table_by_hand():
    lines = as_markdown(summarise(results())).splitlines()
    assert len({len(line) for line in lines}) == 1 and set(lines[1]) == set("|-:")
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])] == [
        "arm,n,val loss,sd,bits/byte,ms/step,x time,difference,se,t,p,off,mean_row".split(","),
        "base,3,4.5000,0.5000,2.2500,110.0,1.000,-,-,-,-,-,-".split(","),
        "arm,2,3.6250,0.8839,1.5000,235.0,1.150,-0.6250,0.3750,-1.7,0.34,+1.0000,-0.0500".split(","),
    ]


def test_a_table_of_one_seed_without_times():
    rows = summarise({"a|b": {0: {"val_loss": 1.0}}, "c": {0: {"val_loss": 2}}})
    last = as_markdown(rows).splitlines()[-1]
    assert last.split() == "| c | 1 | 2.0000 | - | - | - | - | +1.0000 | - | - | - |".split()
    assert "a\\|b" in as_markdown(rows)
    with pytest.raises(UserError, match=r"c, seed 1: .* no val_loss"):
        summarise({"a": {1: {"val_loss": 1.0}}, "c": {1: {"val_loss": None}}})


def test_memories_knocked_out_alone_have_columns():
    several = {"full": 1.0, "off": 1.5, "mean_row": 1.25, "off:routed": 1.125, "off:ngram": math.nan}
    rows = summarise({
        "dense": {0: {"val_loss": 3.0, "knockout": {}}},
        "one": {0: {"val_loss": 2.0, "knockout": {"full": 1.0, "off": 1.25, "mean_row": 1.0}}},
        "several": {0: {"val_loss": 1.0, "knockout": several}},
    })  # fmt: skip
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in as_markdown(rows).splitlines()]
    assert lines[0][-4:] == ["off", "off:ngram", "off:routed", "mean_row"]
    assert [line[-4:] for line in lines[2:]] == [
        ["-"] * 4, ["+0.2500", "-", "-", "+0.0000"], ["+0.5000", "-", "+0.1250", "+0.2500"],
    ]  # fmt: skip


def trained_by(run: Path, revision: str | None, sources: dict[str, str] | None = None, time=(2026, 1, 1, 0, 0, 0)):
    """Let a run folder say which code it came from."""
    environment = json.loads((run / "environment.json").read_text())
    environment |= {} if revision is None else {"revision": revision}
    (run / "environment.json").write_text(json.dumps(environment))
    if sources is not None:
        with zipfile.ZipFile(run / "source.zip", "w") as archive:
            for name, text in sources.items():
                archive.writestr(zipfile.ZipInfo(name, time), text)


def test_runs_of_one_code_are_not_warned_of(make_run, tmp_path):
    runs = {arm: {seed: make_run(f"{arm}{seed}") for seed in (0, 1)} for arm in ("dense", "routed")}
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            # When the files were zipped, and in which order, says nothing of what is in them.
            files = {"a.py": "1", "b.py": "2"} if seed else {"b.py": "2", "a.py": "1"}
            trained_by(run, "f" * 40, files, time=(2026, 1, 1, seed, len(arm), 0))
    assert "warning" not in write_verdict(runs, tmp_path, ["x"])
    assert json.loads((tmp_path / "compare.json").read_text())["warning"] is None
    assert "Warning" not in (tmp_path / "compare.md").read_text()


def test_runs_of_different_code_are_warned_of_in_one_line(make_run, tmp_path):
    runs = {arm: {seed: make_run(f"{arm}{seed}") for seed in (0, 1)} for arm in ("dense", "routed")}
    for by_seed in runs.values():
        for run in by_seed.values():
            trained_by(run, "a" * 40 + "+", {"a.py": "1"})

    def warned() -> str:
        table, _, warning = write_verdict(runs, tmp_path, ["x"]).partition("\n\nwarning: ")
        page, record = (tmp_path / "compare.md").read_text(), json.loads((tmp_path / "compare.json").read_text())
        assert record["warning"] == warning and "\n" not in warning and table in page
        assert page.count(f"\n**Warning:** {warning}.\n") == 1
        return warning

    trained_by(runs["routed"][1], "a" * 40 + "+", {"a.py": "2"})
    said = warned()
    assert said.startswith("the runs do not come from one revision of the code, so a difference may be the code's")
    assert re.search(r"revision a{10}\+, source.zip \w{10}: dense seed 0 1, routed seed 0; revision", said)
    assert re.search(r"revision a{10}\+, source.zip \w{10}: routed seed 1\)$", said)

    trained_by(runs["routed"][1], "b" * 40, {"a.py": "1"})
    assert "though their source.zip is the same" in warned() and "revision bbbbbbbbbb, source.zip" in warned()

    (runs["routed"][1] / "source.zip").write_bytes(b"no zip")
    assert "source.zip not there: routed seed 1" in warned() and "so a difference may be" in warned()


def test_a_run_that_went_on_under_another_revision_is_warned_of(make_run, tmp_path):
    runs = {"dense": {0: make_run()}}
    trained_by(runs["dense"][0], "a" * 40)
    assert "warning" not in write_verdict(runs, tmp_path, ["x"])
    path = runs["dense"][0] / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resumed": [{"threads": 2}, {"revision": "c" * 40}]}))
    assert "revision aaaaaaaaaa then cccccccccc, " in write_verdict(runs, tmp_path, ["x"])
