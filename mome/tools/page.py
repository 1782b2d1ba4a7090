"""HTML in one file: escaped text, tables, bars, and the style that all pages of the project share.

Lives here: small pieces that return Html (finished markup); anything else that is put into a page is escaped.
Not here: what a page says (report.py).
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

STYLE = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #ffffff; --ink: #1f2328; --soft: #5c6670; --rule: #d8dee4;
  --main: #0072b2; --bad: #c2410c; --mark: #fff4cc; --good: #0f7a55; }
@media (prefers-color-scheme: dark) { :root { --paper: #0e1116; --card: #171b22; --ink: #dce1e7; --soft: #98a2ad;
  --rule: #2c333c; --main: #4fb0f0; --bad: #ff9d66; --mark: #433a14; --good: #3fd0a2; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); 
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 10px; }
h3 { font-size: .82rem; margin: 0 0 6px; color: var(--soft); font-weight: 600; overflow-wrap: anywhere; }
p { margin: 6px 0; } .soft { color: var(--soft); } .small { font-size: .87rem; }
section, .tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
section { padding: 16px 18px; margin-top: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(148px, 1fr)); gap: 12px; margin-top: 16px; }
.tile { padding: 10px 14px; }
.tile b { display: block; font-size: 1.2rem; font-weight: 600; overflow-wrap: anywhere; }
.tile span { color: var(--soft); font-size: .8rem; }
.pill { display: inline-block; border: 1px solid currentColor; border-radius: 999px; padding: 0 9px;
  font-size: .8rem; font-weight: 600; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
table.full { width: 100%; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child > td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
td.num, th.num { text-align: right; } td.num { white-space: nowrap; }
td.value { overflow-wrap: anywhere; min-width: 8.5em; }
tr.differs td { background: var(--mark); } td:first-child, th:first-child { padding-left: 6px; }
.best { font-weight: 700; color: var(--good); }
.bar { display: flex; align-items: center; gap: 8px; min-width: 220px; }
.bar i { display: block; height: 13px; min-width: 2px; border-radius: 2px; background: var(--main); }
.bar.minus i { background: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr));
  gap: 14px 26px; align-items: start; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .86rem/1.5 ui-monospace, Consolas, monospace; }
img { display: block; width: 100%; min-width: 680px; height: auto; border-radius: 6px; }
summary { cursor: pointer; color: var(--soft); font-size: .88rem; } details table { margin-top: 8px; }
@media (max-width: 560px) { main { padding: 18px 10px 40px; } section { padding: 12px; } .bar { min-width: 140px; } }
@media print { section, .tile { break-inside: avoid; } }
"""


class Html(str):
    """Markup that is finished: every text in it has been escaped."""


def text(value: Any) -> Html:
    """A value ready to stand in a page: Html as it is, all else escaped, quotes included."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def element(tag: str, *inside: Any, cls: str = "") -> Html:
    """<tag class=cls>inside</tag>, with what is inside escaped unless it is Html."""
    named = f' class="{html.escape(cls)}"' if cls else ""
    return Html(f"<{tag}{named}>{''.join(map(text, inside))}</{tag}>")


def page(title: str, *body: Html) -> bytes:
    """A whole page, UTF-8. Its policy forbids the browser to load anything from elsewhere, and to run scripts."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{element('title', title)}<style>{STYLE}</style></head>\n{element('body', element('main', *body))}</html>\n"
    ).encode()


def section(title: str, *inside: Any) -> Html:
    """A card with a heading."""
    return element("section", element("h2", title), *inside)


def picture(light: bytes, dark: bytes, description: str) -> Html:
    """Two PNGs in the page itself, of which the reader's colour scheme chooses one."""
    sources = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in (light, dark)]
    return Html(
        f'<div class="wide"><picture><source media="(prefers-color-scheme: dark)" srcset="{sources[1]}">'
        f'<img src="{sources[0]}" alt="{text(description)}"></picture></div>'
    )


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]], numbers: bool = True, marked: bool = False) -> Html:
    """A table that scrolls sideways where it is too wide.

    numbers: all columns but the first are right-aligned; marked: its rows are highlighted.
    """
    kind = ["value"] + ["num" if numbers else "value"] * (len(head) - 1)
    top = element("tr", *(element("th", cell, cls="num" if k == "num" else "") for cell, k in zip(head, kind)))
    body = []
    for row in rows:
        cells = [element("td", cell, cls=k) for cell, k in zip(row, kind)]
        body.append(element("tr", *cells, cls="differs" if marked else ""))
    return element("div", element("table", element("thead", top), element("tbody", *body), cls="full"), cls="wide")


def pairs(values: Mapping[str, Any]) -> Html:
    """A two-column table of names and values."""
    rows = [
        element("tr", element("td", key, cls="soft"), element("td", shown(value), cls="value"))
        for key, value in values.items()
    ]
    return element("table", *rows, cls="full")


def bar(value: float, most: float, caption: Any) -> Html:
    """A horizontal bar of |value| / most of the room, coloured apart below zero, with its caption behind it."""
    share = 60.0 * min(abs(value) / most, 1.0) if most and math.isfinite(value) else 0.0
    drawn = Html(f'<i style="width: {share:.1f}%"></i>')
    return element("div", drawn, element("span", caption), cls="bar minus" if value < 0 else "bar")


def shown(value: Any) -> str:
    """A setting as people read it: "-" for none, yes and no, plain numbers, lists in one line."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if value == float(f"{value:g}") or not math.isfinite(value) else repr(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(inner)}" for key, inner in value.items()) or "none"
    return str(value) if value != "" else "(empty)"
