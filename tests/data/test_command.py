"""A command's words and errors: what comes of a mistake, in processes and in this one, whatever the console can show.

Lives here: parse, error_line and run_command.
Not here: the options of one command (beside the command's tests).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from data.command import error_line, parse, run_command
from data.errors import DataError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Some:
    """Options of no command."""

    a_number: int = 1
    """A number."""
    kind: str = "plain"
    """A kind."""

    def __post_init__(self):
        if self.a_number < 0:
            raise ValueError(f"--a-number {self.a_number}: give a number that is 0 or more, such as 1")


@dataclass(frozen=True)
class Needs:
    """Options of which one is required."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    out_folder: Path
    """A folder."""
    workers: int = 0


# A console of UTF-8 and one of ASCII, for which tyro draws other boxes.
CONSOLES = {"unicode": True, "ascii": False}


@pytest.fixture(params=CONSOLES)
def console(request, monkeypatch):
    monkeypatch.setattr("tyro._fmtlib._should_use_utf8_drawing_chars", lambda: CONSOLES[request.param])


@pytest.mark.parametrize("columns", ["30", "80", "200"])
def test_a_mistake_is_one_line(columns, console, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert parse(Some, ["--a-number", "3"], "x") == Some(3)
    assert parse(Some, [], "x", default=Some(7, "other")) == Some(7, "other")
    for words, said in (
        (["--a-nubmer", "3"], "Unrecognized options: --a-nubmer, 3 (did you mean --a-number?); see x --help"),
        (["--zzz"], "Unrecognized options: --zzz; see x --help"),
        (["--a-number", "x"], "Error parsing --a-number: invalid literal for int() with base 10: 'x'; see x --help"),
        (["--a-number"], "Missing value for argument '--a-number'. Expected 1 values.; see x --help"),
        (["--a-number", "-1"], "--a-number -1: give a number that is 0 or more, such as 1; see x --help"),
    ):
        with pytest.raises(DataError) as refused:
            parse(Some, words, "x")
        assert str(refused.value) == said


def test_a_misspelt_option_is_named_before_the_ones_that_are_missing(console):
    for words, said in (
        (["a", "--out-foldre", "b"], "Unrecognized options: --out-foldre (did you mean --out-folder?); see x --help"),
        (["a", "--workesr=2"], "Unrecognized options: --workesr=2 (did you mean --workers?); see x --help"),
        (["a", "--zzz"], "Missing from x: --out-folder PATH A folder. (required); see x --help"),
        (["a"], "Missing from x: --out-folder PATH A folder. (required); see x --help"),
    ):
        with pytest.raises(DataError) as refused:
            parse(Needs, words, "x")
        assert str(refused.value) == said


def test_help_is_printed_and_no_mistake(console, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(Some, ["--help"], "python -m some")
    assert not stop.value.code and "usage: python -m some" in capsys.readouterr().out


COMMANDS = {
    ("data.tokenize", "x.txt", "--tokenizer", "gpt2", "--uot", "y"): "--uot (did you mean --out?)",
    ("data.fineweb", "--shards", "one"): "Error parsing --shards: invalid literal",
    ("data.local", "--cahce", "y"): "--cahce, y (did you mean --cache?)",
    ("mome", "compare", "--arms", "local", "--sedes", "3"): "--sedes, 3 (did you mean --seeds?)",
}


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_answers_a_mistake_with_one_line_and_1(words, encoding, tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding, "COLUMNS": "80"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and COMMANDS[words] in done.stderr
    assert "--help\n" in done.stderr and "---" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_errors_as_one_line():
    assert error_line(DataError("a\n  b")) == "error: a b"
    assert error_line(FileNotFoundError(2, "No such file or directory", "x")) == "error: x: No such file or directory"
    assert error_line(OSError("plain")) == "error: plain"
    assert error_line(ValueError()) == "error: ValueError"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DataError("bad"), 1, "error: bad\n"),
        (PermissionError(13, "Permission denied", "x"), 1, "error: x: Permission denied\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_the_exit_code_of_a_command(error, code, said, capsys):
    def command():
        raise error

    assert run_command(command) == code and capsys.readouterr().err == said
    assert run_command(lambda: None) == 0
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 / 0)
