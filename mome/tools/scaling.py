"""python -m mome scaling RUNS... --against KEY: loss and time against a setting, over paired seeds, fitted and plotted.

Lives here: which runs may be set beside each other, what is measured and said of them, scaling.md, .json and .png.
Not here: training them (compare.py, a loop in the shell), the formulas (fit.py, stats.py), the figure (plots.py).
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from mome.config import differences, flat, nearest
from mome.errors import UserError
from mome.files import write_atomic, write_json
from mome.options import parse
from mome.runfolder import FREE_KEYS
from mome.tools.fit import Fit, block_line, interval
from mome.tools.page import shown
from mome.tools.plots import Series, scaling_figure
from mome.tools.runs import Run, number, read_run
from mome.tools.stats import mean, median, paired, sd
from mome.tools.verdict import HARDWARE, code_warning

CERTAIN = 0.05  # a p below it counts as evidence
Groups = Mapping[float, Mapping[int, Run]]  # value of the setting -> seed -> run, both ascending


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at these paths, each once: run folders, and folders that hold some. Errors: UserError, naming a path
    without runs, or a run that has no result."""
    folders: dict[Path, Path] = {}
    for path in paths:
        inside = [path] if (path / "config.json").exists() else []
        if not inside and path.is_dir():
            # A name with a leading dot is a folder that is still being made.
            inside = sorted(one.parent for one in path.glob("*/config.json") if not one.parent.name.startswith("."))
        if not inside:
            raise UserError(f"{path} is no run folder and holds none; give runs/<time>_<preset>, or a folder of those")
        for folder in inside:
            folders.setdefault(folder.resolve(), folder)
    runs = [read_run(folder) for folder in folders.values()]
    for run in runs:
        if not math.isfinite(number(run.result.get("val_loss"))):
            remedy = f"finish it (python train_gpt.py --resume {run.folder}) or leave it out"
            what = "no validation loss in result.json" if run.result else "no result.json that can be read"
            raise UserError(f"{run.folder} has {what}: {remedy}")
    return runs


def group(runs: Sequence[Run], key: str) -> Groups:
    """Runs by the value of a dotted key of their configuration, then by seed.

    Errors: UserError for a key that is not there, for values that are no numbers above 0, for fewer than two of them,
    where runs differ in more than key, seed and runs_dir (or in their data), and where no seed has two values.
    """
    found: dict[float, dict[int, Run]] = {}
    for run in runs:
        config = flat(run.config)
        if key not in config:
            raise UserError(f"--against {key}: {run.folder} has no such setting{nearest(key, config)}")
        value = config[key]
        if not 0 < number(value) < math.inf or key == "seed":
            fault = "seeds are what runs are paired by" if key == "seed" else "a scale has numbers above 0"
            raise UserError(f"--against {key}: {run.folder} has {value!r}, and {fault}")
        if wrong := differences(_fixed(runs[0], key), _fixed(run, key)):
            raise UserError(
                f"{runs[0].folder} and {run.folder} differ in more than {key} and the seed ({'; '.join(wrong)}); "
                "leave one of them out"
            )
        twin = found.setdefault(value, {}).setdefault(config.get("seed", 0), run)
        if twin is not run:
            raise UserError(f"{twin.folder} and {run.folder} have one {key} and one seed; leave one of them out")
    if len(found) < 2:
        raise UserError(
            f"--against {key}: {len(runs)} run{'s' * (len(runs) > 1)}, and {shown(next(iter(found)))} in all of them: "
            "a line needs two values or more"
        )
    seeds = [seed for by_seed in found.values() for seed in by_seed]
    if len(set(seeds)) == len(seeds):
        raise UserError(f"--against {key}: no seed was trained at two values; runs are paired by their seed")
    return {value: dict(sorted(found[value].items())) for value in sorted(found)}


def _fixed(run: Run, key: str) -> dict[str, Any]:
    """What must be the same in all runs."""
    config = {name: value for name, value in flat(run.config).items() if name not in (key, "seed", *FREE_KEYS)}
    return config | {"data": run.environment.get("data")}


def measure(groups: Groups) -> dict[str, Any]:
    """All numbers, for scaling.json: losses in nats per token, times in milliseconds a step; NaN: cannot be said.

    "values": one for each; "steps": from each value to the next; "tail": from the least value after which there is
    evidence of a loss, or else none of a gain, to the last; "loss": loss = a - b log10(value); "time": the median
    times = a + c log2(value). A gain is a fall of the loss, within a seed; se and p are those of its own pairs,
    pooled_se and what follows from it (low, high) come from the scatter of all runs: few pairs alone tell little.
    """
    values = list(groups)
    rows = [_row(value, [run.result for run in by_seed.values()]) for value, by_seed in groups.items()]
    points = [
        (math.log10(value), number(run.result["val_loss"]), seed)
        for value, by_seed in groups.items()
        for seed, run in by_seed.items()
    ]
    line = block_line(*zip(*points))
    steps = [_gain(groups, low, high, line) for low, high in itertools.pairwise(values)]
    tails = (_gain(groups, value, values[-1], line) for value in reversed(values[:-1]))
    unsure = list(itertools.takewhile(lambda tail: not tail["low"] > 0, tails))
    # A gain before a loss of the same size would hide it.
    lost = [tail for tail in unsure if tail["high"] < 0]
    low, high = (-math.log10(2.0) * end for end in reversed(line.interval()))
    timed = [row for row in rows if not math.isnan(row["step_ms_median"])]
    return {
        "values": rows,
        "steps": steps,
        "tail": next(reversed(lost or unsure), None),
        "loss": {
            "a": line.intercept, "b": -line.slope, "b_se": line.se, "df": line.df, "seeds": line.blocks, "runs": line.n,
            "doubling": -line.slope * math.log10(2.0), "doubling_low": low, "doubling_high": high,
            "bend_f": line.bend, "bend_p": line.bend_p, "scatter": line.scatter, "scatter_df": line.scatter_df,
        },
        "time": _time(timed) if len(timed) > 1 else None,
    }  # fmt: skip


def _row(value: float, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    losses, bits, times = ([number(one.get(key)) for one in results] for key in ("val_loss", "val_bpb", "step_ms"))
    known = [ms for ms in times if math.isfinite(ms)]
    return {
        "value": value, "n": len(losses), "val_loss_mean": mean(losses), "val_loss_sd": sd(losses),
        "val_bpb_mean": mean(bits), "step_ms_median": median(known),
        "step_ms_min": min(known, default=math.nan), "step_ms_max": max(known, default=math.nan),
    }  # fmt: skip


def _gain(groups: Groups, low: float, high: float, line: Fit) -> dict[str, Any]:
    """What the loss falls by from one value to another, over the seeds that have both; pooled_se: the scatter times
    sqrt(2 / pairs)."""
    before, after = (groups[value] for value in (low, high))
    shared = [seed for seed in before if seed in after]
    test = paired(*([number(side[seed].result["val_loss"]) for seed in shared] for side in (before, after)))
    pooled = line.scatter * math.sqrt(2 / test.n) if test.n else math.nan
    ends = interval(test.mean, pooled, line.scatter_df)
    return {
        "from": low, "to": high, "doublings": math.log2(high / low), "n": test.n, "gain": test.mean, "se": test.se,
        "p": test.p, "pooled_se": pooled, "low": ends[0], "high": ends[1],
    }  # fmt: skip


def _time(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    x, y = [math.log2(row["value"]) for row in rows], [row["step_ms_median"] for row in rows]
    line = block_line(x, y, [0] * len(x))
    low, high = line.interval()
    most = max(row["step_ms_max"] / row["step_ms_min"] for row in rows)
    return {
        "a": line.intercept, "doubling": line.slope, "doubling_se": line.se, "df": line.df, "doubling_low": low,
        "doubling_high": high, "doubling_share": line.slope / mean(y), "most_ratio_of_one_value": most,
    }  # fmt: skip


def sentences(key: str, measured: Mapping[str, Any]) -> list[str]:
    """What the numbers say, and what they do not."""
    line = _of_the_line(key, measured["loss"], len(measured["values"]))
    return [*line, _of_the_tail(measured), _of_the_time(measured)]


def _of_the_line(key: str, line: Mapping[str, Any], values: int) -> list[str]:
    known = not math.isnan(line["b_se"])
    error = f"b has a standard error of {line['b_se']:.4f}" if known else "b has no error to be stated"
    seeds = f"{line['runs']} runs of {values} values and {line['seeds']} seed{'s' * (line['seeds'] != 1)}"
    said = [f"loss = {line['a']:.4f} - b log10({key}) with b = {line['b']:.4f}; {error} ({seeds}, each seed with an "
            f"offset of its own, {line['df']} degrees of freedom)."]  # fmt: skip
    low, high = line["doubling_low"], line["doubling_high"]
    between = f" (95 % confidence: {low:+.4f} to {high:+.4f})" if known else ""
    nothing = ": no evidence of a gain" if known and low <= 0 <= high else ""
    said.append(f"On that line a doubling gains {line['doubling']:+.4f} nats a token{between}{nothing}.")
    p = line["bend_p"]
    if p < CERTAIN:
        said.append(
            f"But the points leave the line (lack of fit: F = {line['bend_f']:.1f}, p = {p:.2g}): its slope is an "
            "average over these values, and holds neither within nor beyond them."
        )
    elif not math.isnan(p):
        said.append(f"No evidence that the points leave the line (lack of fit: F = {line['bend_f']:.1f}, p = {p:.2g}).")
    return said


def _of_the_tail(measured: Mapping[str, Any]) -> str:
    tail, line = measured["tail"], measured["loss"]
    step = tail or measured["steps"][-1]
    many = round(step["doublings"], 2)
    last = "All" if step["from"] == measured["values"][0]["value"] else "The last"
    which = "The last doubling" if many == 1 else f"{last} {many:g} doublings"
    change = f"{which} ({shown(step['from'])} to {shown(step['to'])}) gained {step['gain']:+.4f}"
    pairs = f"{step['n']} pair{'s' * (step['n'] != 1)}"
    on_line = f"on the line {step['doublings'] * line['doubling']:+.4f}"
    if math.isnan(step["low"]):
        return f"{change} ({pairs}; {on_line}): runs of two seeds or more would tell the error; no evidence either way."
    error = f" +- {step['pooled_se']:.4f} ({pairs}, standard error from the scatter of all runs, {line['scatter_df']}"
    error += f" degrees of freedom; 95 % confidence: {step['low']:+.4f} to {step['high']:+.4f}; {on_line})"
    if tail is None:
        return f"{change}{error}: evidence of a gain to the end."
    return f"{change}{error}: {'evidence of a loss' if step['high'] < 0 else 'no evidence of a gain'}."


def _of_the_time(measured: Mapping[str, Any]) -> str:
    time = measured["time"]
    if time is None:
        return "Times were not recorded at two values, so what a doubling costs is not known."
    known = not math.isnan(time["doubling_se"])
    low, high = time["doubling_low"], time["doubling_high"]
    between = f" (95 % confidence: {low:+.2f} to {high:+.2f})" if known else ""
    nothing = ": no evidence of a cost" if known and low <= 0 <= high else ""
    return (
        f"A doubling costs {time['doubling']:+.2f} ms a step, {time['doubling_share']:+.1%} of a step's time{between}"
        f"{nothing}. Times are only as good as the machine was quiet: of one value, the slowest run took up to "
        f"{time['most_ratio_of_one_value']:.2f} times as long a step as the fastest."
    )


def as_markdown(key: str, measured: Mapping[str, Any]) -> str:
    """A line for each value: how its runs did, and what the loss gained since the value before."""
    head = [key, "n", "val loss", "sd", "bits/byte", "ms/step", "doublings", "gain", "se", "p"]
    cells = [head]
    for row, step in zip(measured["values"], [None, *measured["steps"]]):
        gained = ["-"] * 4
        if step:
            p = "-" if math.isnan(step["p"]) else f"{step['p']:.2g}"
            gained = [f"{round(step['doublings'], 2):g}", _places(step["gain"], "+.4f"), _places(step["se"], ".4f"), p]
        cells.append([
            shown(row["value"]), str(row["n"]), _places(row["val_loss_mean"], ".4f"),
            _places(row["val_loss_sd"], ".4f"), _places(row["val_bpb_mean"], ".4f"),
            _places(row["step_ms_median"], ",.1f"), *gained,
        ])  # fmt: skip
    widths = [max(3, *(len(line[k]) for line in cells)) for k in range(len(head))]
    lines = ["| " + " | ".join(f"{cell:>{width}}" for cell, width in zip(line, widths)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]])


def _places(x: float, form: str) -> str:
    return "-" if math.isnan(x) else f"{x:{form}}"


def write_scaling(runs: Sequence[Run], key: str, out: Path, asked: Sequence[str]) -> str:
    """Write scaling.md, scaling.json and scaling.png into `out`; returns the table and what it says.

    asked: the command's words, for the record. Errors: UserError as of `group`, OSError.
    """
    groups = group(runs, key)
    measured = measure(groups)
    table, said = as_markdown(key, measured), sentences(key, measured)
    warning = code_warning({f"{key} {shown(value)}": by_seed for value, by_seed in groups.items()})
    first = next(iter(next(iter(groups.values())).values()))
    record = {
        "command": list(asked), "against": key, **measured, "said": said, "warning": warning,
        "environment": first.environment,
        "runs": [
            {"value": value, "seed": seed, "folder": str(run.folder), "result": run.result}
            for value, by_seed in groups.items()
            for seed, run in by_seed.items()
        ],
    }  # fmt: skip
    write_json(out / "scaling.json", record)
    write_atomic(out / "scaling.png", _figure(key, groups, measured))
    write_atomic(out / "scaling.md", _page(record, table))
    return "\n\n".join([table, "\n".join(said), *([f"warning: {warning}"] if warning else [])])


def _figure(key: str, groups: Groups, measured: Mapping[str, Any]) -> bytes:
    series = []
    for seed in sorted({seed for by_seed in groups.values() for seed in by_seed}):
        runs = [(value, by_seed[seed].result) for value, by_seed in groups.items() if seed in by_seed]
        columns = [(value, number(found["val_loss"]), number(found.get("step_ms"))) for value, found in runs]
        series.append(Series(f"seed {seed}", *np.array(columns, dtype=np.float64).T))
    ends = np.array([min(groups), max(groups)], dtype=np.float64)
    line, time = measured["loss"], measured["time"]
    times = [] if time is None else np.stack([ends, time["a"] + time["doubling"] * np.log2(ends)], 1)
    return scaling_figure(key, series, np.stack([ends, line["a"] - line["b"] * np.log10(ends)], 1), np.array(times))


def _page(record: Mapping[str, Any], table: str) -> str:
    key, environment = record["against"], record["environment"]
    warning = f"\n**Warning:** {record['warning']}.\n" if record["warning"] else ""
    said = "\n".join(f"- {one}" for one in record["said"])
    ran = "\n".join(f"- {key} {shown(run['value'])}, seed {run['seed']}: `{run['folder']}`" for run in record["runs"])
    result = record["runs"][0]["result"]
    length = f"{number(result.get('steps')):,.0f} steps, {number(result.get('tokens')):,.0f} tokens"
    return f"""# Loss against {key}

    {shlex.join(record["command"])}

{table}
{warning}
{said}

Losses in nats per token, the mean over n seeds and their standard deviation; "ms/step" is the median over seeds of the
typical time of a step. A gain is the fall of the loss since the value before, within a seed: mean, standard error,
two-sided p of the paired t-test, which few seeds leave weak. The scatter of all runs is what a value's mean and a
seed's offset leave of their losses. Every run: {length}.

![loss and milliseconds a step against {key}](scaling.png)

Machine: {", ".join(f"{name} {environment[name]}" for name in HARDWARE if name in environment) or "not recorded"}.

All runs, none left out:

{ran}
"""


@dataclass(frozen=True)
class Options:
    """Set finished runs that differ in one setting, and in their seeds, beside each other, and fit a line."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders, or folders that hold some."""
    against: str
    """The setting, a dotted key of config.json, such as memory.ngram.rows."""
    out: Path = Path("runs/scaling")
    """Where scaling.md, scaling.json and scaling.png go."""


def main(words: Sequence[str]) -> int:
    """The command. Errors: UserError, OSError."""
    options = parse(Options, words, "python -m mome scaling")
    if not options.runs:
        raise UserError("scaling needs run folders, or a folder that holds some, such as runs")
    runs = find_runs(options.runs)
    key = options.against.replace("-", "_")
    print(write_scaling(runs, key, options.out, ["python", "-m", "mome", "scaling", *words]))
    print(f"{options.out}/scaling.md, scaling.json and scaling.png")
    return 0
