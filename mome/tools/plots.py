"""Figures of loss against tokens and against seconds.

Lives here: curves -> PNG bytes, in light and in dark, with nothing drawn to a screen and no state kept.
Not here: where the numbers come from (runs.py, verdict.py) and where the image goes.
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

    paper, ink, rule = PAPER[theme]
    look = {
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
    with matplotlib.rc_context(look):
        # About 100 characters of legend fit beside each other.
        columns = max(1, min(len(lines) + 3, 100 // (8 + max(len(line.label) for line in lines))))
        height = 4.2 + 0.22 * math.ceil((len(lines) + 3) / columns)
        figure = Figure(figsize=(11, height), dpi=140, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        unit, per_unit = _time_unit(lines)
        counted = "tokens" if any(_any(p.tokens) for line in lines for p in (line.train, line.val)) else "steps"
        palette = COLOURS[theme]
        styles = [
            {"color": palette[i % len(palette)], "linestyle": STYLES[i // len(palette) % len(STYLES)]}
            for i in range(len(lines))
        ]
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
