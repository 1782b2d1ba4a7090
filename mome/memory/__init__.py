"""The memories by name: one file a memory, one protocol (base.py), one line here.

Lives here: the registry that the trainer, the tables, the ablations and the export read.
Not here: rows and how they are trained (mome/table/), and the backbone's plug points (mome/gpt.py).
"""

from __future__ import annotations

from mome.memory.base import Memory, ModelShape
from mome.memory.ngram import NgramMemory
from mome.memory.routed import RoutedMemory
from mome.memory.value import ValueMemory

MEMORIES: dict[str, type[Memory]] = {"routed": RoutedMemory, "ngram": NgramMemory, "value": ValueMemory}

__all__ = ["MEMORIES", "Memory", "ModelShape"]
