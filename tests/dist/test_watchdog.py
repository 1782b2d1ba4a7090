"""Whatever happens to one rank, all are gone within the timeout and a little more, each with one line that says why.

Lives here: ranks that are killed, stopped, faulty, late or alone, at chosen and at random instants; a killed torchrun
and a restarted one; what must not be taken for a fault.
Not here: the trainer (test_equal.py), and fifty kills of it (tests/soak.py).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mome import restart, watchdog
from mome.errors import UserError
from mome.watchdog import Watchdog, kill_stopped, lives, lost, plain, this_process
from mome.world import World
from tests.dist.processes import ROOT, SHARED, describe, launch, start

TIMEOUT = 3.0
# Beyond the timeout: a beat, the search, the grace, and a busy machine.
MORE = 8.0
AGES = 100.0


def cycle(world: World) -> None:
    """The collectives of a step, one of them waited for after those that follow it."""
    row_ids = world.all_reduce("row ids", torch.ones(3))
    world.all_reduce("row gradients", torch.ones(5)).wait()
    row_ids.wait()
    world.all_reduce("step sums", torch.ones(1)).wait()


def train(world: World, faults: dict[int, str], at: int, far: bool = False, steps: int = 10_000) -> str:
    """Steps with a watchdog, errors as main() shows them. faults: rank -> what happens to it at step `at`; far: nobody
    can tell whether a process lives."""
    if far:
        watchdog._here = lambda: ""
    try:
        with Watchdog(world, TIMEOUT):
            print("ready", flush=True)
            for world.step in range(1, steps + 1):
                fault = faults.get(world.rank) if world.step == at else None
                if fault == "raise":
                    raise ValueError("no such row")
                elif fault == "user":
                    raise UserError("give a smaller table")
                elif fault == "sleep":
                    time.sleep(AGES)
                elif fault == "exit":
                    os._exit(7)
                elif fault:
                    os.kill(os.getpid(), getattr(signal, fault))
                cycle(world)
                time.sleep(0.002)
    except UserError as error:
        print(f"main: rank {world.rank}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    return "done"


def ends(faults: dict[int, str], world: int = 3, at: int = 5, **options) -> list:
    with launch(train, world, faults, at, *options.values(), timeout=AGES) as ranks:
        ranks.wait_for("ready")
        began = time.monotonic() - ranks.started
        ended = ranks.wait(TIMEOUT + MORE + 5)
    assert all(one.code not in (0, None) for one in ended), describe(ended)
    assert all(one.seconds - began < TIMEOUT + MORE for one in ended), describe(ended)
    return ended


def one_line(ended: list, but: set[int]) -> list[str]:
    """The only line of each rank but those."""
    lines = [one.err.splitlines() for rank, one in enumerate(ended) if rank not in but]
    assert all(len(one) == 1 for one in lines), describe(ended)
    return [one[0] for one in lines]


@pytest.mark.parametrize(("fault", "far"), [("SIGKILL", False), ("SIGKILL", True), ("exit", False)])
def test_a_rank_that_dies_is_named_by_all_others(fault, far):
    ended = ends({1: fault}, far=far)
    assert ended[1].code == (7 if fault == "exit" else -signal.SIGKILL) and not ended[1].err
    for rank, line in zip((0, 2), one_line(ended, {1})):
        assert line.startswith((f"main: rank {rank}: in '", f"-c: rank {rank}: in '")) and "nothing was saved before" in line
        assert "step 5: rank 1 (process " in line
        assert ("has given no sign of life" if far else "died, last seen") in line
    assert max(one.seconds for one in ended) < TIMEOUT + (MORE if far else 1)


def test_a_rank_that_is_stopped_is_named_and_ended():
    ended = ends({2: "SIGSTOP"})
    assert ended[2].code == -signal.SIGKILL
    for line in one_line(ended, {2}):
        assert "rank 2 (process " in line and "has given no sign of life for 3 s" in line and "of step 5: " in line


def test_a_rank_that_never_comes_is_named_with_what_it_lacks():
    ended = ends({1: "sleep"})
    for line in one_line(ended, set()):
        assert "rank 1 (process " in line and "has not come to 'row ids' of step 5 in 3 s" in line


def late(world: World) -> None:
    """Rank 1 has begun the first collective of the step as all have, and never comes to the second."""
    with Watchdog(world, TIMEOUT):
        cycle(world)
        world.step = 9
        row_ids = world.all_reduce("row ids", torch.ones(3))
        if world.rank == 1:
            time.sleep(AGES)
        world.all_reduce("row gradients", torch.ones(5)).wait()
        row_ids.wait()


def test_what_is_under_way_is_not_what_a_late_rank_lacks():
    with launch(late, 2, timeout=AGES) as ranks:
        ended = ranks.wait(TIMEOUT + MORE)
    assert [one.code for one in ended] == [1, 1], describe(ended)
    for line in one_line(ended, set()):
        assert "rank 1 (process " in line and "has not come to 'row gradients' of step 9 in 3 s" in line


@pytest.mark.parametrize(("fault", "why"), [("raise", "ValueError: no such row"), ("user", "give a smaller table")])
def test_an_error_of_one_rank_is_told_by_all(fault, why):
    ended = ends({0: fault})
    assert why in ended[0].err.splitlines()[-1]
    for rank, line in zip((1, 2), one_line(ended, {0})):
        assert f"rank {rank}: " in line and f"rank 0 failed at step 5: {why}" in line
    assert max(one.seconds for one in ended) < TIMEOUT


def test_one_that_computes_ends_when_others_find_a_dead_one():
    ended = ends({0: "SIGKILL", 2: "sleep"})
    for line in one_line(ended, {0}):
        assert "rank 0 (process " in line and "died, last seen" in line


def test_two_dead_neighbours_and_the_one_that_watches_them():
    ended = ends({1: "SIGKILL", 2: "SIGKILL", 0: "sleep"})
    (line,) = one_line(ended, {1, 2})
    assert "rank 0: at step 5: rank 1 (process " in line and "died" in line


def test_at_random_instants():
    chance = random.Random(3)
    for _ in range(6):
        with launch(train, 3, {}, 0, timeout=AGES) as ranks:
            ranks.wait_for("ready")
            time.sleep(chance.uniform(0.0, 0.1))
            victim = chance.randrange(3)
            ranks.kill(victim)
            began = time.monotonic() - ranks.started
            ended = ranks.wait(TIMEOUT + MORE)
        assert all(one.code not in (0, None) for one in ended), describe(ended)
        for line in one_line(ended, {victim}):
            assert f"rank {victim} (process " in line and "died, last seen" in line, describe(ended)
        assert max(one.seconds for one in ended) - began < TIMEOUT


def patient(world: World) -> bool:
    """Long work outside collectives, with one under way; and ranks that leave long before others."""
    with Watchdog(world, 1.5) as dog:
        pending = world.all_reduce("row ids", torch.ones(3))
        time.sleep(3.2)
        pending.wait()
        world.meet("end")
        time.sleep(3.2 * (world.rank == 1))
        broken = dog.broken()
    return broken


def test_work_outside_collectives_may_be_long():
    with launch(patient, 3, timeout=AGES) as ranks:
        ended = ranks.wait(30.0)
    assert [one.code for one in ended] == [0, 0, 0] and not any(one.err for one in ended), describe(ended)
    assert not ended[0].result


def test_a_machine_that_sleeps_is_no_dead_machine():
    with launch(train, 2, {}, 0, False, 400, timeout=AGES) as ranks:
        ranks.wait_for("ready")
        # The first one has missed a sign of life when it stops too, and wakes before the other.
        stop, go, short = signal.SIGSTOP, signal.SIGCONT, 0.4 * TIMEOUT
        for rank, number, pause in ((1, stop, short), (0, stop, 1.5 * TIMEOUT), (0, go, 0.1), (1, go, 0.0)):
            ranks.kill(rank, number)
            time.sleep(pause)
        ended = ranks.wait(40.0)
    assert [one.result for one in ended] == ["done", "done"] and not any(one.err for one in ended), describe(ended)


def left_behind(world: World) -> bool:
    dog = Watchdog(world, AGES)
    print("ready", flush=True)
    if world.rank == 1:
        time.sleep(AGES)
    assert not dog.broken()
    deadline = time.monotonic() + 10
    while not dog.broken() and time.monotonic() < deadline:
        time.sleep(0.01)
    return dog.broken()


def test_a_handler_of_signals_can_ask_whether_a_peer_is_gone():
    with launch(left_behind, 2) as ranks:
        ranks.wait_for("ready")
        time.sleep(0.2)
        ranks.kill(1)
        ended = ranks.wait(10.0)
    assert ended[0].code == 1 or ended[0].result, describe(ended)


def fails_early(world: World) -> None:
    if world.rank == 1:
        sys.exit(3)
    Watchdog(world, TIMEOUT)


def test_one_that_ends_before_the_first_step():
    with pytest.raises(AssertionError, match=r"UserError: another process ended before the first step"):
        start(fails_early, 2)


def test_one_process_needs_none():
    with Watchdog(World(), 1.0) as dog:
        assert not dog.broken()
    with pytest.raises(RuntimeError, match="gloo of my own"), Watchdog(World(), 1.0):
        raise RuntimeError("gloo of my own")


def test_a_process_lives_until_it_is_gone():
    here = this_process()
    assert lives(here) and not lives(here._replace(born="1"))
    assert lives(here._replace(machine="elsewhere", pid=1, born="1"))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = here._replace(pid=child.pid, born=watchdog._state(child.pid)[1])
    os.kill(child.pid, signal.SIGSTOP)
    kill_stopped(process._replace(born="1"))
    kill_stopped(process._replace(machine=""))
    assert lives(process)
    kill_stopped(process)
    deadline = time.monotonic() + 5
    # Nobody has asked for its status yet.
    while lives(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lives(process)
    child.communicate()
    assert not lives(process)


def test_errors_in_one_line():
    broke = RuntimeError("[pytorch/third_party/gloo/gloo/pair.cc:553] Connection closed by peer [::1]:6. Typically.\nX")
    assert lost(broke) and plain(broke) == "Connection closed by peer [::1]:6"
    assert lost(torch.distributed.DistStoreError("wait timeout")) and not lost(ValueError("gloo"))
    assert not lost(RuntimeError("shape")) and plain(RuntimeError("a\n  b")) == "RuntimeError: a b"
    assert plain(UserError("give less")) == "give less" and plain(KeyError()) == "KeyError()"


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from mome import restart
from mome.errors import UserError
from mome.watchdog import Watchdog
from mome.world import World
from tests.dist.test_watchdog import cycle

folder = Path(sys.argv[1])
world = World.join(torch.device("cpu"), 30.0)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
found = recalled = world.gather_objects("folder", restart.recall(folder) if world.first else None)[0]
if found is None:
    found = folder / "run"
    if world.first:
        found.mkdir()
        (found / "config.json").write_text("{}")
        restart.remember(folder, found)
(folder / f"{attempt}.{world.rank}").write_text(f"{os.getpid()} {recalled and recalled.name}")
try:
    with Watchdog(world, 3.0):
        for world.step in range(1, int(sys.argv[2]) + 1):
            cycle(world)
            if world.step == 3 and world.rank == 1 and attempt == 0:
                os.kill(os.getpid(), getattr(signal, sys.argv[3]))
            time.sleep(0.01)
        world.meet("end")
    world.close()
except UserError as error:
    print(f"main: rank {world.rank}: {error}", file=sys.stderr)
    sys.exit(1)
"""


def torchrun(folder: Path, restarts: int, *words: str) -> subprocess.Popen:
    (folder / "script.py").write_text(SCRIPT)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        f"--max-restarts={restarts}", str(folder / "script.py"), str(folder), *words,
    ]  # fmt: skip
    env = {**os.environ, **SHARED, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_torchrun_restarts_what_a_kill_ended(tmp_path):
    agent = torchrun(tmp_path, 2, "20", "SIGKILL")
    _, err = agent.communicate(timeout=60)
    assert agent.returncode == 0, err
    # The first attempt found no pointer and the second one did.
    notes = {path.name: path.read_text().split()[1] for path in sorted(tmp_path.glob("?.?"))}
    assert notes == {"0.0": "None", "0.1": "None", "1.0": "run", "1.1": "run"}, err
    assert len(list(tmp_path.glob(".torchrun_*"))) == 1
    # torchrun may be quicker to end the one that is left than that is to say why.
    said = [line for line in err.splitlines() if line.startswith("main: rank 0: ")]
    assert len(said) <= 1 and all("rank 1 (process " in one and "died, last seen" in one for one in said), err


def test_a_killed_torchrun_leaves_no_process_behind(tmp_path):
    agent = torchrun(tmp_path, 0, "1000000", "SIGCONT")
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"0.{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline and agent.poll() is None
        time.sleep(0.02)
    time.sleep(1.0)
    pids = [int((tmp_path / f"0.{rank}").read_text().split()[0]) for rank in range(2)]
    ranks = [this_process()._replace(pid=pid, born=watchdog._state(pid)[1]) for pid in pids]
    agent.kill()
    began = time.monotonic()
    while any(lives(one) for one in ranks):
        assert time.monotonic() - began < TIMEOUT + MORE
        time.sleep(0.02)
    _, err = agent.communicate(timeout=10)
    said = err.splitlines()
    assert 1 <= len(said) <= 2 and all("script.py: rank " in one and "has torchrun died?" in one for one in said), err


def asks(late: bool) -> str:
    if late and os.environ["RANK"] == "1":
        return ""
    try:
        store = restart.attempt_store(1.0)
        store.set(os.environ["RANK"], "here")
        there = [store.get(rank) for rank in "012"]
    except (UserError, torch.distributed.DistStoreError) as error:
        return plain(error)
    # Not the store of all attempts, but one that all ranks of this one share.
    others = torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    return f"{there} {others.check(['0'])}"


def test_every_attempt_has_a_store_of_its_own():
    assert start(asks, 3, False, join=False) == 3 * ["[b'here', b'here', b'here'] False"]
    said = start(asks, 3, True, join=False)
    assert "ranks [1] have not come in 1 s" in said[0] and "timeout" in said[2]


def test_the_pointer_of_a_job(tmp_path, monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "20260101_local"
    restart.remember(tmp_path, run)
    assert restart.recall(tmp_path) is None and not list(tmp_path.iterdir())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a/b c")
    restart.remember(tmp_path, run)
    assert [path.name for path in tmp_path.iterdir()] == [".torchrun_a_b_c"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restart.recall(tmp_path) is None
    run.mkdir()
    (run / "config.json").write_text(json.dumps({}))
    assert restart.recall(tmp_path) == run
    # Another job of that name begins.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert restart.recall(tmp_path) is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restart.recall(tmp_path) is None
    # What the job trains is part of its name; and who was asked to stop is not started again.
    restart.remember(tmp_path, run, "seed 0")
    assert restart.recall(tmp_path, "seed 0") == run and restart.recall(tmp_path, "seed 1") is None
    restart.remember(tmp_path, run, "seed 0", stopped=True)
    with pytest.raises(UserError, match="stopped on request, so not started again; go on with --resume"):
        restart.recall(tmp_path, "seed 0")
    # What nobody restarts any more is removed when another job begins.
    (old,) = tmp_path.glob(".torchrun_*")
    os.utime(old, (1e9, 1e9))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert restart.recall(tmp_path, "seed 1") is None and not old.exists()
