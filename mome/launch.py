"""How the processes of a run come together: each with its device, the same corpus, one folder, no disagreement.

Lives here: who may start with how many processes, opening the corpus in turn, the folder of all, what must be the same.
Not here: collectives (mome/world.py), dead peers (mome/watchdog.py), what a folder holds (mome/runfolder.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from mome.config import RunConfig, flag_of, flat, to_dict
from mome.errors import SharedError, UserError
from mome.restart import recall, remember
from mome.run import Corpus, open_corpus
from mome.runfolder import FREE_KEYS, RunFolder, revision, source_hash
from mome.world import World


def silent(*_: object, **__: object) -> None:
    """What the processes print that do not speak for all."""


def require_shares(config: RunConfig, world: World) -> None:
    """Raise SharedError unless the micro-rows of every stage can be shared out evenly, naming numbers that can."""
    rows = [stage.rows for stage in config.schedule.stages]
    wrong = [count for count in rows if count % world.size]
    if wrong:
        common = math.gcd(*rows)
        fit = [size for size in range(1, common + 1) if common % size == 0]
        near = [max(size for size in fit if size < world.size), *[size for size in fit if size > world.size][:1]]
        raise SharedError(
            f"{wrong[0]} micro-rows a step cannot be shared out evenly to {world.size} processes: "
            f"--nproc_per_node={' or '.join(map(str, near))}"
        )


def open_together(config: RunConfig, dtype: torch.dtype, world: World, say: Callable[[str], None]) -> Corpus:
    """The corpus on every rank, once it is sure that all are about to train the same, each its share.

    The first rank opens it before the others, for it may have to be made.
    """
    require_shares(config, world)
    corpus = open_corpus(config, say) if world.first else None
    world.meet("corpus")
    corpus = corpus or open_corpus(config, silent)
    require_agreement(config, corpus, dtype, world)
    return corpus


def require_agreement(config: RunConfig, corpus: Corpus, dtype: torch.dtype, world: World) -> None:
    """Raise SharedError, naming what differs and where, unless all ranks are about to train the same."""
    if world.alone:
        return
    values = flat(to_dict(config))
    # All of them: who alone compares weights, or is more patient, leaves the others waiting.
    facts = {f"--{flag_of(key)}": value for key, value in values.items() if key != "runs_dir"}
    facts |= {
        "the data": corpus.fingerprint, "the source": source_hash(), "the git revision": revision(),
        "the version of torch": torch.__version__, "the dtype": str(dtype), "the threads": torch.get_num_threads(),
    }  # fmt: skip
    world.agree(facts)


def shared_folder(config: RunConfig, resume: Path | None, world: World) -> tuple[RunFolder, str]:
    """The run's folder, on a file system that all ranks share, and what is to be done in it: "start", "go on", or (an
    earlier attempt of this torchrun has come to a result) "nothing".

    The first rank makes it, and notes it for those who may come after this attempt.
    """
    path, what, refusal = resume, "go on", ""
    if world.first:
        try:
            before = recall(config.runs_dir, job_of(config))
        except UserError as error:
            before, refusal = None, str(error)
        if resume is None and before is not None:
            path, what = before, "nothing" if (before / "result.json").exists() else "go on"
        elif resume is None and not refusal:
            path, what = RunFolder.create(config).path, "start"
            remember(config.runs_dir, path, job_of(config))
    path, what, refusal = world.gather_objects("folder", (path, what, refusal))[0]
    if refusal:
        raise SharedError(refusal)
    if not world.alone and not (path / "config.json").is_file():
        raise UserError(f"{path}: not to be seen by this process: give --runs-dir a folder that all of them share")
    return RunFolder.open(path), what


def remember_stop(config: RunConfig, folder: RunFolder) -> None:
    """A stop was asked for: torchrun shall not start the run again. The first rank calls it."""
    # A run that was moved here may have no such folder any more, and has been stopped all the same.
    with contextlib.suppress(OSError):
        remember(config.runs_dir, folder.path, job_of(config), stopped=True)


def job_of(config: RunConfig) -> str:
    """What a restart must have in common with the attempt before it: all that is trained."""
    values = flat(to_dict(config))
    return repr(sorted((key, str(value)) for key, value in values.items() if key not in FREE_KEYS))


def require_replicas(world: World, hashes: Mapping[str, int], step: int) -> None:
    """Raise SharedError unless every rank has the same dense weights, whose bits were hashed by name."""
    everybody = world.gather_objects("replicas", dict(hashes))
    for name, first in everybody[0].items():
        odd = [rank for rank, one in enumerate(everybody) if one[name] != first]
        if odd:
            raise SharedError(
                f"step {step}: {name} on rank {', '.join(map(str, odd))} is not what it is on rank 0: resume from the "
                "last checkpoint, and suspect the memory of that machine"
            )
