"""From command-line words to a dataclass, for the commands of this floor.

Lives here: parse, whose refusals are UserErrors.
Not here: how it is done (data/command.py), and the options themselves, which each command declares.
"""

from __future__ import annotations

from collections.abc import Sequence

from data import command
from data.command import Options
from data.errors import DataError
from mome.errors import UserError


def parse(kind: type[Options], words: Sequence[str], prog: str, default: Options | None = None) -> Options:
    """Fill the dataclass `kind` from words, over the values of `default`, as data.command.parse does.

    Errors: UserError of one line, with the nearest match where an option is unknown.
    """
    try:
        return command.parse(kind, words, prog, default)
    except DataError as error:
        raise UserError(str(error)) from None
