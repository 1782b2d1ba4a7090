"""What a bench leaves: a table on the terminal, and a JSON object that is written whole or not at all.

Lives here: the environment of a bench, the file, the look of a table of sides, checks before anything is measured.
Not here: which numbers there are (tables.py, hashing.py); records/bench/ says what the files mean.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mome.errors import UserError
from mome.files import write_json
from mome.runfolder import environment


def require_place(path: Path | None) -> None:
    """Refuse a file that cannot be written before anything is measured. Raises UserError or OSError."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"--json {path}: this is a folder; give a file in it, such as {path / 'tables.json'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--json {path}: its folder cannot be written; choose another")


def require_memory(needed: int, remedy: str) -> None:
    """Refuse what does not fit into the memory that Linux calls available. Raises UserError."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return
    if needed > free:
        raise UserError(f"this bench needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are available: {remedy}")


def bench_environment(packages: Sequence[str], **more: Any) -> dict[str, Any]:
    """The environment of a run, on the CPU, with the versions of these packages (None: not installed) and more."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    shown = environment(torch.device("cpu"), torch.float32, "a bench of float32 rows", 1, "")
    return shown | versions | {"spins": os.environ.get("GOMP_SPINCOUNT")} | more


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """A table on stdout, its first column to the left and the others to the right, and notes below it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # A file has no width: lines as long as they need to be.
        console = Console(highlight=False, markup=False, width=160)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def leave(bench: str, environment: dict[str, Any], results: dict[str, float], path: Path | None) -> None:
    """Write the JSON object, where a file was asked for, and say so. Errors: OSError."""
    if path is not None:
        write_json(path, {"bench": bench, "environment": environment, "results": results})
        print(path)


def span(middle: float, least: float, most: float, form: str = ",.2f") -> str:
    """'0.31 (0.29 to 0.34)'."""
    return f"{middle:{form}} ({least:{form}} to {most:{form}})"


@contextlib.contextmanager
def memory_named(remedy: str) -> Iterator[None]:
    """Turn what numpy and torch raise for a size that memory cannot hold into a UserError with a remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch knows no other sign of it; any other RuntimeError is a fault of ours.
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        raise UserError(f"{' '.join(str(error).split())}: {remedy}") from None
