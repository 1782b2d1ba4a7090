"""A plan, and a table of many numbers of ranks, as text: on the terminal and as Markdown.

Lives here: sections with their columns, notes and what they mean. Not here: any number (counted.py, ranks.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mome.dense import MOST_PADDED
from mome.tools.bench.output import print_table
from mome.tools.plan.counted import Plan
from mome.tools.plan.links import Node
from mome.tools.plan.memory import FLOAT, gb
from mome.tools.plan.ranks import HOT, OWNERS, TRAFFIC, Line, hot_cells, owner_cells, traffic_cells
from mome.world import ORDER

# Share of the bytes from which replicas would be worth their code.
WORTH = 0.01


@dataclass(frozen=True)
class Section:
    """A table with its title, its notes below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def show(sections: Sequence[Section]) -> None:
    for one in sections:
        print_table(one.title, one.columns, one.rows, one.notes)
        print()


def markdown(title: str, command: str, sections: Sequence[Section]) -> str:
    """A page. command: what made it."""
    parts = [f"# {title}", f"    {command}"]
    for one in sections:
        lines = ["| " + " | ".join(one.columns) + " |", "|---" + "|---:" * (len(one.columns) - 1) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in one.rows]
        parts += [f"## {one.title}", "\n".join(lines), *(f"- {note}" for note in one.notes)]
    return "\n\n".join(parts) + "\n"


def sections_of(plan: Plan, node: Node) -> list[Section]:
    """A plan in reading order: what it is, memory, rows, wire, owners, the released path, time, verdict."""
    found = [memory_of(plan, node), wire_section(plan)]
    if plan.tables:
        found[1:1] = [rows_of(plan), owners_of(plan)]
        found.append(schemes_of(plan))
    return [*found, time_of(plan, node)]


def head_of(plan: Plan) -> str:
    shape = plan.shape
    epochs = plan.cycles * plan.counted * shape.rank_tokens / plan.tokens_count
    again = f", so that it was read {epochs:.1f} times over" if epochs > 1 else ""
    who = "all ranks" if plan.counted == plan.size else f"{plan.counted} of {plan.size} ranks"
    return (
        f"{plan.config.preset} on {plan.size} GPUs: a cycle is {many(shape.steps, 'step')}, a step {shape.rank_rows} "
        f"micro-rows of {shape.tokens:,} tokens a GPU ({plan.size * shape.rank_rows * shape.tokens:,} in all); "
        f"rows counted in {plan.cycles} cycles of {plan.tokens_name} ({plan.tokens_count:,} tokens{again}), by the ids "
        f"of {who}"
    )


def many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def memory_of(plan: Plan, node: Node) -> Section:
    held = plan.memory
    rows = [(kind, gb(size), f"{size:,}") for kind, size in held.gpu.items()]
    rows.append(("all on the GPU", gb(sum(held.gpu.values())), f"{sum(held.gpu.values()):,}"))
    rows += [(f"{kind}, host memory", gb(size), f"{size:,}") for kind, size in held.host.items()]
    rows += [(f"{kind}, files", gb(size), f"{size:,}") for kind, size in held.file.items()]
    room = f"a GPU has {gb(node.memory)}, of which {gb(node.kept_free)} are kept free"
    return Section("Memory a GPU, of the rank that has the most", ("kind", "", "bytes"), rows, [room, *plan.verdict])


def rows_of(plan: Plan) -> Section:
    columns = ("table", "distinct rows a rank", "at most counted", "capacity", "capacity on the wire", "rows owned",
               "touched by all")  # fmt: skip
    rows, notes = [], ["capacity: rows that a rank reads in a cycle if no two are the same, what a cache must hold"]
    for name, table in plan.tables.items():
        mark = " (fit)" if table.fitted else "" if plan.counted == plan.size else " (of those counted)"
        rows.append((
            name, f"{table.reads:,.0f}", f"{table.use.needs:,}", f"{table.capacity:,}",
            gb(table.capacity * table.wire.row), f"{table.use.owns:,}", f"{table.touched:,.0f}{mark}",
        ))  # fmt: skip
        if table.fitted and table.growth is not None:
            growth = table.growth
            error = "not checked: too short a stream" if math.isnan(growth.error) else f"{growth.error:.1%} off at most"
            notes.append(
                f"{name}: fit rows = {growth.bound:,} (1 - exp(-d / {growth.bound:,})), d = {growth.factor:.4g} "
                f"n^{growth.exponent:.4f}, n up to {growth.lengths_K[-1]:,} tokens; a fit of the shorter lengths, held "
                f"to the two longest: {error}"
            )
    return Section("Rows of a cycle", columns, rows, notes)


def owners_of(plan: Plan) -> Section:
    columns = ("table", "placement", "serves, max / mean", "updates, max / mean", "dense sends less from",
               "is faster from", "now")  # fmt: skip
    rows = [
        (
            name, table.placement, f"{table.serves:.3f}", f"{table.updates:.3f}", f"{table.crossover:.1%}",
            f"{table.in_time:.1%}", f"{table.reads / table.rows:.2%}",
        )
        for name, table in plan.tables.items()
    ]  # fmt: skip
    notes = [
        "dense: all rows reduced and gathered; the share of a table's rows a rank from which that is less, and now"
    ]
    if plan.counted < plan.size:
        notes.append(f"loads from {plan.counted} ranks: those of {plan.size} are evener")
    return Section("Owners", columns, rows, notes)


def wire_section(plan: Plan) -> Section:
    rows = [(name, when or "each", gb(plan.sent[name]) if plan.sent[name] else "-", what) for name, when, what in ORDER]
    notes = [
        f"table {name}: {table.total_sent:,.0f} bytes of all ranks a cycle = sum of remote x "
        f"({table.wire.id} + {table.wire.row:,} + {table.wire.gradient:,}) + {plan.size} x {plan.size - 1} counts; "
        f"a rank {gb(table.mean_sent)}, the busiest {gb(table.largest_sent)}"
        for name, table in plan.tables.items()
    ]
    notes.append(
        "* in the first step of a cycle, + in the last; dense: in float32, a label's parts as long as its longest"
    )
    if plan.size > 1:
        notes.append(
            f"the dense exchange sends {plan.padding:.2f} times what it would without padding: a matrix has one owner; "
            f"{plan.replicated:,} of its {plan.memory.gpu['dense weights'] // FLOAT:,} numbers are summed and updated "
            f"on every rank: small parameters, and matrices whose label would be padded to more than {MOST_PADDED} "
            "times its numbers"
        )
    return Section("Order of a step, and what a GPU sends in a cycle", ("collective", "step", "bytes", ""), rows, notes)


def schemes_of(plan: Plan) -> Section:
    columns = ("table", "way", "weights", "gradients", "state", "sent a cycle")
    rows = [
        (name, one.name, gb(one.weights), gb(one.gradients), gb(one.state), gb(one.traffic))
        for name, table in plan.tables.items() for one in table.schemes
    ]  # fmt: skip
    steps = plan.shape.steps
    notes = ["released: MoME's code, a replica a GPU, a dense gradient, AdamW's state in slices, all sent every step"]
    if steps > 1:
        notes.append(f"a cycle is {steps} steps; the released way is shown for one of them")
    return Section("Bytes a GPU: the released dense path, and this", columns, rows, notes)


def time_of(plan: Plan, node: Node) -> Section:
    step, parts = plan.step, []
    for where, group in (("GPU", plan.step.compute), ("links", plan.step.links)):
        parts += [(part, where, f"{1000 * seconds:.3f}") for part, seconds in group.items()]
    parts += [("one after the other", "", f"{1000 * step.apart:.3f}"), ("all hidden", "", f"{1000 * step.behind:.3f}")]
    tokens = plan.size * plan.shape.rank_rows * plan.shape.tokens
    notes = [
        f"{tokens / step.apart:,.0f} to {tokens / step.behind:,.0f} tokens a second; {plan.flops_share:.0%} of the "
        "matrix units at the lower",
        f"predicted, not measured: {node.share_flops:.0%} of {node.flops / 1e12:.0f} TFLOPS, {node.share_hbm:.0%} of "
        f"{node.hbm / 1e12:.2f} TB/s, NVLink {node.share_nvlink:.0%} of {node.nvlink / 1e9:.0f} GB/s, NDR "
        f"{node.share_fabric:.0%} of {node.fabric / 1e9:.0f} GB/s a GPU (sources: mome/tools/plan/links.py)",
    ]
    return Section("Milliseconds a step", ("part", "where", "ms"), parts, notes)


def rank_sections(lines: Sequence[Line]) -> list[Section]:
    """Bytes, owners and hot rows, each a line a table and number of ranks."""
    by_table = sorted(lines, key=lambda line: line.table)
    partly = sorted({f"{line.counted} of {line.ranks}" for line in lines if line.counted < line.ranks})
    notes = [f"ranks counted: {', '.join(partly)}; the loads of all are evener"] if partly else []
    gains = [one.gain / line.sparse for line in lines for one in line.hot if line.sparse]
    most = max(gains, default=0.0)
    share = f"at most {most:.3%}" if most > 0 else "none"
    verdict = (
        f"{share} of the bytes are gained: a row that all ranks read costs as much to reduce as to send, but for its "
        "id; so no rows are replicated"
    )
    if most > WORTH:
        verdict = f"up to {most:.2%} of the bytes are gained"
    return [
        Section("Bytes that a rank sends a cycle", TRAFFIC, [traffic_cells(line) for line in by_table], [
            "sparse: mean of all ranks under the table's own placement; dense: a reduce-scatter of all gradients and a "
            "gather of all rows",
            "from: the share of a table's rows that each rank has to read until the dense exchange sends less, or is "
            "faster on H100 nodes, where an all-to-all has one port a GPU and a ring all ports of a node", *notes,
        ]),
        Section("Largest over mean of the owners", OWNERS, [owner_cells(line) for line in by_table], [
            "serves: rows sent to others; updates: distinct rows touched; holds: rows kept; balanced: from the cycle "
            "before those counted",
        ]),
        Section("Replicas of the hottest rows", HOT, [
            cells for line in by_table if line.ranks > 1 for cells in hot_cells(line, serves_now(line))
        ], ["saved and paid: bytes a rank and cycle; paid is the all-reduce of their gradients", verdict]),
    ]  # fmt: skip


def serves_now(line: Line) -> float:
    """The load under the placement that the table has."""
    return line.serves[line.placement]
