"""The report of one run and of several, of whole runs and of broken ones.

Lives here: what the page and the figure hold, what is escaped, what is tolerated.
Not here: the command line around it (tests/tools/test_cli.py).
"""

from __future__ import annotations

import html
import io
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread

from mome.errors import UserError
from mome.tools.page import bar, shown, table, text
from mome.tools.plots import Line, _limits, loss_figure
from mome.tools.report import curves, duration, in_order, increases, main, measured, write_report
from mome.tools.runs import Points, flatten, labels, points, read_run, smooth

VOID = {"meta", "img", "source", "link", "br", "hr", "input"}


class Checker(HTMLParser):
    """Collects tags, attributes and text, and demands that every element is closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.said = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)


def read_page(path):
    checker = Checker()
    content = path.read_text()
    checker.feed(content)
    checker.close()
    assert checker.open == []
    said = re.sub(r"\s+", " ", " ".join(checker.said[2:]))
    return content, checker, said


def test_one_run(make_run):
    folder = make_run(sample="def f(x):\n    return x < 1 & x > 2\n")
    assert write_report(folder) == folder / "report.html"
    _, checker, said = read_page(folder / "report.html")
    for part in ("20260101-120000_local", "finished", "3.2500", "1.5000", "1 min 23 s", "150.2", "2.50M", "40.00M"):
        assert part in said
    for part in ("81,920", "900 MiB", "routed, ngram", "192", "2.13.0", "stages.1.windows", "128, 512"):
        assert part in said
    assert "def f(x):\n    return x < 1 & x > 2" in checker.said
    # Knock-outs as increases over "full", the largest with the longest bar, the one below zero coloured apart.
    for part in ("+0.5000", "+0.2500", "+1.0000", "-0.0100"):
        assert part in said
    bars = [float(value.split()[1].rstrip("%;")) for name, value in checker.attributes if name == "style"]
    assert bars == [30.0, 15.0, 60.0, 0.6]
    assert ("class", "bar minus") in checker.attributes


def test_the_page_needs_nothing_from_elsewhere(make_run):
    folder = make_run()
    write_report(folder)
    content, checker, _ = read_page(folder / "report.html")
    assert "script" not in checker.tags and "link" not in checker.tags and "a" not in checker.tags
    sources = [value for name, value in checker.attributes if name in ("src", "srcset", "href")]
    assert len(sources) == 4 and all(value.startswith("data:image/png;base64,") for value in sources)
    assert "http://" not in content and "https://" not in content and "url(" not in content and "@import" not in content
    assert "default-src 'none'" in content


def test_the_figure_is_a_picture_of_two_panels(make_run):
    folder = make_run()
    write_report(folder)
    pixels = imread(folder / "loss.png")[..., :3]
    height, width, _ = pixels.shape
    assert width >= 1000 and height >= 400
    coloured = (pixels.max(-1) - pixels.min(-1) > 0.25).any(0)
    assert coloured[: width // 2].sum() > width // 4 and coloured[width // 2 :].sum() > width // 4


def test_text_of_every_kind_is_escaped(make_run, config, result):
    evil = "<script>alert('x')</script>\"&"
    folder = make_run(
        f"{evil[:8]}run",
        config=config | {"preset": evil, "train_glob": evil, evil: evil, "model": {evil: [evil, {"deep": evil}]}},
        environment={"torch": evil, evil: 1, "groups": [{evil: evil}]},
        result=result | {evil: evil, "seconds": evil, "knockout": {"full": 1.0, evil: 2.0}},
        sample=evil,
    )
    write_report(folder)
    content, checker, said = read_page(folder / "report.html")
    assert "script" not in checker.tags and "<script" not in content
    assert said.count(evil) >= 9 and html.escape(evil) in content
    second = make_run("other", environment={"groups": evil})
    assert main([str(folder), str(second), "--out", str(folder / "both")]) == 0
    content, checker, _ = read_page(folder / "both/report.html")
    assert "script" not in checker.tags and "<script" not in content


def test_several_runs_in_one_table(make_run, config, result, lines, tmp_path, capsys):
    first = make_run("a_local", environment={"groups": [{"label": "embed", "lr": 0.3}, {"label": "matrix", "wd": 0.1}]})
    second = make_run(
        "b_local-dense",
        config=config | {"preset": "local-dense", "memories": []},
        result=result | {"val_loss": 3.5, "step_ms": 140.0, "knockout": {}},
        lines=lines(40, 0.25),
    )
    assert main([str(first), str(second), "--out", str(tmp_path / "both")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "both/report.html")
    content, _, said = read_page(tmp_path / "both/report.html")
    assert "2 runs compared" in said and "local-dense" in said and "Parameter groups of local" in said
    differing = re.search(r"differs.*?</table>", content[content.index("</style>") :], re.S)[0]
    assert re.findall(r'<tr class="differs"><td class="value">([^<]*)<', differing) == ["preset", "memories"]
    assert "11 settings that agree" in said
    assert re.findall(r'<span class="best">([^<]*)<', content) == ["3.2500", "140.0"]
    assert (tmp_path / "both/loss.png").stat().st_size > 10_000
    assert not (first / "report.html").exists()


def test_an_unfinished_run(make_run):
    folder = make_run(result=None)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "loss": 3.0, "tok')
    write_report(folder)
    _, _, said = read_page(folder / "report.html")
    assert "unfinished at step 40" in said and "the run has not finished" in said
    assert "cannot be read" not in said  # a line cut short is what a kill leaves behind


@pytest.mark.parametrize("text", ["", '{"step": 1', "\x00\x00\n", "[]\n3\nnull\n{}\n", '{"step": "x", "loss": 1}\n'])
def test_metrics_without_a_line_to_read(make_run, text):
    run = read_run(make_run(result=None, lines=text))
    assert run.lines == [] and len(curves(run, "x").train) == 0
    unread = "metrics.jsonl cannot be read" in " ".join(run.notes)
    assert unread == ("\n" in text)


def test_a_run_before_its_first_step(make_run):
    folder = make_run(result=None, environment=None, lines="")
    write_report(folder)
    _, _, said = read_page(folder / "report.html")
    assert "unfinished" in said and "at step" not in said


def test_broken_lines_and_files_are_named(make_run):
    folder = make_run(config="{", environment="[1]", result='{"val_loss": ')
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('not json\n{"step": 41, "loss": 3.0, "tokens": 1, "seconds": 1}\n')
    write_report(folder)
    _, _, said = read_page(folder / "report.html")
    for part in ("config.json", "environment.json", "result.json", "1 line of metrics.jsonl"):
        assert f"{part} cannot" in said
    assert "unfinished at step 41" in said


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf, "NaN"])
def test_a_loss_that_is_not_finite(make_run, lines, wrong):
    rows = lines(40)
    for row in rows[29:]:
        row |= {"loss": wrong, "val_loss": wrong}
    run = read_run(make_run(result=None, lines=rows))
    assert "The training loss is not finite at step 30." in run.notes
    drawn = curves(run, "x")
    assert np.isfinite(drawn.train.loss).tolist() == [True] * 29 + [False] * 11
    assert imread(io.BytesIO(loss_figure([drawn]))).shape[1] >= 1000


def test_a_run_without_validation(make_run, lines):
    folder = make_run(result={"steps": 40, "seconds": 1.0}, lines=lines(40, every=0))
    write_report(folder)
    assert "Is the memory used?" not in read_page(folder / "report.html")[2]


def test_a_folder_that_is_no_run(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no run folder: it holds neither"):
        write_report(tmp_path / "empty")
    with pytest.raises(UserError, match="is no folder"):
        write_report(tmp_path / "missing")
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_later_line_of_a_step_counts_and_its_lines_are_joined(make_run):
    rows = [
        {"step": 2, "loss": 9.0, "tokens": 20},
        {"step": 1, "loss": 8.0, "tokens": 10},
        {"step": 2, "loss": 7.0, "tokens": 20},
        {"step": 2, "val_loss": 6.0},
    ]
    run = read_run(make_run(lines=rows))
    assert points(run, "loss").loss.tolist() == [8.0, 7.0]
    validated = points(run, "val_loss")
    assert (validated.steps.tolist(), validated.tokens.tolist(), validated.loss.tolist()) == ([2], [20], [6.0])
    assert np.isnan(validated.seconds).all()


def test_smooth_is_an_unbiased_average():
    assert smooth(np.full(9, 2.5), 4.0) == pytest.approx(np.full(9, 2.5))
    # Weights 1, 1/2, 1/4 by age for a span of 2, over their sum; what is not finite weighs nothing.
    assert smooth(np.array([1.0, 3.0, 5.0]), 2.0) == pytest.approx([1.0, 3.5 / 1.5, 6.75 / 1.75])
    assert smooth(np.array([math.nan, 1.0, math.inf, 3.0]), 2.0)[1:] == pytest.approx([1.0, 1.0, 3.25 / 1.25])
    assert math.isnan(smooth(np.array([math.nan, 1.0]), 2.0)[0])
    assert smooth(np.array([1.0, 7.0]), 0.5).tolist() == [1.0, 7.0]


def test_labels_tell_runs_apart(make_run, config):
    runs = [read_run(make_run(name, config=config | extra)) for name, extra in (
        ("t1_local", {}), ("t2_local", {"seed": 1}), ("t3_local", {"seed": 1, "runs_dir": "x"}),
        ("t4_x", {"preset": "local-dense", "memories": []}),
    )]  # fmt: skip
    assert labels([runs[0], runs[3]]) == ["local", "local-dense"]
    assert labels(runs[:2]) == ["local, seed 0", "local, seed 1"]
    assert labels(runs[:3]) == ["t1_local", "t2_local", "t3_local"]
    assert len(set(labels([runs[0], runs[0]]))) == 2
    assert read_run(make_run("t5_docs", config=None)).preset == "docs"


def test_flatten():
    nested = {"a": {"b": 1, "c": {"d": [1, 2]}}, "e": [{"f": 1}, 2], "g": {}}
    assert flatten(nested) == {"a.b": 1, "a.c.d": [1, 2], "e.0.f": 1, "e.1": 2, "g": {}}


def test_each_of_several_memories_knocked_out_alone(make_run, config, result):
    alone = {"off:routed": 3.5, "off:ngram": 3.375}
    several = make_run("a", result=result | {"knockout": result["knockout"] | alone})
    write_report(several)
    _, checker, said = read_page(several / "report.html")
    titles = ("memory off", "ngram alone off", "routed alone off", "mean row", "shuffled rows")
    assert [said.index(title) for title in titles] == sorted(said.index(title) for title in titles)
    bars = [float(value.split()[1].rstrip("%;")) for name, value in checker.attributes if name == "style"]
    assert bars == [30.0, 7.5, 15.0, 15.0, 60.0, 0.6]
    # Beside a run that has one memory, and so no knock-outs of each alone.
    one = make_run("b", config=config | {"seed": 1})
    assert main([str(several), str(one), "--out", str(several / "both")]) == 0
    content, _, said = read_page(several / "both/report.html")
    assert content.count("alone off") == 2 and content.count('<div class="bar') == 10


def test_knock_outs_in_order():
    mixed = ["zebra", "swapped_routes", "off:value", "mean_row", "off", "off:ngram", "off", "new:x"]
    assert in_order(mixed) == ["off", "off:ngram", "off:value", "mean_row", "swapped_routes", "new:x", "zebra"]
    assert in_order([]) == []


def test_increases_over_the_intact_model(result):
    known = {"off": 0.5, "mean_row": 0.25, "shuffled_rows": 1.0, "swapped_routes": -0.01}
    assert increases(result) == pytest.approx(known)
    for knockout in ({}, None, [1], {"off": 1.0}):
        assert increases({"knockout": knockout}) == {}
    assert math.isnan(increases({"knockout": {"full": 1.0, "off": None}})["off"])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("val_loss", 3.14159, "3.1416"), ("seconds", 45.25, "45.2 s"), ("seconds", 200, "3 min 20 s"),
        ("peak_bytes", 3 * 2**30, "3.00 GiB"), ("tokens", 1_234_567, "1,234,567"), ("memory_params", 1.25e6, "1.25M"),
        ("val_bpb", None, "-"), ("val_bpb", math.nan, "nan"), ("step_ms", 1234.56, "1,234.6"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(key, value, expected):
    assert measured(key, value) == expected


def test_duration():
    assert [duration(x) for x in (0.04, 59.94, 60, 3599.4, 3600, 7500)] == [
        "0.0 s", "59.9 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip


def test_settings_as_people_read_them():
    values = (None, True, 0.1 + 0.2, 3e-4, 10, 12345, [1, [2]], (), {"a": None}, "", "x")
    assert list(map(shown, values)) == [
        "-", "yes", "0.30000000000000004", "0.0003", "10", "12,345", "1, 2", "none", "a: -", "(empty)", "x",
    ]  # fmt: skip


def test_markup_is_escaped_once():
    assert text("<&\"'") == "&lt;&amp;&quot;&#x27;"
    assert text(text("<")) == "&lt;"
    assert "&lt;b&gt;" in table(["<b>"], [["<b>", text("x")]]) and "<b>" not in table(["<b>"], [["<b>", "<b>"]])
    assert 'style="width: 0.0%"' in bar(math.nan, 1.0, "<") and bar(1.0, 0.0, "<").count("&lt;") == 1


def test_limits_leave_out_the_first_fall_and_a_divergence():
    fall = np.concatenate([np.linspace(10.0, 4.0, 5), np.linspace(4.0, 3.0, 95)])
    blown = np.concatenate([fall, [1e6, math.nan]])
    empty = Points(*(np.zeros(0),) * 4)
    for losses, top in ((fall, 4.0), (blown, 10.0)):
        low, high = _limits([Line("x", Points(*(np.arange(len(losses)) * 1.0,) * 3, losses), empty)])
        assert low < 3.0 and top <= high < top + 1.0
    assert _limits([Line("x", empty, empty)]) is None


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_many_long_names_and_no_curve_make_a_figure(theme):
    empty = Points(*(np.zeros(0),) * 4)
    one = Points(*(np.array([1.0]),) * 4)
    named = [Line(f"$a_{i}^{{ _ " + "very long name " * 4, one, empty) for i in range(9)]
    for lines in ([Line("x", empty, empty)], named):
        assert imread(io.BytesIO(loss_figure(lines, theme))).shape[1] >= 1000


def test_a_page_made_again_is_the_same(make_run):
    folder = make_run()
    once = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == once
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
