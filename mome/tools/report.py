"""python -m mome report RUN...: what a run was, cost and came to, as loss.png, cost.png and one self-contained page.

Lives here: the page's sections for one run and for several side by side, and the command.
Not here: reading folders (runs.py), drawing (plots.py), markup and style (page.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from mome.errors import UserError
from mome.files import write_atomic
from mome.options import parse
from mome.tools.page import Html, bar, element, page, pairs, picture, section, shown, table
from mome.tools.plots import Cost, Line, cost_figure, loss_figure
from mome.tools.runs import Points, Run, flatten, labels, number, points, read_run, smooth

SPAN = 1 / 25  # a training loss is averaged over this share of the run

# Keys of result.json that have a place of their own: name, unit or "", is less better.
NUMBERS = {
    "val_loss": ("validation loss", "nats/token", True),
    "val_bpb": ("bits per byte", "", True),
    "seconds": ("training time", "", True),
    "step_ms": ("time a step", "ms", True),
    "steps": ("steps", "", None),
    "tokens": ("tokens", "", None),
    "active_params": ("active parameters", "", None),
    "memory_params": ("memory parameters", "", None),
    "peak_bytes": ("peak memory", "", True),
    "world": ("processes", "", None),
}
KNOCKOUTS = {
    "off": ("memory off", "its contribution left out"),
    "mean_row": ("mean row", "every lookup answers with the average row"),
    "shuffled_rows": ("shuffled rows", "every lookup answers with another row"),
    "swapped_routes": ("routes of another sentence", "routers and gates see another micro-row"),
}


def write_report(folder: Path) -> Path:
    """Write loss.png, cost.png and report.html into one run folder, finished or not; returns the page's path. Where no
    step has a time there is no cost.png.

    Errors: UserError when it is no run folder, OSError when it cannot be written.
    """
    return _write([read_run(folder)], folder)


def _write(runs: Sequence[Run], out: Path) -> Path:
    names = labels(runs)
    lines = [curves(run, name) for run, name in zip(runs, names)]
    light, dark = (loss_figure(lines, theme) for theme in ("light", "dark"))
    figure = section("Loss", picture(light, dark, "loss against tokens and against time of training"))
    costs = [cost(run, name) for run, name in zip(runs, names)]
    timed = any(np.isfinite(each.ms).any() for each in costs)
    if timed:
        images = [cost_figure(costs, theme) for theme in ("light", "dark")]
        said = [element("p", words, cls="soft small") for words in map(_moved, runs, names if len(runs) > 1 else [""])]
        drawn = picture(*images, "time of a step, memory and what was read from the disk, over the steps")
        figure = Html(figure + section("Cost of a step", drawn, *said))
        write_atomic(out / "cost.png", images[0])
    one = len(runs) == 1
    title = runs[0].name if one else f"{len(runs)} runs compared"
    body = _one(runs[0], figure) if one else _several(runs, names, figure)
    write_atomic(out / "loss.png", light)
    write_atomic(out / "report.html", page(title, *body))
    return out / "report.html"


def curves(run: Run, label: str) -> Line:
    """A run's smoothed training loss and its validation loss, its final value named in the label."""
    train, val = points(run, "loss"), points(run, "val_loss")
    smoothed = smooth(train.loss, max(1.0, len(train) * SPAN))
    smoothed[[not math.isfinite(x) for x in train.loss]] = math.nan
    final = number(run.result.get("val_loss"))
    label = label if math.isnan(final) else f"{label}: {final:.4f}"
    return Line(label, Points(train.steps, train.tokens, train.seconds, smoothed), val)


def cost(run: Run, label: str) -> Cost:
    """What each step of a run cost, as its lines of metrics tell; its typical time is named in the label."""
    steps, seconds, resident = (_column(run, key) for key in ("step", "seconds", "resident_bytes"))
    ms = 1000 * np.diff(seconds, prepend=0.0)
    # Lines that are lost leave a gap, and a time over it is not one step's.
    ms[(np.diff(steps, prepend=0.0) != 1) | (ms < 0)] = math.nan
    typical = number(run.result.get("step_ms"))
    label = label if math.isnan(typical) else f"{label}: {typical:,.1f} ms"
    return Cost(label, steps, ms, running_median(ms, len(ms) * SPAN), resident, in_all(_column(run, "read_bytes")))


def _column(run: Run, key: str) -> np.ndarray:
    return np.array([number(line.get(key)) for line in run.lines], dtype=np.float64)


def running_median(values: np.ndarray, span: float) -> np.ndarray:
    """Median of about `span` values around each, of three at least; at the ends, of the outermost so many. Values that
    are not finite count nothing: where there are no others it is NaN."""
    half = max(1, int(span / 2))
    firsts = [max(0, min(i - half, len(values) - 2 * half - 1)) for i in range(len(values))]
    windows = [values[first : first + 2 * half + 1] for first in firsts]
    finite = [window[np.isfinite(window)] for window in windows]
    return np.array([np.median(window) if len(window) else math.nan for window in finite], dtype=np.float64)


def in_all(counter: np.ndarray) -> np.ndarray:
    """A process' own counter as one over all processes of a run: where it falls, the run was gone on with by another,
    which counts from 0. NaN stays NaN."""
    total, known = np.full(len(counter), math.nan), np.isfinite(counter)
    grown = np.diff(counter[known], prepend=0.0)
    total[known] = np.cumsum(np.where(grown < 0, counter[known], grown))
    return total


def _moved(run: Run, name: str) -> str:
    """The most memory that lay in RAM after a step, and what went between files and the disk, in words."""
    most = {"resident": _column(run, "resident_bytes")}
    most |= {key: in_all(_column(run, f"{key}_bytes")) for key in ("read", "written")}
    known = {key: measured("peak_bytes", np.nanmax(x)) for key, x in most.items() if np.isfinite(x).any()}
    whose = f"{name}: " if name else ""
    if "resident" not in known:
        return f"{whose}Memory and disk were not recorded."
    disk = " and ".join(f"{known[key]} {key}" for key in ("read", "written") if key in known)
    moved = f"; from and to the disk, since the run began: {disk}" if disk else ""
    return f"{whose}After a step at most {known['resident']} lay in RAM, anonymous and mapped from files{moved}."


def _one(run: Run, figure: Html) -> list[Html]:
    where = [run.preset] + ([f"seed {shown(run.config['seed'])}"] if "seed" in run.config else [])
    tiles = [
        element("div", element("b", measured(key, run.result[key])), element("span", _heading(key)), cls="tile")
        for key in NUMBERS
        if key in run.result
    ]
    parts = [
        element("h1", run.name),
        element("p", _status(run), element("span", "  " + ", ".join(where), cls="soft")),
        *(element("p", note, cls="bad small") for note in run.notes),
        element("div", *tiles, cls="tiles") if tiles else Html(""),
        figure,
        _knockouts([run], [run.preset]),
    ]
    if run.sample.strip():
        parts.append(section("Sample", element("pre", run.sample.strip("\n"))))
    parts += [_cards("Configuration", run.config), _groups(run), _cards("Environment", _environment(run))]
    rest = {key: value for key, value in run.result.items() if key not in NUMBERS and key not in ("knockout", "groups")}
    return [*parts, _cards("Further results", rest)]


def _several(runs: Sequence[Run], names: Sequence[str], figure: Html) -> list[Html]:
    used = [key for key in NUMBERS if any(key in run.result for run in runs)]
    best = {key: _best([run.result.get(key) for run in runs]) for key in used if NUMBERS[key][2]}
    rows = []
    for run, name in zip(runs, names):
        cells = [measured(key, run.result.get(key)) for key in used]
        marked = [
            element("span", cell, cls="best") if key in best and number(run.result.get(key)) == best[key] else cell
            for key, cell in zip(used, cells)
        ]
        rows.append([name, _status(run), *marked])
    head = ["run", "", *map(_heading, used)]
    notes = [element("p", f"{name}: {note}", cls="bad small") for run, name in zip(runs, names) for note in run.notes]
    folders = element("p", "Folders: ", ", ".join(str(run.folder) for run in runs), cls="soft small")
    parts = [
        element("h1", f"{len(runs)} runs compared"),
        *notes,
        section("Results", table(head, rows), folders),
        figure,
        _knockouts(runs, names),
        _settings("Configuration", [run.config for run in runs], names),
    ]
    for run, name in zip(runs, names):
        if run.sample.strip():
            parts.append(section(f"Sample of {name}", element("pre", run.sample.strip("\n"))))
        parts.append(_groups(run, f" of {name}"))
    return [*parts, _settings("Environment", [_environment(run) for run in runs], names)]


def _status(run: Run) -> Html:
    if run.result:
        return element("span", "finished", cls="pill good")
    at = f" at step {run.lines[-1]['step']:,}" if run.lines else ""
    return element("span", f"unfinished{at}", cls="pill bad")


def _heading(key: str) -> str:
    name, unit, _ = NUMBERS[key]
    return f"{name} ({unit})" if unit else name


def _best(values: Sequence[Any]) -> float:
    finite = [x for x in map(number, values) if math.isfinite(x)]
    return min(finite) if len(set(finite)) > 1 else math.nan


def measured(key: str, value: Any) -> str:
    """A number of result.json as people read it, in the unit that NUMBERS names."""
    x = number(value)
    if not math.isfinite(x):
        return "-" if value is None else shown(value)
    if key in ("val_loss", "val_bpb"):
        return f"{x:.4f}"
    if key == "seconds":
        return duration(x)
    if key == "step_ms":
        return f"{x:,.1f}"
    if key == "peak_bytes":
        return f"{x / 2**30:.2f} GiB" if x >= 2**30 else f"{x / 2**20:.0f} MiB"
    if key.endswith("_params"):
        return f"{x / 1e6:,.2f}M"
    return f"{x:,.0f}"


def duration(seconds: float) -> str:
    """45.2 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _knockouts(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """How much worse the validation loss is with the memory broken in one way: a table with bars."""
    found = {name: increases(run.result) for run, name in zip(runs, names)}
    most = max((abs(x) for increase in found.values() for x in increase.values() if math.isfinite(x)), default=0.0)
    rows = []
    for kind in in_order(kind for increase in found.values() for kind in increase):
        title, what = _knockout_words(kind)
        label = Html(element("span", title) + element("div", what, cls="soft small"))
        for name, increase in found.items():
            if kind in increase:
                x = increase[kind]
                run = [name] if len(runs) > 1 else []
                rows.append([label, *run, bar(x, most, f"{x:+.4f}" if math.isfinite(x) else "not finite")])
                label = Html("")
    if not rows:
        return Html("")
    head = ["knock-out", *(["run"] if len(runs) > 1 else []), "increase of the validation loss (nats/token)"]
    full = [(n, number(r.result.get("knockout", {}).get("full"))) for r, n in zip(runs, names) if found[n]]
    base = ", ".join(f"{x:.4f}" if len(runs) == 1 else f"{name} {x:.4f}" for name, x in full)
    where = "the same validation rows" if len(runs) == 1 else "validation rows of its own (--val-rows)"
    said = f"Each on {where}, where the intact model has {base}. What does not rise was not in use."
    return section("Is the memory used?", table(head, rows, numbers=False), element("p", said, cls="soft small"))


def in_order(kinds: Iterable[str]) -> list[str]:
    """Knock-outs, each once, as a reader wants them: in the order of KNOCKOUTS, off:NAME after off, others last."""
    known = list(KNOCKOUTS)

    def place(kind: str) -> tuple[int, str]:
        base = kind.partition(":")[0]
        return known.index(base) if base in known else len(known), kind

    return sorted(set(kinds), key=place)


def _knockout_words(kind: str) -> tuple[str, str]:
    """Title and explanation; of several memories each is also knocked out alone, as off:NAME."""
    if kind.startswith("off:"):
        return f"{kind.removeprefix('off:')} alone off", "its contribution left out, the other memories as they are"
    return KNOCKOUTS.get(kind, (kind, ""))


def increases(result: Mapping[str, Any]) -> dict[str, float]:
    """The knock-outs of a result.json as increases over "full", in nats per token; empty where there are none."""
    knocked = result.get("knockout")
    if not isinstance(knocked, Mapping) or "full" not in knocked:
        return {}
    return {kind: number(x) - number(knocked["full"]) for kind, x in knocked.items() if kind != "full"}


def _environment(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.environment.items() if key != "groups"}


def _groups(run: Run, of: str = "") -> Html:
    """The parameter groups: a list of objects under "groups" of environment.json or result.json, or a ready text."""
    groups = run.environment.get("groups") or run.result.get("groups")
    if isinstance(groups, list) and groups and all(isinstance(group, dict) for group in groups):
        head = list(dict.fromkeys(key for group in groups for key in group))
        rows = [[shown(group.get(key)) for key in head] for group in groups]
        return section(f"Parameter groups{of}", table(head, rows))
    return section(f"Parameter groups{of}", element("pre", groups)) if isinstance(groups, str) else Html("")


def _cards(title: str, values: Mapping[str, Any]) -> Html:
    """The settings of one run: what is nested gets a card of its own."""
    single = {key: value for key, value in values.items() if not isinstance(value, dict) or not value}
    nested = {key: value for key, value in values.items() if isinstance(value, dict) and value}
    cards = [element("div", pairs(flatten(single)))] if single else []
    cards += [element("div", element("h3", key), pairs(flatten(value))) for key, value in nested.items()]
    return section(title, element("div", *cards, cls="cards")) if cards else Html("")


def _settings(title: str, settings: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Html:
    """The settings of several runs: those that differ highlighted, those that agree folded away."""
    flat = [flatten(value) for value in settings]
    keys = list(dict.fromkeys(key for value in flat for key in value))
    absent = object()
    differ = [key for key in keys if any(value.get(key, absent) != flat[0].get(key, absent) for value in flat)]
    same = {key: flat[0][key] for key in keys if key not in differ}
    rows = [[key, *(shown(value[key]) if key in value else "(absent)" for value in flat)] for key in differ]
    parts = [table(["differs", *names], rows, numbers=False, marked=True)] if rows else []
    if same:
        parts.append(element("details", element("summary", f"{len(same)} settings that agree"), pairs(same)))
    return section(title, *parts) if parts else Html("")


@dataclass(frozen=True)
class Options:
    """Write loss.png, cost.png and report.html for a run, or for several runs side by side."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders, finished or not."""
    out: Path | None = None
    """Where to write; the run folder itself for one run, runs/report for several."""


def main(words: Sequence[str]) -> int:
    """The command. Errors: UserError, OSError."""
    options = parse(Options, words, "python -m mome report")
    if not options.runs:
        raise UserError("report needs at least one run folder, such as runs/<time>_local")
    runs = [read_run(folder) for folder in options.runs]
    out = options.out or (options.runs[0] if len(runs) == 1 else Path("runs/report"))
    print(_write(runs, out))
    return 0
