"""run.sh: what it installs and when, which interpreter it picks, and that words, exit codes and signals pass through.

Lives here: run.sh copied beside a stub train_gpt.py, with stub interpreters (fast), and once with a real environment.
Not here: what train_gpt.py does with the words.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("bash", "cp", "dirname", "env", "mkdir", "readlink", "rm")

TRAIN = """
import json, os, signal, sys, time
print(json.dumps({"words": sys.argv[1:], "cwd": os.getcwd(), "pid": os.getpid()}), flush=True)
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(43))
    print("ready", flush=True)
    time.sleep(30)
sys.exit(7 if "fail" in sys.argv else 0)
"""

# What the environment holds: answers run.sh's questions, notes every call, and lends the real interpreter for the rest.
INSIDE = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$1 $2" in
    "-c "*"sys.version_info"*) exit ${INSIDE_TOO_OLD:-0} ;;
    "-c "*) exit 0 ;;
    "-m pip") echo installing; exit ${PIP_EXIT:-0} ;;
    "-m pytest") echo "cwd=$PWD threads=$OMP_NUM_THREADS words=$*"; exit 5 ;;
esac
exec "@REAL@" "$@"
"""

# An interpreter on the PATH. OLD and BARE make it too old, or one without the venv module.
OUTSIDE = """#!/bin/bash
case "$1 $2" in
    *print*) echo @VERSION@ ;;
    "-c "*"sys.version_info"*) exit @OLD@ ;;
    "-c "*ensurepip*) exit @BARE@ ;;
    "-m venv")
        echo "venv by @NAME@" >>"$CALLS"
        [[ -e $3/unfinished ]] || exit 9
        mkdir -p "$3/bin" && cp "$INSIDE" "$3/bin/python"
        exit ${VENV_EXIT:-0} ;;
esac
"""


class House:
    """A folder with run.sh, and a PATH with a few tools and whatever interpreters a test puts there."""

    def __init__(self, base: Path):
        self.base = base
        self.root = base / "a house"
        self.bin, self.calls, inside = base / "bin", base / "calls", base / "inside"
        self.root.mkdir()
        self.bin.mkdir()
        shutil.copy(ROOT / "run.sh", self.root)
        (self.root / "train_gpt.py").write_text(TRAIN)
        (self.root / "requirements.txt").write_text("")
        (self.root / "requirements-test.txt").write_text("# tests\n")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        inside.write_text(INSIDE.replace("@REAL@", sys.executable))
        inside.chmod(0o755)
        self.env = {"PATH": str(self.bin), "CALLS": str(self.calls), "INSIDE": str(inside)}

    def add_python(self, name: str = "python3", version: str = "3.12", old: bool = False, bare: bool = False) -> None:
        text = OUTSIDE.replace("@NAME@", name).replace("@VERSION@", version)
        (self.bin / name).write_text(text.replace("@OLD@", str(int(old))).replace("@BARE@", str(int(bare))))
        (self.bin / name).chmod(0o755)

    def run(self, *words: str, cwd: Path | None = None, script: Path | None = None, **env: str):
        command = [str(script or self.root / "run.sh"), *words]
        return subprocess.run(
            command, cwd=cwd or self.base, env=self.env | env, capture_output=True, text=True, timeout=60
        )

    def installs(self) -> int:
        return sum("pip" in line and "install" in line for line in self.seen())

    def seen(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


@pytest.fixture
def ready(house):
    """A house whose environment is made and up to date."""
    house.add_python()
    assert house.run().returncode == 0
    house.calls.unlink()
    return house


def one_line(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("run.sh: ")
    return lines[0]


def test_words_pass_through_from_anywhere(house):
    house.add_python()
    elsewhere = house.base / "else where"
    elsewhere.mkdir()
    words = ["--steps", "20", "a b", "", "*", "-m", 'q"q', "--x=$HOME"]
    done = house.run(*words, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["words"] == words
    assert told["cwd"] == str(elsewhere), "paths among the words are meant from where the user stands"
    assert house.run().stdout.count('"words": []') == 1


def test_works_through_a_link(ready):
    link = ready.base / "train"
    link.symlink_to(ready.root / "run.sh")
    done = ready.run("local", script=link)
    assert json.loads(done.stdout)["words"] == ["local"]
    assert ready.installs() == 0


def test_later_calls_skip_pip(house):
    house.add_python()
    first = house.run()
    assert house.installs() == 1
    assert "making .venv with python3" in first.stderr and "installing" in first.stderr
    before = house.seen()
    again = house.run("local")
    assert again.stderr == ""
    assert house.seen() == [*before, f"{house.root}/train_gpt.py local"]


def test_start_up_is_fast(ready):
    (ready.root / "train_gpt.py").write_text("")
    inside = ready.root / ".venv/bin/python"
    inside.write_text("#!/bin/bash\n")
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        assert ready.run().returncode == 0
        taken.append(time.perf_counter() - started)
    assert min(taken) < 0.3


def test_changed_requirements_are_installed_once(ready):
    (ready.root / "requirements.txt").write_text("something==1.0\n")
    ready.run()
    ready.run()
    assert ready.installs() == 1
    assert not any(line.startswith("venv") for line in ready.seen())


def test_a_failed_install_is_done_again(ready):
    (ready.root / "requirements.txt").write_text("something==1.0\n")
    done = ready.run(PIP_EXIT="1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "the next call tries again" in done.stderr.splitlines()[-1]
    (ready.root / "requirements.txt").write_text("")
    assert ready.run().returncode == 0
    assert ready.installs() == 2, "what a failed install left is unknown, whatever the file says now"


def test_a_half_written_package_is_not_taken_for_whole(ready):
    packages = ready.root / ".venv/lib/python3.12/site-packages"
    whole, half = packages / "whole-1.0.dist-info", packages / "half-1.0.dist-info"
    for folder in (whole, half):
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("")
    (whole / "INSTALLER").write_text("pip")
    (ready.root / "requirements.txt").write_text("half==1.0\n")
    assert ready.run().returncode == 0
    assert whole.exists() and not half.exists()


@pytest.mark.parametrize("broken", ["unfinished", "no interpreter"])
def test_a_broken_environment_is_made_anew(ready, broken):
    if broken == "unfinished":
        (ready.root / ".venv/installed-requirements.txt").unlink()
        (ready.root / ".venv/unfinished").write_text("")
    else:
        (ready.root / ".venv/bin/python").unlink()
        (ready.root / ".venv/bin/python").symlink_to(ready.base / "gone")
    left_over = ready.root / ".venv/left over"
    left_over.write_text("")
    assert ready.run().returncode == 0
    assert "venv by python3" in ready.seen()
    assert not left_over.exists()
    assert not (ready.root / ".venv/unfinished").exists()


def test_an_environment_that_could_not_be_made_is_made_again(house):
    house.add_python()
    done = house.run(VENV_EXIT="1")
    assert done.returncode == 1
    assert "could not make .venv" in done.stderr.splitlines()[-1]
    assert house.installs() == 0
    assert house.run().returncode == 0
    assert house.seen().count("venv by python3") == 2


def test_an_old_environment_is_left_alone(ready):
    (ready.root / ".venv/installed-requirements.txt").unlink()
    line = one_line(ready.run(INSIDE_TOO_OLD="1"))
    assert "older than 3.11" in line and "remove" in line
    assert (ready.root / ".venv/bin/python").exists()
    assert ready.installs() == 0


def test_no_python(house):
    line = one_line(house.run())
    assert "no Python 3.11 or newer found:" in line and "apt install python3.11-venv" in line
    assert not (house.root / ".venv").exists()


def test_python_too_old(house):
    house.add_python(version="3.9", old=True)
    line = one_line(house.run())
    assert "(python3 is 3.9)" in line and "apt install python3.11-venv" in line


def test_python_without_venv(house):
    house.add_python(version="3.12", bare=True)
    line = one_line(house.run())
    assert "3.12 lacks the venv module" in line and "apt install python3.12-venv" in line


@pytest.mark.parametrize("flaw", ["old", "bare"])
def test_the_next_interpreter_is_taken(house, flaw):
    house.add_python(version="3.10", **{flaw: True})
    house.add_python("python3.12")
    assert house.run().returncode == 0
    assert house.seen()[0] == "venv by python3.12"


def test_exit_code_passes_through(ready):
    assert ready.run("fail").returncode == 7


def test_sigterm_reaches_python(ready):
    process = subprocess.Popen(
        [str(ready.root / "run.sh"), "wait"], env=ready.env, cwd=ready.base, stdout=subprocess.PIPE, text=True
    )
    try:
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 43
    finally:
        process.kill()
        process.communicate()


def test_tests(ready):
    done = ready.run("test", "-k", "some thing")
    assert done.returncode == 5
    assert done.stdout.startswith(f"cwd={ready.root} threads=1 words=-m pytest")
    assert done.stdout.endswith("-k some thing\n")
    pip = [line for line in ready.seen() if "pip" in line and "install" in line]
    assert len(pip) == 1 and "/requirements.txt" in pip[0] and "/requirements-test.txt" in pip[0]
    assert "threads=3" in ready.run("test", OMP_NUM_THREADS="3").stdout
    ready.run()
    assert ready.installs() == 1
    # pip may have moved what the tests share: they are installed again as well.
    (ready.root / "requirements.txt").write_text("something==1.0\n")
    ready.run()
    ready.run("test")
    assert ready.installs() == 3


def test_a_real_environment(house):
    wheel = house.base / "tiny_wheel-1.0-py3-none-any.whl"
    info = "tiny_wheel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_wheel.py", "answer = 42\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"tiny_wheel.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    (house.root / "requirements.txt").write_text(f"{wheel.as_uri()}\n")
    (house.root / "train_gpt.py").write_text("import sys, tiny_wheel; print(tiny_wheel.answer, sys.prefix)\n")
    house.env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    done = house.run()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"42 {house.root / '.venv'}\n"
    assert "tiny-wheel" in done.stderr, "what pip does is shown"

    half = next((house.root / ".venv").glob(f"lib/python3*/site-packages/{info}"))
    (half / "INSTALLER").unlink()
    (half.parent / "tiny_wheel.py").unlink()
    (house.root / ".venv/installed-requirements.txt").unlink()
    again = house.run()
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout, "a package cut off half way is installed again"
    assert house.run().stderr == ""
