"""Comparing arms: order, resuming, failing, stopping, and what is left in the folder.

Lives here: real processes of a small trainer that leaves run folders as train_gpt.py does.
Not here: train_gpt.py itself (tests/tools/test_export.py), the table (tests/tools/test_verdict.py).
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mome.errors import UserError
from mome.tools import compare
from mome.tools.compare import Arm, RunFailed, order, parse_arm, run_arms
from mome.tools.live import Live, time_to_go
from mome.tools.verdict import write_verdict

ROOT = Path(__file__).resolve().parents[2]

# A step multiplies a state that only a checkpoint carries over, so that a run that was not resumed would end elsewhere.
TRAINER = """
import json, os, signal, sys, time
from pathlib import Path

words = sys.argv[1:]
flag = lambda name, default=None: words[words.index(name) + 1] if name in words else default
preset, seed, steps = words[0], int(flag("--seed")), int(flag("--steps", 6))
folder = flag("--resume")
log = open(Path(__file__).with_name("calls.jsonl"), "a")
log.write(json.dumps(words) + "\\n")
log.close()
once = Path(__file__).with_name(f"{preset}{seed}.once")
state, start = {"local": 1.0, "local-dense": 2.0}.get(preset, 3.0) + 0.125 * seed, 0
if folder:
    folder = Path(folder)
    saved = sorted(folder.glob("checkpoint/*/COMPLETE"))[-1].parent
    start, state = json.loads((saved / "state").read_text())
else:
    folder = Path(flag("--runs-dir")) / f"20260101-{time.time_ns():020d}_{preset}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"preset": preset, "steps": steps, "seed": seed}))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "cores": 2}))
stop = []
signal.signal(signal.SIGINT, lambda *_: stop.append(1))
if "--fail" in words and preset == "local-dense" and seed == 1:
    failed = len(once.read_text()) if once.exists() else 0
    once.write_text("x" * (failed + 1))
    if failed == 0:
        print("\\n".join(f"noise {i}" for i in range(50)), file=sys.stderr)
        sys.exit("train_gpt.py: the disk is full")
    if failed == 1:
        sys.exit("train_gpt.py: still full")
for step in range(start + 1, steps + 1):
    time.sleep(float(flag("--sleep", 0)))
    state *= 1.0 - 1.0 / (2 + step)
    line = {"step": step, "loss": state, "tokens": 10 * step, "seconds": 0.5 * step}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line | ({"val_loss": state} if step % 2 == 0 else {})) + "\\n")
    made = folder / f"checkpoint/step_{step:06d}"
    made.mkdir(parents=True)
    (made / "state").write_text(json.dumps([step, state]))
    (made / "COMPLETE").touch()
    if stop:
        (folder / "stopped").touch()
        sys.exit(130)
    if "--die" in words and step == 3 and not once.exists():
        once.touch()
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 4, "lo')
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
if "--quit" in words:
    sys.exit(0)
knockout = {} if preset == "local-dense" else {"full": state, "off": state + 0.5 + seed, "mean_row": state + 0.25}
result = {"val_loss": state, "val_bpb": state / 2, "step_ms": 100.0 + 10 * seed + (5 if preset == "local" else 0)}
result |= {"steps": steps, "tokens": 10 * steps, "seconds": 1.0, "knockout": knockout}
(folder / "result.json").write_text(json.dumps(result))
"""
ARMS = [Arm("local-dense", ("local-dense",)), Arm("local", ("local",)), Arm("third", ("other", "--x", "1"))]


@pytest.fixture
def trainer(tmp_path):
    path = tmp_path / "trainer.py"
    path.write_text(TRAINER)
    return [sys.executable, "-S", str(path)]


def calls(trainer) -> list[list[str]]:
    path = Path(trainer[-1]).with_name("calls.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def final(folder: Path) -> float:
    return json.loads((folder / "result.json").read_text())["val_loss"]


def expected(preset_value: float, seed: int, steps: int = 6) -> float:
    return (preset_value + 0.125 * seed) * math.prod(1 - 1 / (2 + step) for step in range(1, steps + 1))


def test_an_arm_in_one_word():
    assert parse_arm("local") == Arm("local", ("local",))
    assert parse_arm("local --memories routed") == Arm("local --memories routed", ("local", "--memories", "routed"))
    assert parse_arm("routed=local --lr=0.1 'a b'") == Arm("routed", ("local", "--lr=0.1", "a b"))


@pytest.mark.parametrize(
    "wrong",
    ["", "  ", "--seed 1", "x=", "local 'open", "local --seed 1", "local --runs_dir=x", "a=local --resume y"],
)
def test_a_wrong_arm_is_refused(wrong):
    with pytest.raises(UserError, match=r"^arm "):
        parse_arm(wrong)


def test_arms_are_interleaved_there_and_back():
    a, b, c = ARMS
    assert order(ARMS, [0, 1, 2]) == [(a, 0), (b, 0), (c, 0), (c, 1), (b, 1), (a, 1), (a, 2), (b, 2), (c, 2)]
    assert order([a], range(2)) == [(a, 0), (a, 1)]


def test_runs_in_order_and_skips_what_is_done(trainer, tmp_path, capsys):
    out = tmp_path / "out"
    runs = run_arms(ARMS, [0, 1], out, command=trainer, steps=4, extra=["--y", "2"])
    seen = calls(trainer)
    assert [(words[0], words[words.index("--seed") + 1]) for words in seen] == [
        ("local-dense", "0"), ("local", "0"), ("other", "0"), ("other", "1"), ("local", "1"), ("local-dense", "1"),
    ]  # fmt: skip
    assert seen[2] == [*"other --x 1 --seed 0 --steps 4 --y 2 --runs-dir".split(), f"{out}/third/seed0"]
    assert list(runs) == ["local-dense", "local", "third"] and all(list(by_seed) == [0, 1] for by_seed in runs.values())
    assert final(runs["local"][1]) == pytest.approx(expected(1.0, 1, 4))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "[1/6] local-dense, seed 0" and said[1].startswith("[1/6] local-dense, seed 0: validation loss ")
    assert said[1].endswith("to go") and not said[-1].endswith("to go")

    assert run_arms(ARMS, [0, 1], out, command=trainer, steps=4, extra=["--y", "2"]) == runs
    assert len(calls(trainer)) == 6
    assert capsys.readouterr().out.count("done before") == 6
    more = run_arms(ARMS[:2], [0, 1, 2], out, command=trainer, steps=4, extra=["--y", "2"])
    assert len(calls(trainer)) == 8 and more["local"][0] == runs["local"][0]


def test_a_killed_run_goes_on_where_it_was(trainer, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RunFailed, match="local-dense, seed 0 failed with exit status -9 "):
        run_arms(ARMS[:2], [0], out, command=trainer, extra=["--die"])
    (killed,) = (out / "local-dense/seed0").glob("*_local-dense")
    with pytest.raises(RunFailed, match=r"^local, seed 0 failed"):
        run_arms(ARMS[:2], [0], out, command=trainer, extra=["--die"])
    # It went on with the folder's checkpoint, and ends where an undisturbed run would.
    assert calls(trainer)[1][-2:] == ["--resume", str(killed)]
    runs = run_arms(ARMS[:2], [0], out, command=trainer, extra=["--die"])
    assert runs["local-dense"] == {0: killed}
    assert final(killed) == pytest.approx(expected(2.0, 0))
    assert final(runs["local"][0]) == pytest.approx(expected(1.0, 0))


def test_a_run_without_a_whole_checkpoint_starts_again(trainer, tmp_path):
    place = tmp_path / "out/local/seed0"
    for name in (".starting_7", "20250101-000000_local"):
        (place / name / "checkpoint/step_000001").mkdir(parents=True)
        (place / name / "config.json").write_text("{}")
    (place / ".starting_7/result.json").write_text('{"val_loss": 0}')
    (place / "20250101-000000_local/result.json").write_text('{"val_loss"')
    runs = run_arms(ARMS[1:2], [0], tmp_path / "out", command=trainer)
    assert "--resume" not in calls(trainer)[0] and final(runs["local"][0]) == pytest.approx(expected(1.0, 0))


def test_a_failing_arm_stops_and_keeps_what_is_done(trainer, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RunFailed, match="local-dense, seed 1 failed with exit status 1") as failure:
        run_arms(ARMS[:2], [1, 0], out, command=trainer, extra=["--fail"])
    tail = failure.value.tail.splitlines()
    assert len(tail) == 20 and tail[-1] == "train_gpt.py: the disk is full" and tail[0] == "noise 31"
    with pytest.raises(RunFailed) as failure:
        run_arms(ARMS[:2], [1, 0], out, command=trainer, extra=["--fail"])
    assert failure.value.tail == "train_gpt.py: still full"
    run_arms(ARMS[:2], [1, 0], out, command=trainer, extra=["--fail"])
    assert [words[0] for words in calls(trainer)] == [*["local-dense"] * 3, "local", "local", "local-dense"]
    assert (out / "local-dense/seed1/stderr.log").read_text().count("noise 49") == 1


def test_a_run_without_a_result_stops(trainer, tmp_path):
    with pytest.raises(RunFailed, match="local, seed 0 was stopped"):
        run_arms(ARMS[1:2], [0], tmp_path, command=trainer, extra=["--quit"])


def test_runs_of_other_words_are_not_mixed(trainer, tmp_path):
    run_arms(ARMS[:1], [0], tmp_path, command=trainer, steps=2)
    with pytest.raises(UserError, match=r"holds a run of other words \(local-dense --seed 0 --steps 2\)"):
        run_arms(ARMS[:1], [0], tmp_path, command=trainer, steps=3)
    assert len(calls(trainer)) == 1


def test_arms_that_cannot_be_told_apart_are_refused(trainer, tmp_path):
    for names in (("a", "a"), ("a b", "a-b")):
        with pytest.raises(UserError, match="share a name or its folder"):
            run_arms([Arm(name, ("local",)) for name in names], [0], tmp_path, command=trainer)


def test_two_compares_do_not_train_in_one_folder(trainer, tmp_path):
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from mome.tools.compare import Arm, run_arms
run_arms([Arm("local", ("local",))], [0], Path({str(tmp_path)!r}), command={trainer!r}, extra=["--sleep", "0.3"])
"""
    first = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: list(tmp_path.glob("local/seed0/*/metrics.jsonl")))
        first.kill()  # its trainer lives on, and must not get company
        first.wait()
        with pytest.raises(UserError, match="being trained by another process"):
            run_arms(ARMS[1:2], [0], tmp_path, command=trainer, extra=["--sleep", "0.3"])
    finally:
        first.kill()
    wait_for(lambda: list(tmp_path.glob("local/seed0/*/result.json")))
    assert len(calls(trainer)) == 1


def wait_for(condition, seconds=15.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_passed_on_and_the_command_goes_on_later(trainer, tmp_path, number):
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from mome.tools import compare
sys.exit(compare.main(sys.argv[1:], {trainer!r}))
"""
    words = ["--arms", "local", "--seeds", "1", "--out", str(tmp_path / "out"), "--", "--sleep", "0.1"]
    process = subprocess.Popen([sys.executable, "-c", script, *words], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(tmp_path.glob("out/local/seed0/*/checkpoint/*/COMPLETE")))
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and said.startswith("stopped; ") and said.count("\n") == 1
    (folder,) = tmp_path.glob("out/local/seed0/*_local")
    assert (folder / "stopped").exists() and not (folder / "result.json").exists()
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert final(folder) == pytest.approx(expected(1.0, 0)) and "--resume" in calls(trainer)[-1]
    assert "| local " in done.stdout and (tmp_path / "out/compare.png").exists()


def test_the_files_of_a_comparison(trainer, tmp_path):
    out = tmp_path / "out"
    runs = run_arms(ARMS, [0, 1], out, command=trainer)
    table = write_verdict(runs, out, ["python", "-m", "mome", "compare", "--arms", "a b"])
    record = json.loads((out / "compare.json").read_text(), parse_constant=pytest.fail)
    assert [row["arm"] for row in record["arms"]] == ["local-dense", "local", "third"]
    base = sum(expected(2.0, seed) for seed in (0, 1)) / 2
    assert record["arms"][0]["val_loss_mean"] == pytest.approx(base)
    assert record["arms"][1]["difference_mean"] == pytest.approx(expected(1.0, 0) - expected(2.0, 0))
    assert record["arms"][1]["step_ms_ratio"] == pytest.approx((105 / 100 + 115 / 110) / 2)
    assert record["arms"][1]["knockout"] == pytest.approx({"off": 1.0, "mean_row": 0.25})
    assert record["arms"][0]["t"] is None and len(record["runs"]) == 6
    page = (out / "compare.md").read_text()
    assert table in page and "Every run: 6 steps, 60 tokens." in page and "cores 2, torch 2.13.0" in page
    assert "compare --arms 'a b'" in page and page.count("seed 1: `") == 3
    assert (out / "compare.png").stat().st_size > 10_000
    (runs["third"][0] / "result.json").write_text('{"val_loss": 1.0, "steps": 7, "tokens": 60}')
    write_verdict(runs, out, ["x"])
    assert "The runs differ in length: 6 steps, 60 tokens; 7 steps, 60 tokens." in (out / "compare.md").read_text()


def test_the_command_prints_the_warning(trainer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own answer to a signal
    words = ["--arms", "local", "local-dense", "--seeds", "1", "--out", str(tmp_path / "out")]
    assert compare.main(words, trainer) == 0
    assert "warning" not in capsys.readouterr().out
    (environment,) = (tmp_path / "out/local/seed0").glob("*_local/environment.json")
    environment.write_text(json.dumps({"revision": "d" * 40}))
    assert compare.main(words, trainer) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("warning: the runs do not come from one") for line in lines].count(True) == 1


def test_time_to_go():
    taken = {"a": [10.0, 20.0], "b": [40.0]}
    assert time_to_go(5.0, ["a", "b", "b"], taken) == 5 + 15 + 40 + 40
    assert time_to_go(0.0, ["c"], taken) == pytest.approx(70 / 3)
    assert time_to_go(7.0, [], {}) == 7.0
    assert math.isnan(time_to_go(7.0, ["a"], {})) and math.isnan(time_to_go(math.nan, [], taken))


def test_plain_lines_tell_where_a_long_run_is(capsys, monkeypatch):
    monkeypatch.setattr("mome.tools.live.PLAIN_EVERY", 0.0)
    with Live(2) as live:
        live.begin("a, seed 0")
        live.tick("a, seed 0", 5, 10, 61.0)
        live.tick("a, seed 0", 6, math.nan, math.nan)
        live.end("a, seed 0", "done", 9.5)
    assert capsys.readouterr().out.splitlines() == [
        "[1/2] a, seed 0", "[1/2] a, seed 0, step 5 of 10; 1 min 01 s to go", "[1/2] a, seed 0, step 6",
        "[1/2] a, seed 0: done; 9.5 s to go",
    ]  # fmt: skip


def test_a_terminal_gets_a_bar_and_keeps_the_outcomes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with Live(2) as live:
        live.begin("[a], seed 0")
        live.tick("[a], seed 0", 5, 10, 61.0)
        live.end("[a], seed 0", "done", 9.5)
    out = capsys.readouterr().out
    assert "[1/2] [a], seed 0: done; 9.5 s to go\n" in out and "1/2" in out.splitlines()[-2]


def test_the_last_whole_line_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert compare._last_step(path) is None
    long = '{"step": 1}\n' * 999 + '{"step": 2}\n'
    for text, step in (("", None), ('{"step": 1', None), ('{"step": 1}\n{"st', 1), (long, 2)):
        path.write_text(text)
        assert compare._last_step(path) == step
