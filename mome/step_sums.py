"""What the ranks add up in a step, in one all-reduce, before anything is changed.

Lives here: StepSums, and the vector that travels.
Not here: where its numbers come from (train_gpt.py), and the collective (mome/world.py).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mome.world import World


@dataclass(frozen=True)
class StepSums:
    """What the ranks add up in a step, in one all-reduce, before anything is changed. All are sums over the ranks."""

    nats: float
    """Of a token of the step, on average."""
    dense_square: float
    """Of the norm of the dense gradients."""
    row_square: float
    """In a cycle's last step of the norm of the rows' gradients; before, finite or not as they are."""
    rows: float
    """Distinct rows of the cycle."""
    interrupts: float
    terminations: float
    """Ranks that were asked to stop, by SIGINT and SIGTERM."""
    written: float
    failed: float
    """Ranks that have written their part of the checkpoint under way, and those that could not."""
    bytes_sent: float
    """By all ranks for training since it began (or went on), up to here in the step: its weights have yet to go."""

    @property
    def signal(self) -> int | None:
        """Which stop the ranks agree on."""
        return signal.SIGTERM if self.terminations else signal.SIGINT if self.interrupts else None


def summed(
    world: World, loss: Tensor, dense_square: Tensor, row_square: float, rows: int, asked: int | None,
    votes: tuple[int, int], columns: Mapping[str, Tensor],
) -> tuple[StepSums, dict[str, Tensor]]:  # fmt: skip
    """The sums of what every rank gives: its part of the loss (float64 []), of the squared norms, of the rows, the
    signal that it was asked to stop by, its writer's votes (mome/saving.py), and of tensors [lanes, dim] by name."""
    flags = (
        row_square, rows, asked == signal.SIGINT, asked == signal.SIGTERM, *votes, world.training_bytes(),
    )  # fmt: skip
    own = torch.stack([
        loss, dense_square.to(loss.device), *torch.tensor(flags, dtype=torch.float64).to(loss.device)
    ])  # fmt: skip
    whole = torch.cat([own, *(one.flatten() for one in columns.values())])
    whole = world.all_reduce("step sums", whole).wait()
    pieces = whole[len(own) :].split([one.numel() for one in columns.values()])
    added = {name: piece.view_as(columns[name]) for name, piece in zip(columns, pieces, strict=True)}
    return StepSums(*whole[: len(own)].tolist()), added
