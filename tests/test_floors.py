"""The house stands: imports only go down, records know no model code, and every file keeps to the form of a room.

Lives here: the one table of floors, a checker that reads sources without running them, and proof that it can fail.
Not here: whether the modules import (tests/test_imports.py) and what ruff checks (tests/test_lint.py).
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the ground up. A room may import what lies on lower floors; rooms on one floor ("|") do not know each other.
# A name stands for a module or a package with all in it; "+" joins modules into one room.
FLOORS = (
    "kernels",
    "optim | data",
    "mome.errors | mome.files",
    "mome.restart",
    "mome.world",
    "mome.watchdog | mome.table | mome.loss | mome.progress | mome.options | mome.usage",
    "mome.memory | mome.gpt + mome.plain | mome.dense | mome.sharded",
    "mome.config",
    "mome.presets | mome.checkpoint | mome.runfolder",
    "mome.command | mome.run | mome.saving",
    "mome.launch | mome.step_sums | mome.cycle | mome.evaluate | mome.generate | mome.describe",
    "mome.pretrained | mome.ending",
    "mome.tools",
    "mome.__main__ | train_gpt",
)
# Lower down, and still out of sight: the backbone gets its memories handed in.
BLIND = {("mome.gpt", "mome.table"), ("mome.plain", "mome.table")}
# A verdict on a record must not depend on the code that made it.
APART = "records"

MOST_LINES = 450
MACHINE_PATH = re.compile(r"(?<![\w.)}$])/(work|root|home|tmp|opt)/")


def rooms() -> dict[str, tuple[int, str]]:
    """Each name of FLOORS -> (floor, room)."""
    table = {}
    for height, floor in enumerate(FLOORS):
        for room in floor.split(" | "):
            table |= {name: (height, room) for name in room.split(" + ")}
    return table


def room_of(module: str) -> str | None:
    """The longest name of FLOORS (or records, or tests) that holds a module; None: none does."""
    names = [name for name in (*rooms(), APART, "tests") if f"{module}.".startswith(f"{name}.")]
    return max(names, key=len, default=None)


def sources(root: Path = ROOT) -> dict[str, Path]:
    """Module name -> file, for every .py of the repository; environments, caches and runs are not the repository's."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            one for one in folders
            if not one.startswith((".", "__")) and one != "runs" and not (Path(folder) / one / "pyvenv.cfg").exists()
        )  # fmt: skip
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder) / file
                parts = path.relative_to(root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST, module: str, is_package: bool, known: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import anywhere in a source: in functions, for types, or by importlib with a literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in known else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def climbs(files: Mapping[str, str], packages: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong with the imports of these sources (module -> text), a line each; packages are __init__.py."""
    table, wrong = rooms(), []
    for module, text in files.items():
        here = room_of(module)
        if here is None and module not in packages:
            wrong.append(f"{module}: on no floor; give it a place in FLOORS")
        if here in (None, "tests"):
            # What is left are packages above several rooms (mome itself): they may hold nothing that imports.
            if here is None and any(imported(ast.parse(text), module, True, files)):
                wrong.append(f"{module}: holds several floors and may import nothing")
            continue
        for line, name in imported(ast.parse(text), module, module in packages, files):
            there = room_of(name)
            if there is None and name.split(".")[0] not in {one.split(".")[0] for one in table}:
                continue
            if here == there:
                continue
            if there == "tests":
                wrong.append(f"{module}:{line} imports {name}: nothing rests on the tests")
            elif APART in (here, there):
                wrong.append(f"{module}:{line} imports {name}: {APART} and the model code do not know each other")
            elif there is None:
                # The bare package mome: a name in it that is on no floor.
                wrong.append(f"{module}:{line} imports {name}: on no floor")
            elif (here, there) in BLIND:
                wrong.append(f"{module}:{line} imports {name}: {here} does not know {there}")
            elif table[here][1] != table[there][1] and table[there][0] >= table[here][0]:
                wrong.append(f"{module}:{line} imports {name}: not on a lower floor")
    return wrong


def faults(text: str) -> list[str]:
    """What is wrong with the form of one Python source."""
    found = []
    if not ast.get_docstring(ast.parse(text)):
        found.append("no module docstring")
    lines = text.splitlines()
    if len(lines) >= MOST_LINES:
        found.append(f"{len(lines)} lines: two rooms")
    return found + text_faults(text)


def text_faults(text: str) -> list[str]:
    """What is wrong with any source file, shell as well."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.isascii():
            found.append(f"line {number}: not ASCII")
        if MACHINE_PATH.search(line):
            found.append(f"line {number}: a path of one machine")
    return found


def test_no_import_climbs():
    files = sources()
    packages = frozenset(module for module, path in files.items() if path.name == "__init__.py")
    wrong = climbs({module: path.read_text() for module, path in files.items()}, packages)
    assert not wrong, "\n".join(wrong)


def test_what_is_imported_is_pinned():
    """Nothing is imported that came only because something else asked for it: that may be gone tomorrow."""
    files = sources()
    pinned = [pins("requirements.txt"), pins("requirements-test.txt")]
    assert len(pinned[0]) >= 12 and not pinned[0] & pinned[1]
    own = {module.split(".")[0] for module in files}
    loose = set()
    for module, path in files.items():
        allowed = pinned[0] | pinned[1] if room_of(module) == "tests" else pinned[0]
        for _, name in imported(ast.parse(path.read_text()), module, path.name == "__init__.py", files):
            top = name.split(".")[0]
            if top not in own and top not in sys.stdlib_module_names and top.lower().replace("_", "-") not in allowed:
                loose.add(f"{module} imports {top}")
    assert loose == set()


def pins(name: str) -> set[str]:
    """The packages of a requirements file, each pinned exactly and once."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+==[0-9.]+", line) for line in lines), lines
    names = [line.split("==")[0].lower().replace("_", "-") for line in lines]
    assert len(set(names)) == len(names)
    return set(names)


def test_every_file_is_a_room():
    files = sources()
    assert {"train_gpt", "mome.gpt", "kernels.attention", "tests.test_floors"} <= set(files)
    wrong = {module: faults(path.read_text()) for module, path in files.items()}
    scripts = [ROOT / "run.sh", ROOT / ".ci/run", *sorted(ROOT.glob("tests/**/*.sh"))]
    wrong |= {path.name: text_faults(path.read_text()) for path in scripts}
    assert {module: found for module, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("kernels.attention", "import optim.muon", "lower floor"),
        ("kernels.attention", "from mome import errors", "lower floor"),
        ("optim.rows", "import data.shards", "lower floor"),
        ("data.loader", "def f():\n    from mome.errors import UserError", "lower floor"),
        ("mome.table.rows", "from ..memory import MEMORIES", "lower floor"),
        ("mome.table.rows", "from mome.loss import cross_entropy", "lower floor"),
        ("mome.gpt", "import mome.table.rows as rows", "does not know mome.table"),
        ("mome.gpt", "from mome.memory.base import Memory", "lower floor"),
        ("mome.config", "from mome import run", "lower floor"),
        ("mome.run", "if TYPE_CHECKING:\n    from mome.tools import report", "lower floor"),
        ("mome.run", "import importlib\nimportlib.import_module('train_gpt')", "lower floor"),
        ("mome.tools.export", "import train_gpt", "lower floor"),
        ("mome.tools", "from . import export\nfrom .. import __main__", "lower floor"),
        ("mome.tools.export", "from mome import nowhere", "on no floor"),
        ("mome.evaluate", "from mome.generate import generate", "lower floor"),
        ("records.board", "from mome.runfolder import RunFolder", "do not know each other"),
        ("mome.run", "from records import board", "do not know each other"),
        ("mome.run", "from tests import conftest", "nothing rests on"),
        ("mome.attic", "", "on no floor"),
        ("helpers", "", "on no floor"),
        ("mome", "from mome.gpt import GPT", "may import nothing"),
    ],
)
def test_the_checker_finds_a_climb(module, text, complaint):
    known = {"mome.errors": "", "mome.run": "", "mome.tools.export": "", "mome.__main__": "", "records.board": ""}
    wrong = climbs(known | {module: text}, packages=frozenset({"mome", "mome.tools"}))
    assert len(wrong) == 1 and wrong[0].startswith(module) and complaint in wrong[0], wrong


def test_the_checker_lets_what_goes_down_pass():
    files = {
        "kernels.attention": "import torch\nimport numpy.lib",
        "optim.rows": "from kernels.row_update import adam",
        "data.loader": "from . import shards\nfrom data.errors import DataError\nimport dataclasses",
        "data.shards": "from .errors import DataError",
        "mome.table.rows": "import optim.rows\nfrom mome.table.store import Store\nfrom ..errors import UserError",
        "mome.memory": "from mome.memory.routed import RoutedMemory\nfrom .ngram import NgramMemory",
        "mome.memory.ngram": "from mome.table.hashing import hash_ngrams",
        "mome.plain": "from mome.gpt import Block",
        "mome.tools.compare": "from mome import checkpoint\nimport mome.run",
        "mome.checkpoint": "",
        "train_gpt": "import mome.run\nfrom mome.tools.report import write_report\nfrom optim.muon import NorMuon",
        "records.board": "import json\nfrom records import rules",
        "records.rules": "",
        "mome": "",
        "tests.test_gpt": "import mome.gpt, train_gpt, records.board",
    }
    assert climbs(files, packages=frozenset({"mome", "mome.memory"})) == []


def test_the_checker_finds_a_fault_of_form():
    title = '"""A room."""\n'
    assert faults(title + "x = '/ work'\nurl = 'a/work/b'\nroot = f'{base}/root/x'\n") == []
    assert faults("x = 1\n") == ["no module docstring"]
    assert faults(title + "# caf\u00e9\n") == ["line 2: not ASCII"]
    assert faults(title + "\n" + "x = '" + "/work" + "/main'\n") == ["line 3: a path of one machine"]
    assert faults(title + "x = 1\n" * MOST_LINES) == [f"{MOST_LINES + 1} lines: two rooms"]


def test_sources_leave_out_what_is_not_the_repository(tmp_path):
    others = (".venv/a.py", "runs/x/b.py", "env/lib/c.py", "mome/__pycache__/d.py")
    for name in ("mome/gpt.py", "mome/__init__.py", *others):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "env/pyvenv.cfg").write_text("")
    assert sorted(sources(tmp_path)) == ["mome", "mome.gpt"]
