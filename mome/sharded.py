"""The dense tensors of a checkpoint: torch.distributed.checkpoint (DCP), without its noise.

Lives here: snapshot, save_dense and load_dense, which know tensors and DTensors by name and one folder.
Not here: which tensors a run has (train_gpt.py, mome/dense.py), and the checkpoint around them (mome/checkpoint.py).

The folder is DCP's own format: a file a rank and a `.metadata`, which is a pickle: load the checkpoints that you trust.
What every rank holds is written once, spread over the ranks; what is sharded is read back at any number of them.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mome.errors import UserError

# torch.distributed.checkpoint takes most of a second to import: who only parses a command line does not wait for it.


def snapshot(tensors: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
    """Copies on the CPU. group: of gloo, for DTensors of a device: a thread that saved those would have to know its
    streams, and hold its memory twice."""
    # Not DCP's own stagers: those of torch 2.13 fail on DTensors of the CPU.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    copies, mesh = {}, None
    for name, value in tensors.items():
        if isinstance(value, DTensor):
            local = value.detach().to_local()
            if local.device.type == "cpu":
                own = value.device_mesh
            else:
                own = mesh = mesh or DeviceMesh.from_group(group, "cpu")
            copies[name] = DTensor.from_local(
                local.to("cpu", copy=True), own, value.placements, run_check=False, shape=value.shape,
                stride=value.stride(),
            )  # fmt: skip
        elif isinstance(value, Tensor):
            copies[name] = value.detach().to("cpu", copy=True).contiguous()
        else:
            copies[name] = value
    return copies


def save_dense(folder: Path, tensors: Mapping[str, Any], group: Any = None) -> None:
    """Write the tensors that no other rank writes, and flush them to the disk; on rank 0 the metadata too.

    group: a process group that nobody else uses meanwhile; every rank of it calls this, with what it has (None: one
    process). Raises OSError on every rank when one of them cannot write, naming it.
    """
    import torch.distributed.checkpoint as dcp

    _hush()
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except (Exception, dcp.CheckpointException) as error:
        raise OSError(*reason_of(error)) from error


def dense_shapes(folder: Path) -> dict[str, torch.Size | None]:
    """The names in a folder and their shapes over all ranks (None: no tensor). Raises UserError where it is damaged."""
    return {name: getattr(entry, "size", None) for name, entry in _metadata(folder).items()}


def load_dense(folder: Path, into: dict[str, Any]) -> None:
    """Fill these tensors (a DTensor: this rank's part of it) in place; values that are no tensors are replaced.

    Every rank reads what it asks for by itself. Raises UserError for a name that is missing or has another shape, and
    for files that are damaged.
    """
    import torch.distributed.checkpoint as dcp

    saved = dense_shapes(folder)
    for name, value in into.items():
        shapes = saved.get(name), getattr(value, "shape", None)
        if name not in saved or shapes[0] != shapes[1]:
            was, wants = ("none" if shape is None else tuple(shape) for shape in shapes)
            raise UserError(
                f"{folder.parent}: {name} has shape {was}, the run wants {wants}; it belongs to another configuration"
            )
    _hush()
    if not into:
        return
    try:
        dcp.load(into, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    except (Exception, dcp.CheckpointException) as error:
        raise _damaged(folder, error) from error


def load_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Every tensor whose name begins with the prefix, whole, on the CPU, by its name without it."""
    into = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _metadata(folder).items()
        if name.startswith(prefix) and hasattr(entry, "size")
    }
    load_dense(folder, into)
    return {name.removeprefix(prefix): tensor for name, tensor in into.items()}


def reason_of(error: BaseException) -> tuple[int, str]:
    """An error number (EIO where there is none) and one line, out of what DCP, torch and safetensors make of an
    error."""
    for rank, (inner, _) in getattr(error, "failures", {}).items():
        number, text = reason_of(inner)
        return number, text if len(error.failures) == 1 and rank == 0 else f"rank {rank}: {text}"
    first: BaseException | None = error
    while first is not None:
        if isinstance(first, OSError) and first.errno:
            return first.errno, first.strerror or str(first)
        first = first.__cause__ or first.__context__
    if "inline_container" in str(error):
        # torch's writer of archives, of a file that did not take all it was given.
        return errno.ENOSPC, os.strerror(errno.ENOSPC)
    return errno.EIO, (str(error).splitlines() or [type(error).__name__])[0]


def _metadata(folder: Path) -> Mapping[str, Any]:
    """DCP's entry for each name."""
    import torch.distributed.checkpoint as dcp

    try:
        return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        # A damaged pickle can raise anything.
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: BaseException) -> UserError:
    return UserError(f"{folder}: damaged ({reason_of(error)[1]}); remove {folder.parent} to use the one before")


def _hush() -> None:
    """One process is no mistake, whatever DCP says."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
