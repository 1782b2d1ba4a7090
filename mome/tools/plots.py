"""Figures: loss against tokens and seconds, the cost of a step, loss and time against a setting.

Lives here: curves -> PNG bytes, in light and in dark, with nothing drawn to a screen and no state kept.
Not here: where the numbers come from (runs.py, report.py, verdict.py, scaling.py) and where the image goes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mome.tools.runs import Points

# Wong's colour-blind-safe palette without its black and yellow, ordered so that neighbours differ in lightness.
COLOURS = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#4fa3d8"),
    "dark": ("#4fb0f0", "#ff8b45", "#3fd0a2", "#e08bc4", "#e8bd4d", "#9fd3f5"),
}
PAPER = {"light": ("#ffffff", "#24292f", "#d8dee4"), "dark": ("#171b22", "#d5dae1", "#363d47")}
STYLES = ("-", "--", "-.", ":")
START = 0.05  # the share of a run whose steep fall may leave the picture, so that the end can be told apart


@dataclass(frozen=True)
class Line:
    """One run, or the mean of several: its training curve (smoothed) and its validation curve; either may be empty."""

    label: str
    train: Points
    val: Points


@dataclass(frozen=True)
class Cost:
    """What the steps of a run cost: float64 [n] each, NaN where nothing is known."""

    label: str
    steps: np.ndarray
    ms: np.ndarray  # milliseconds of the step
    typical: np.ndarray  # their running median
    resident: np.ndarray  # bytes in RAM after the step, anonymous and file-mapped
    read: np.ndarray  # bytes read from the disk so far


@dataclass(frozen=True)
class Series:
    """The runs of one seed over the values of a setting, ascending: float64 [n] each."""

    label: str
    values: np.ndarray
    loss: np.ndarray  # nats per token
    ms: np.ndarray  # milliseconds a step; NaN where not known


def loss_figure(lines: Sequence[Line], theme: str = "light", band: str = "") -> bytes:
    """PNG of two panels, loss against tokens and against seconds of training, with one legend below.

    theme: "light" or "dark"; band: what the shaded width means, said in the legend. Curves that hold no finite number
    are left out; the first step with a loss that is not finite is marked.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter, MaxNLocator

    with matplotlib.rc_context(_look(theme)):
        columns, rows = _legend_size([line.label for line in lines])
        figure = Figure(figsize=(11, 4.2 + 0.22 * rows), dpi=140, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        unit, per_unit = _time_unit(lines)
        counted = "tokens" if any(_any(p.tokens) for line in lines for p in (line.train, line.val)) else "steps"
        ink, styles = PAPER[theme][1], _styles(len(lines), theme)
        for panel, across in zip(panels, (counted, "seconds")):
            for line, style in zip(lines, styles):
                scale = per_unit if across == "seconds" else 1.0
                _draw(panel, line.train, across, scale, style | {"linewidth": 1.0, "alpha": 0.55})
                _draw(panel, line.val, across, scale, style | {"linewidth": 1.9, "marker": "o", "markersize": 4.5})
            panel.xaxis.set_major_locator(MaxNLocator(6))
            panel.set_xlim(left=0)
        panels[0].xaxis.set_major_formatter(EngFormatter(sep=""))
        panels[0].set_xlabel(_tokens_label(lines) if counted == "tokens" else "steps")
        panels[1].set_xlabel(f"time of training ({unit})")
        panels[0].set_ylabel("loss (nats per token)")
        limits = _limits(lines)
        if limits:
            panels[0].set_ylim(*limits)
        else:
            panels[0].text(0.5, 0.5, "no loss recorded yet", transform=panels[0].transAxes, ha="center", alpha=0.7)
        handles = [Line2D([], [], **style, linewidth=2.4, label=line.label) for line, style in zip(lines, styles)]
        if any(_any(line.val.loss) for line in lines):
            handles.append(Line2D([], [], color=ink, linewidth=1.9, marker="o", markersize=4.5, label="validation"))
        if any(_any(line.train.loss) for line in lines):
            handles.append(Line2D([], [], color=ink, linewidth=1.0, alpha=0.55, label="training, smoothed"))
        if band and any(line.val.spread is not None and _any(line.val.spread) for line in lines):
            handles.append(Patch(color=ink, alpha=0.16, label=band))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
        return _png(figure)


def cost_figure(costs: Sequence[Cost], theme: str = "light") -> bytes:
    """PNG of milliseconds a step over the steps and, where a run knows it, of its resident memory below them, with the
    bytes that it read from the disk on an axis of their own to the right.

    theme: "light" or "dark". A step that is far slower than the running median may leave the picture.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(_look(theme)):
        ink, styles = PAPER[theme][1], _styles(len(costs), theme)
        memory = any(_any(cost.resident) for cost in costs)
        disk = memory and any(_any(cost.read) for cost in costs)
        columns, rows = _legend_size([cost.label for cost in costs])
        figure = Figure(figsize=(11, (5.4 if memory else 3.2) + 0.22 * rows), dpi=140, layout="constrained")
        panels = figure.subplots(2 if memory else 1, 1, sharex=True, squeeze=False)[:, 0]
        for cost, style in zip(costs, styles):
            panels[0].plot(cost.steps, cost.ms, **style | {"linestyle": "-"}, linewidth=0.7, alpha=0.3)
            panels[0].plot(cost.steps, cost.typical, **style, linewidth=1.9)
        panels[0].set_ylim(0, 1.5 * max((np.nanmax(c.typical) for c in costs if _any(c.typical)), default=1.0))
        panels[0].set_ylabel("milliseconds a step")
        handles = [Line2D([], [], **style, linewidth=2.4, label=cost.label) for cost, style in zip(costs, styles)]
        handles.append(Line2D([], [], color=ink, linewidth=0.7, alpha=0.5, label="each step"))
        if memory:
            panels[1].set_ylabel(_draw_bytes(panels[1], costs, "resident", styles, "resident memory"))
        if disk:
            right = panels[1].twinx()
            dotted = [style | {"linestyle": ":"} for style in styles]
            right.set_ylabel(_draw_bytes(right, costs, "read", dotted, "read from the disk"))
            right.grid(False)
            handles.append(Line2D([], [], color=ink, linestyle=":", linewidth=1.9, label="read from the disk"))
        panels[-1].set_xlabel("steps")
        panels[-1].set_xlim(left=0)
        panels[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
        return _png(figure)


def _draw_bytes(panel, costs: Sequence[Cost], key: str, styles: Sequence[dict], title: str) -> str:
    """Draw bytes from 0 up in a unit that suits the most of them; returns the axis' label."""
    most = max(np.nanmax(getattr(cost, key)) for cost in costs if _any(getattr(cost, key)))
    unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    for cost, style in zip(costs, styles):
        panel.plot(cost.steps, getattr(cost, key) / size, **style, linewidth=1.9)
    panel.set_ylim(0, 1.12 * most / size or 1.0)
    return f"{title} ({unit})"


def scaling_figure(name: str, series: Sequence[Series], loss_line: np.ndarray, ms_line: np.ndarray) -> bytes:
    """PNG of two panels, loss and milliseconds a step against the setting `name` on a logarithmic axis.

    loss_line, ms_line: [n, 2] points of the fitted lines, drawn through the runs of every seed; empty: none.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter, NullLocator

    values = sorted({float(x) for one in series for x in one.values})
    with matplotlib.rc_context(_look("light")):
        ink, styles = PAPER["light"][1], _styles(len(series), "light")
        figure = Figure(figsize=(11, 4.6), dpi=140, layout="constrained")
        panels = figure.subplots(1, 2)
        for panel, key, line in zip(panels, ("loss", "ms"), (loss_line, ms_line)):
            for one, style in zip(series, styles):
                look = style | {"linewidth": 0.9, "alpha": 0.75, "marker": "o", "markersize": 5}
                panel.plot(one.values, getattr(one, key), **look)
            if len(line):
                panel.plot(*line.T, color=ink, linewidth=2.2, linestyle="--")
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(NullLocator())
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xticks(values[:: math.ceil(len(values) / 10)])
            panel.set_xticklabels([_power(value) for value in panel.get_xticks()])
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.set_xlabel(name)
        panels[0].set_ylabel("validation loss (nats per token)")
        panels[1].set_ylabel("milliseconds a step")
        panels[1].set_ylim(bottom=0)
        handles = [Line2D([], [], **s, linewidth=1.6, marker="o", label=one.label) for one, s in zip(series, styles)]
        handles.append(Line2D([], [], color=ink, linewidth=2.2, linestyle="--", label="fitted line"))
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8), frameon=False)
        return _png(figure)


def _power(value: float) -> str:
    """A value for an axis: 2^12, or the number where it is no such power."""
    exponent = math.log2(value)
    return f"2^{exponent:.0f}" if exponent.is_integer() and exponent >= 10 else f"{value:,g}"


def _look(theme: str) -> dict:
    """The settings of a figure in one theme."""
    paper, ink, rule = PAPER[theme]
    return {
        "font.family": ["DejaVu Sans"],
        "font.size": 10,
        "text.color": ink,
        "text.parse_math": False,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.edgecolor": rule,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": rule,
        "grid.linewidth": 0.6,
        "axes.facecolor": paper,
        "figure.facecolor": paper,
    }


def _styles(count: int, theme: str) -> list[dict]:
    """A colour and a dash for each of so many lines."""
    palette = COLOURS[theme]
    return [
        {"color": palette[i % len(palette)], "linestyle": STYLES[i // len(palette) % len(STYLES)]} for i in range(count)
    ]


def _legend_size(labels: Sequence[str]) -> tuple[int, int]:
    """Columns and rows of a legend of so many labels and three more: about 100 characters fit beside each other."""
    columns = max(1, min(len(labels) + 3, 100 // (8 + max(map(len, labels)))))
    return columns, math.ceil((len(labels) + 3) / columns)


def _png(figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _draw(panel, curve: Points, across: str, scale: float, style: dict) -> None:
    x = getattr(curve, across) / scale
    if not _any(x) or not _any(curve.loss):
        return
    panel.plot(x, curve.loss, **style, label="_")
    if curve.spread is not None:
        low, high = curve.loss - curve.spread, curve.loss + curve.spread
        panel.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
    wrong = x[~np.isfinite(curve.loss) & np.isfinite(x)]
    if len(wrong):
        panel.axvline(wrong[0], color=style["color"], linewidth=1, linestyle=":", alpha=0.8)
        panel.text(
            wrong[0], 0.98, " not finite", transform=panel.get_xaxis_transform(), va="top", color=style["color"], size=8
        )


def _any(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())


def _time_unit(lines: Sequence[Line]) -> tuple[str, float]:
    curves = [curve.seconds for line in lines for curve in (line.train, line.val)]
    last = max((seconds[np.isfinite(seconds)].max(initial=0.0) for seconds in curves), default=0.0)
    return ("hours", 3600.0) if last > 3 * 3600 else ("minutes", 60.0) if last > 300 else ("seconds", 1.0)


def _tokens_label(lines: Sequence[Line]) -> str:
    """Says how many tokens a step has, where that is one number for all."""
    rates = {round(t / s, 6) for n in lines for p in (n.train, n.val) for t, s in zip(p.tokens, p.steps) if s > 0}
    whole = len(rates) == 1 and float(next(iter(rates))).is_integer()
    return f"tokens of training ({int(next(iter(rates))):,} a step)" if whole else "tokens of training"


def _limits(lines: Sequence[Line]) -> tuple[float, float] | None:
    """Loss range that shows everything after the first fall, and no more than where the runs began."""
    curves = [p.loss[np.isfinite(p.loss)] for line in lines for p in (line.train, line.val)]
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return None
    low = min(curve.min() for curve in curves)
    tops = [curve[min(len(curve) - 1, math.ceil(len(curve) * START)) :].max() for curve in curves]
    high = min(max(tops), max(curve[0] for curve in curves))
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.1
    return low - pad, high + pad
