"""What a comparison of arms over paired seeds says: numbers, a table, a figure.

Lives here: results of finished runs -> one summary an arm, compare.json, compare.md and compare.png.
Not here: training the arms (compare.py), the formulas (stats.py).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mome.errors import UserError
from mome.files import write_atomic, write_json
from mome.tools.plots import Line, loss_figure
from mome.tools.report import curves, in_order, increases
from mome.tools.runs import Points, Run, code_of, number, read_run
from mome.tools.stats import mean, mean_curve, median, paired, paired_ratio, sd

HARDWARE = ("processor", "cores", "threads", "device", "dtype", "torch", "python", "revision")


def summarise(results: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One summary for each arm, in the order given; the first arm is what the others are held against.

    results: arm -> seed -> result.json. Losses in nats per token, times in milliseconds; what cannot be said is NaN.
    Differences and ratios are formed within a seed, over the seeds that the arm shares with the first one.
    Errors: UserError where a result has no val_loss.
    """
    base = next(iter(results.values()))
    rows = []
    for arm, by_seed in results.items():
        for seed, result in by_seed.items():
            if math.isnan(number(result.get("val_loss"))):
                raise UserError(f"{arm}, seed {seed}: result.json has no val_loss, so there is nothing to compare")
        shared = [seed for seed in by_seed if seed in base]
        losses = [number(result["val_loss"]) for result in by_seed.values()]
        test = paired([number(by_seed[s]["val_loss"]) for s in shared], [number(base[s]["val_loss"]) for s in shared])
        times = [[number(side[s].get("step_ms")) for s in shared] for side in (by_seed, base)]
        ratio, least, most = paired_ratio(*times)
        knocked = [increases(result) for result in by_seed.values()]
        kinds = in_order(kind for each in knocked for kind in each)
        rows.append({
            "arm": arm,
            "n": len(losses),
            "val_loss_mean": mean(losses),
            "val_loss_sd": sd(losses),
            "val_bpb_mean": mean([number(result.get("val_bpb")) for result in by_seed.values()]),
            "step_ms_median": median([number(result.get("step_ms")) for result in by_seed.values()]),
            "step_ms_ratio": ratio,
            "step_ms_ratio_min": least,
            "step_ms_ratio_max": most,
            "difference_n": test.n,
            "difference_mean": test.mean,
            "difference_se": test.se,
            "t": test.t,
            "p": test.p,
            "knockout": {kind: mean([each[kind] for each in knocked if kind in each]) for kind in kinds},
        })  # fmt: skip
    return rows


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summaries as a Markdown table whose columns are also aligned for a terminal."""
    kinds = in_order(kind for row in rows for kind in row["knockout"])
    head = ["arm", "n", "val loss", "sd", "bits/byte", "ms/step", "x time", "difference", "se", "t", "p", *kinds]
    cells = [head]
    for i, row in enumerate(rows):
        against = [
            _signed(row["difference_mean"]),
            _fixed(row["difference_se"], 4),
            _fixed(row["t"], 1),
            "-" if math.isnan(row["p"]) else f"{row['p']:.2g}",
        ]
        cells.append([
            row["arm"].replace("|", "\\|"), str(row["n"]),
            _fixed(row["val_loss_mean"], 4), _fixed(row["val_loss_sd"], 4), _fixed(row["val_bpb_mean"], 4),
            _fixed(row["step_ms_median"], 1), _fixed(row["step_ms_ratio"], 3),
            *(against if i else ["-"] * 4),
            *(_signed(row["knockout"].get(kind, math.nan)) for kind in kinds),
        ])  # fmt: skip
    widths = [max(3, *(len(line[k]) for line in cells)) for k in range(len(head))]
    lines = [
        "| " + " | ".join(f"{c:<{w}}" if k == 0 else f"{c:>{w}}" for k, (c, w) in enumerate(zip(line, widths))) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) if k == 0 else "-" * (w + 1) + ":" for k, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _signed(x: float) -> str:
    return "-" if math.isnan(x) else f"{x:+.4f}"


def _fixed(x: float, places: int) -> str:
    return "-" if math.isnan(x) else f"{x:.{places}f}"


def write_verdict(runs: Mapping[str, Mapping[int, Path]], out: Path, asked: Sequence[str]) -> str:
    """Write compare.json, compare.md and compare.png into `out` and return the table, a warning below it.

    runs: arm -> seed -> finished run folder, the first arm being the base; asked: the command's words, for the record.
    Errors: UserError where a run has no val_loss, OSError.
    """
    read = {arm: {seed: read_run(folder) for seed, folder in by_seed.items()} for arm, by_seed in runs.items()}
    rows = summarise({arm: {seed: run.result for seed, run in by_seed.items()} for arm, by_seed in read.items()})
    first = next(iter(next(iter(read.values())).values()))
    record = {
        "command": list(asked),
        "environment": first.environment,
        "warning": code_warning(read),
        "arms": rows,
        "runs": [
            {"arm": arm, "seed": seed, "folder": str(run.folder), "result": run.result}
            for arm, by_seed in read.items()
            for seed, run in by_seed.items()
        ],
    }
    lines = [_line(arm, list(by_seed.values()), row) for (arm, by_seed), row in zip(read.items(), rows)]
    table = as_markdown(rows)
    write_json(out / "compare.json", record)
    write_atomic(out / "compare.png", loss_figure(lines, band="mean over seeds, 1 standard deviation either way"))
    write_atomic(out / "compare.md", _page(record, table))
    return "\n\n".join([table, f"warning: {record['warning']}"] if record["warning"] else [table])


def code_warning(read: Mapping[str, Mapping[int, Run]]) -> str | None:
    """One sentence that names who was trained by which code, where that is not one code for all; else None."""
    trained: dict[tuple[tuple[str, ...], str], dict[str, list[str]]] = {}
    for arm, by_seed in read.items():
        for seed, run in by_seed.items():
            trained.setdefault(code_of(run), {}).setdefault(arm, []).append(str(seed))
    if len(trained) == 1 and all(len(revisions) < 2 for revisions, _ in trained):
        return None
    told = []
    for (revisions, sources), arms in trained.items():
        short = [f"{one.rstrip('+')[:10]}{'+' * one.endswith('+')}" for one in revisions] or ["not recorded"]
        runs = ", ".join(f"{arm} seed {' '.join(seeds)}" for arm, seeds in arms.items())
        told.append(f"revision {' then '.join(short)}, source.zip {sources[:10] or 'not there'}: {runs}")
    sources = {sources for _, sources in trained}
    equal = len(sources) == 1 and sources != {""}
    said = "though their source.zip is the same" if equal else "so a difference may be the code's and not the arm's"
    return f"the runs do not come from one revision of the code, {said} ({'; '.join(told)})"


def _line(arm: str, runs: Sequence[Run], row: Mapping[str, Any]) -> Line:
    """An arm's curves: the mean over seeds of tokens, seconds and loss at each step that all its runs logged."""
    each = [curves(run, arm) for run in runs]
    return Line(f"{arm}: {row['val_loss_mean']:.4f}", *(_mean([getattr(c, k) for c in each]) for k in ("train", "val")))


def _mean(curves: Sequence[Points]) -> Points:
    by_step = [{int(s): x for s, *x in zip(c.steps, c.tokens, c.seconds, c.loss)} for c in curves]
    steps, centre, spread = mean_curve(by_step)
    columns = centre.reshape(-1, 3).T
    return Points(steps.astype(float), *columns, spread.reshape(-1, 3).T[2])


def _page(record: Mapping[str, Any], table: str) -> str:
    rows, environment = record["arms"], record["environment"]
    results = [run["result"] for run in record["runs"]]
    lengths = sorted({f"{number(r.get('steps')):,.0f} steps, {number(r.get('tokens')):,.0f} tokens" for r in results})
    equal = f"Every run: {lengths[0]}." if len(lengths) == 1 else f"The runs differ in length: {'; '.join(lengths)}."
    warning = f"\n**Warning:** {record['warning']}.\n" if record["warning"] else ""
    ran = "\n".join(f"- {run['arm']}, seed {run['seed']}: `{run['folder']}`" for run in record["runs"])
    return f"""# Comparison of {len(rows)} arms

    {shlex.join(record["command"])}

{table}
{warning}
Differences are to the first arm, `{rows[0]["arm"]}`, within a seed: mean, standard error, t = mean / standard error,
two-sided p of the paired t-test. "x time" is the median of the ratios of milliseconds a step within a seed. The last
columns say by how much the validation loss rises when the memory is broken in that way, off:NAME being that memory
alone left out. Losses in nats per token.

{equal}

![loss against tokens and against time](compare.png)

Machine: {", ".join(f"{key} {environment[key]}" for key in HARDWARE if key in environment) or "not recorded"}.

All runs, none left out:

{ran}
"""
