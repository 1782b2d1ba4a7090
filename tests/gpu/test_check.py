"""check.sh and its report, on any machine: a stub interpreter stands in for the GPU.

Lives here: the exit codes, what the report holds, and what counts as a failure.
Not here: the checks of the GPU themselves (test_cuda.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent

# Answers as an interpreter with a GPU would, and leaves what pytest and train_gpt.py leave.
STUB = """#!/bin/bash
all="$*"
case "$all" in
    "-c import torch") exit 0 ;;
    *cuda.is_available*) exit 0 ;;
    *"-m pytest -m gpu tests/gpu"*) echo "two tests"; cp "$LEFT/tests.xml" "${all##*--junitxml=}"; exit $TESTS_EXIT ;;
    *"-m torch.distributed.run --standalone --nproc_per_node=1 train_gpt.py local --steps 20 --runs-dir"*)
        cp -r "$LEFT/runs" "${@: -1}" ;;
    *) exec "@REAL@" "$@" ;;
esac
""".replace("@REAL@", sys.executable)
CASES = '<testcase classname="t" name="a"/><testcase classname="t" name="b">{}</testcase>'
PASSED, FAILED, SKIPPED = (f"<testsuite>{CASES.format(tag)}</testsuite>" for tag in ("", "<failure/>", "<skipped/>"))
FALLING = [9.0 - n / 10 for n in range(20)]


def leave(work: Path, xml: str = PASSED, losses: list | None = None, device: str = "Stub 9000") -> None:
    """What the two phases leave in their folder; the last line of metrics is cut short, as a kill would."""
    run = work / "runs/1_local"
    run.mkdir(parents=True)
    (work / "tests.xml").write_text(xml)
    (run / "environment.json").write_text(json.dumps({"device": device}))
    (run / "result.json").write_text(json.dumps({"val_loss": 7.0}))
    losses = FALLING if losses is None else losses
    lines = [json.dumps({"step": n + 1, "loss": loss, "seconds": 3 + n / 8}) for n, loss in enumerate(losses)]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 21, "lo']))


@pytest.fixture
def check(tmp_path):
    """Run check.sh with the stub; returns (process, report)."""

    def run(tests_exit: int = 0, **left):
        out, stub = tmp_path / "the report", tmp_path / "python"
        out.mkdir()
        leave(tmp_path / "left", **left)
        stub.write_text(STUB)
        stub.chmod(0o755)
        env = os.environ | {"PYTHON": str(stub), "OUT": str(out)}
        env |= {"LEFT": str(tmp_path / "left"), "TESTS_EXIT": str(tests_exit)}
        done = subprocess.run([HERE / "check.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        return done, json.loads((out / "gpu_check.json").read_text())

    return run


def test_all_passed(check):
    done, report = check()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all passed" in done.stdout.splitlines()[-1]
    assert report["ok"] and report["wrong"] == []
    assert report["tests"] == {"passed": 2, "failed": 0, "skipped": 0, "failures": []}
    assert report["train"]["step_ms"] == 125.0 and report["train"]["train_seconds"] == 3 + 19 / 8
    assert report["train"]["losses"] == FALLING
    assert report["train"]["result"] == {"val_loss": 7.0}
    assert report["machine"]["torch"] == torch.__version__
    assert set(report["phases"]) == {"tests", "train"}
    assert all(phase["exit"] == 0 and phase["seconds"] >= 0 for phase in report["phases"].values())


def test_a_failed_test_fails_the_check_but_not_the_report(check):
    done, report = check(tests_exit=1, xml=FAILED)
    assert done.returncode == 1
    assert report["wrong"] == ["tests: exit 1", "tests: 1 failed, 0 skipped"]
    assert report["tests"]["failures"] == ["t::b"]
    assert report["phases"]["tests"]["log"] == ["two tests"]
    assert report["train"]["losses"] == FALLING, "the next phase runs all the same"


@pytest.mark.parametrize(
    ("left", "complaint"),
    [
        ({"losses": [9.0] * 20}, "train: the loss did not fall (9.000 -> 9.000)"),
        ({"losses": FALLING[:2]}, "train: 2 steps, not 20 with a finite loss each"),
        ({"losses": [*FALLING[:19], None]}, "train: 20 steps, not 20 with a finite loss each"),
        ({"device": "cpu"}, "train: the run did not use the GPU"),
        ({"phases": "tests 124 1.0\ntrain 0 2.0\n"}, "tests: out of time"),
        ({"phases": "tests 0 1.0\ntrain 1 2.0\n"}, "train: exit 1"),
        ({"xml": "<testsuite/>"}, "tests: none passed"),
        ({"xml": SKIPPED}, "tests: 0 failed, 1 skipped"),
    ],
)
def test_what_counts_as_a_failure(tmp_path, capsys, monkeypatch, left, complaint):
    spec = importlib.util.spec_from_file_location("report", HERE / "report.py")
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    monkeypatch.setattr(report, "machine", dict)
    work, out = tmp_path / "work", tmp_path / "deep/er/report.json"
    phases = left.pop("phases", "tests 0 1.0\ntrain 0 2.0\n")
    leave(work, **left)
    (work / "phases").write_text(phases)
    for name in ("tests", "train"):
        (work / f"{name}.log").write_text("")
    assert report.main(work, out) == 1
    assert json.loads(out.read_text())["wrong"] == [complaint]
    assert capsys.readouterr().err == f"check.sh: {complaint}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu(tmp_path):
    out = tmp_path / "report.json"
    env = os.environ | {"PYTHON": sys.executable, "OUT": str(out)}
    done = subprocess.run([HERE / "check.sh"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "check.sh: no CUDA device on this machine: nothing was checked\n"
    assert not out.exists()
