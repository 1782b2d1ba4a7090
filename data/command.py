"""A command's words and errors: words to a dataclass, and one line on stderr in place of a box or a stack trace.

Lives here: what every command of the house does, those of this room and, through mome/options.py, those of mome.
Not here: the commands with their options, and the progress that they show (console.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from data.errors import DataError

Options = TypeVar("Options")

# How tyro draws its box: with these where stdout is UTF-8, else with blanks and rules of "-".
_SIDE, _RULE, _CORNERS = "\u2502", "\u2500", "\u256d\u2570"


def parse(kind: type[Options], words: Sequence[str], prog: str, default: Options | None = None) -> Options:
    """Fill the dataclass `kind` from words (tyro), over the values of `default`. `--help` prints and exits with 0.

    Errors: DataError of one line, with the nearest match where an option is unknown.
    """
    # Imported here so that the list of commands can be shown without it.
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            given = {} if default is None else {"default": default}
            return tyro.cli(kind, args=list(words), prog=prog, **given)
    except SystemExit as stop:
        if not stop.code:
            raise
    raise DataError(_condense(said.getvalue(), prog, [field.name for field in dataclasses.fields(kind)]))


def _condense(box: str, prog: str, fields: Sequence[str]) -> str:
    """tyro's framed error as one line: its first paragraph, and the option that is nearest to an unknown one."""
    paragraphs = _paragraphs(box)
    message = " ".join(paragraphs[0]) or "the options cannot be read"
    # What a dataclass itself refuses comes under the name of its class, which no user knows.
    message = re.sub(r"^Error parsing [^-\s]\S*: ", "", message)
    lines = list(itertools.chain(*paragraphs))
    near = next((after for line, after in itertools.pairwise(lines) if line.startswith("Perhaps you meant")), "")
    if not near:
        # Where a required option is missing too, tyro lists the unknown ones below it and suggests none.
        for unknown in next((one[1:] for one in paragraphs[1:] if one[:1] == ["Unrecognized options:"]), []):
            flags = [f"--{name.replace('_', '-')}" for name in fields]
            match = difflib.get_close_matches(unknown.partition("=")[0], flags, n=1, cutoff=0.6)
            if match and unknown.startswith("--"):
                message, near = f"Unrecognized options: {unknown}", match[0]
                break
    near = f" (did you mean {near.split()[0].rstrip(',')}?)" if near else ""
    return f"{message}{near}; see {prog} --help"


def _paragraphs(box: str) -> list[list[str]]:
    """The lines inside a box, without its frame and its title, parted where it has a rule; at least one paragraph."""
    paragraphs: list[list[str]] = [[]]
    for line in (line.strip(f"{_SIDE} ") for line in box.splitlines()):
        if line and set(line) <= {_RULE, "-"}:
            paragraphs.append([])
        elif line and line[0] not in _CORNERS:
            paragraphs[-1].append(line)
    # Without corners the title is a paragraph of its own.
    titled = len(paragraphs) > 1 and not any(corner in box for corner in _CORNERS)
    return paragraphs[1:] if titled else paragraphs


def error_line(error: BaseException) -> str:
    """One line for the user: of an OSError the file and the reason, of others the message."""
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename else ""
        return f"error: {named}{error.strerror}"
    return "error: " + (" ".join(str(error).split()) or type(error).__name__)


def run_command(command: Callable[[], None]) -> int:
    """Run `command`, return the exit code: 0; 1 for a DataError or OSError, with a line on stderr; 130 for Ctrl-C."""
    try:
        command()
    except (DataError, OSError) as error:
        print(error_line(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0
