"""The sides of bench tables: each does a step of a table of rows whole, from int64 ids to updated rows.

Lives here: ours under three rules, FBGEMM's, torch's own, an eager one, and two yardsticks (a gather, a copy).
Not here: which ids they get and how they are timed (tables.py).

Each takes the ids [N] of a step and the gradient [N, D] of what it read. All rows are float32 on the CPU, and each side
has torch's threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from mome.table.rows import RowTable, TableSpec
from optim.rows import RowRule

LR, BETA2, EPS = 0.01, 0.99, 1e-10
FBGEMM, FBGEMM_PACKAGE = "fbgemm_gpu", "fbgemm-gpu-cpu"
POOLINGS = {"fbgemm": "NONE", "fbgemm_bags": "SUM"}

RULES = {
    "ours": RowRule("adam", beta2=BETA2, eps=EPS),
    "ours_adagrad": RowRule("adagrad", eps=EPS),
    "ours_decay": RowRule("adam", beta2=BETA2, eps=EPS, weight_decay=0.01),
}
LABELS = {
    "ours": "ours, row-wise Adam",
    "ours_adagrad": "ours, row-wise Adagrad",
    "ours_decay": "ours, Adam, retroactive decay",
    "fbgemm": "FBGEMM, a vector a lookup",
    "fbgemm_bags": "FBGEMM, bags of one",
    "sparseadam": "nn.Embedding, SparseAdam",
    "eager": "eager torch, row-wise Adam",
    "gather_fresh": "index_select alone",
    "gather_reused": "index_select(out=) alone",
    "copy": "copy of a large tensor",
}


class Ours:
    """RowTable: pull (distinct ids, read, decay), gather, backward, push."""

    def __init__(self, rows: int, dim: int, rule: RowRule) -> None:
        self.table = RowTable(TableSpec(rows, lanes=1, dim=dim, init=0.0), rule, seed=0, name="bench")

    def step(self, ids_N: Tensor, grad_ND: Tensor) -> None:
        ws = self.table.pull([ids_N])
        ws.gather(0).backward(grad_ND.unsqueeze(1))
        self.table.push(ws, lr=LR)

    def read(self, ids_N: Tensor) -> Tensor:
        """What these rows are worth now: [N, D]. So have all sides that train."""
        return self.table.read_rows(ids_N).squeeze(1)


class Fbgemm:
    """FBGEMM's table-batched embedding on the CPU, exact row-wise Adagrad inside its backward pass; rows start at zero.

    pooling: "NONE", its mode for a vector a lookup, whose loops run on one thread in version 1.8; or "SUM" over bags of
    one lookup each, the same numbers by its threaded loops. Raises ImportError or OSError where it cannot be loaded.
    """

    def __init__(self, rows: int, dim: int, pooling: str) -> None:
        training, common, configs = fbgemm_modules()
        where = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        self.bags = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *where)], optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LR, eps=EPS,
            pooling_mode=common.PoolingMode[pooling],
        )  # fmt: skip
        (self.weight_RD,) = self.bags.split_embedding_weights()
        self.weight_RD.detach().zero_()
        self.offsets = torch.arange(0)

    def step(self, ids_N: Tensor, grad_ND: Tensor) -> None:
        if len(self.offsets) != len(ids_N) + 1:
            self.offsets = torch.arange(len(ids_N) + 1)
        self.bags(ids_N, self.offsets).backward(grad_ND)

    def read(self, ids_N: Tensor) -> Tensor:
        return self.weight_RD.detach().index_select(0, ids_N)


class SparseAdam:
    """torch.nn.Embedding with sparse gradients and torch.optim.SparseAdam: two moments a number, touched rows only."""

    def __init__(self, rows: int, dim: int) -> None:
        self.embedding = nn.Embedding(rows, dim, sparse=True, _weight=touched_zeros(rows, dim))
        self.optimizer = torch.optim.SparseAdam(self.embedding.parameters(), lr=LR)

    def step(self, ids_N: Tensor, grad_ND: Tensor) -> None:
        self.embedding(ids_N).backward(grad_ND)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def read(self, ids_N: Tensor) -> Tensor:
        return self.embedding.weight.detach().index_select(0, ids_N)


class Eager:
    """The same rule as ours in plain torch operators, as one would write it by hand; the second moment of a row decays
    only when the row is touched, so it equals dense training only where every row always is."""

    def __init__(self, rows: int, dim: int) -> None:
        self.weight_RD = touched_zeros(rows, dim)
        self.second_R = torch.zeros(rows)
        self.kept = 1.0

    def step(self, ids_N: Tensor, grad_ND: Tensor) -> None:
        unique_U, slots_N = torch.unique(ids_N, return_inverse=True)
        leaf_UD = self.weight_RD.index_select(0, unique_U).requires_grad_()
        # The backward pass of index_select is index_add_ on zeros.
        leaf_UD.index_select(0, slots_N).backward(grad_ND)
        rows_UD, sums_UD = leaf_UD.detach(), leaf_UD.grad
        self.kept *= BETA2
        second_U = self.second_R.index_select(0, unique_U).mul_(BETA2)
        second_U += (1.0 - BETA2) * sums_UD.square().mean(dim=1)
        root_U = (second_U / (1.0 - self.kept)).sqrt_().add_(EPS)
        self.second_R.index_copy_(0, unique_U, second_U)
        self.weight_RD.index_copy_(0, unique_U, rows_UD - LR * sums_UD / root_U[:, None])

    def read(self, ids_N: Tensor) -> Tensor:
        return self.weight_RD.index_select(0, ids_N)


def touched_zeros(rows: int, dim: int) -> Tensor:
    """Zeros [R, D] that are written, not promised: pages that nobody wrote are read from one page, and too fast."""
    return torch.empty(rows, dim).fill_(0.0)


def gather(weight_RD: Tensor, lookups: int | None) -> Callable[[Tensor], None]:
    """Ids [N] -> index_select of their rows, into a tensor made once for so many lookups (None: a fresh one)."""
    if lookups is None:
        return lambda ids_N: torch.index_select(weight_RD, 0, ids_N)
    out_ND = weight_RD.new_empty(lookups, weight_RD.shape[1])
    return lambda ids_N: torch.index_select(weight_RD, 0, ids_N, out=out_ND)


def copy(size: int) -> Callable[[], None]:
    """Copy a tensor of so many bytes into another; reads and writes together are twice as many."""
    source, target = (touched_zeros(1, size // 4) for _ in range(2))
    return lambda: target.copy_(source)


def fbgemm_modules() -> tuple[ModuleType, ModuleType, ModuleType]:
    """FBGEMM's modules for training, for common names and for configurations; it is no requirement of the project."""
    names = (
        "split_table_batched_embeddings_ops_training",
        "split_table_batched_embeddings_ops_common",
        "split_embedding_configs",
    )
    training, common, configs = (importlib.import_module(f"{FBGEMM}.{name}") for name in names)
    return training, common, configs


def fbgemm_missing() -> str | None:
    """Why FBGEMM can't be a side, in one line with its package; None when it can."""
    try:
        fbgemm_modules()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        why = " ".join(str(error).split())
        return f"missing: FBGEMM TBE (pip install {FBGEMM_PACKAGE}): {why}"
    return None
