"""The error of a corpus, a shard or a tokenizer that cannot be used.

Lives here: the one exception of this floor; its text is one line that names the file and the remedy.
Not here: how a command shows it (every command prints it to stderr and exits with 1).
"""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used as asked: the message names the file or value and the remedy in one line."""
