"""Fixtures for all rooms: fixed seeds, and uninitialised memory that is poisoned with NaN."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def poison_empty(monkeypatch):
    """Fill what torch.empty, empty_like and new_empty return with NaN, so that an unwritten output shows."""

    def poisoned(make):
        def wrapper(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
