"""Canonical ids: tokens whose text is the same but for case, accents, white space and compatible forms, as one.

Lives here: the folding of a text, and the class of every token.
Not here: the bytes of tokens (data/tokenizer.py), and what is hashed with these ids (mome/memory/ngram.py).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor


def fold(text: str) -> str:
    """NFKC, case folded, NFD without its nonspacing marks (Mn), white space to one space between words and none around.

    Text of white space alone is one space; other text of which nothing is left (a lone accent) stays as it is.
    Formula: Engram's token compression (arXiv 2601.07372, section 2, and its demo), with full case folding for its
    lower-casing, and any Unicode white space.
    """
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text).casefold())
    bare = "".join(char for char in decomposed if unicodedata.category(char) != "Mn")
    return " ".join(bare.split()) or (" " if text.isspace() else text)


def canonical_ids(token_strings: Sequence[bytes | str | None]) -> Tensor:
    """The class of each token, named by the smallest id in it: int64 [V].

    token_strings: what each id stands for, [V]; None is a special token, which is a class of its own. Tokens are in one
    class when `fold` makes the same of them; bytes that are no UTF-8 by themselves, when they are the same bytes.
    """
    smallest: dict[bytes | str, int] = {}
    classes = [
        one if token is None else smallest.setdefault(_key(token), one) for one, token in enumerate(token_strings)
    ]
    return torch.tensor(classes, dtype=torch.int64)


def _key(token: bytes | str) -> bytes | str:
    try:
        return fold(token.decode() if isinstance(token, bytes) else token)
    except UnicodeDecodeError:
        return token
