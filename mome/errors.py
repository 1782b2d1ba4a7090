"""The error of a user's mistake.

Lives here: the one exception whose text is shown to the user as it is, in one line, without a stack trace.
Not here: the errors of the lower floors (plain ValueError, OSError, data.errors.DataError), which say as much.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can mend: the message names the thing and the remedy in one line."""


class SharedError(UserError):
    """A mistake that every process of a run meets alike: the first one says it."""
