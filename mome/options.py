"""From command-line words to a dataclass, and from an exception to one line.

Lives here: what every command does with its words and its errors: one line on stderr, never a stack trace.
Not here: the options themselves, which each command declares in a dataclass of its own.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Sequence
from typing import TypeVar

from mome.errors import UserError

Options = TypeVar("Options")


def parse(kind: type[Options], words: Sequence[str], prog: str, default: Options | None = None) -> Options:
    """Fill the dataclass `kind` from words (tyro), over the values of `default`. `--help` prints and exits with 0.

    Errors: UserError of one line, with the nearest match where an option is unknown.
    """
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            given = {} if default is None else {"default": default}
            return tyro.cli(kind, args=list(words), prog=prog, **given)
    except SystemExit as stop:
        if not stop.code:
            raise
    raise UserError(_condense(said.getvalue(), prog))


def _condense(box: str, prog: str) -> str:
    """tyro's framed error as one line: its first paragraph, and the first option that it suggests."""
    lines = [line.strip("\u2502 ") for line in box.splitlines()]
    inside = [line for line in lines if line and not line.startswith("\u256d")]
    rules = [i for i, line in enumerate(inside) if line[0] in "\u2500\u2570"]
    message = " ".join(inside[: rules[0] if rules else len(inside)]) or "the options cannot be read"
    # What a dataclass itself refuses comes under the name of its class, which no user knows.
    message = re.sub(r"^Error parsing [^-\s]\S*: ", "", message)
    near = next((after for line, after in itertools.pairwise(inside) if line.startswith("Perhaps you meant")), "")
    near = f" (did you mean {near.split()[0].rstrip(',')}?)" if near else ""
    return f"{message}{near}; see {prog} --help"


def error_line(error: BaseException) -> str:
    """One line for the user: of an OSError the file and the reason, of others the message."""
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename}: " if error.filename else ""
        return f"error: {named}{error.strerror}"
    return "error: " + (" ".join(str(error).split()) or type(error).__name__)
