"""python -m mome: the table of commands, and one line on stderr for every mistake.

Lives here: dispatch, help and errors, in processes as a user starts them.
Not here: what a command does (the other files of this folder), the parsing (tests/data/test_command.py).
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mome.__main__ import TOOLS, dispatch, main
from mome.errors import UserError
from mome.options import parse

ROOT = Path(__file__).resolve().parents[2]


def mome(*words: str, **kwargs) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mome", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, **kwargs)


def refused(done: subprocess.CompletedProcess) -> str:
    """The one line that a mistake ends in."""
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
    return done.stderr


def test_help_lists_every_command_and_imports_none():
    script = "import sys; from mome.__main__ import main; main(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and all(f"\n  {name} " in done.stdout for name in TOOLS)
    assert not any(f"'{name}'" in done.stderr for name in ("torch", "matplotlib", "tyro", "numpy"))


def test_no_word_prints_the_help_and_fails(capsys):
    assert main([]) == 1
    assert "usage: python -m mome NAME" in capsys.readouterr().out


@pytest.mark.parametrize("name", TOOLS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        dispatch([name, "--help"])
    assert not stop.value.code and f"usage: python -m mome {name}" in capsys.readouterr().out
    assert importlib.import_module(TOOLS[name][0]).__doc__.startswith(f"python -m mome {name}")


def test_an_unknown_command_offers_the_nearest(tmp_path):
    assert "unknown command 'compar': did you mean compare?" in refused(mome("compar", cwd=tmp_path))
    with pytest.raises(UserError, match="there are sample, report, export, compare"):
        dispatch(["zzz"])


def test_report_writes_into_the_folder(make_run):
    folder = make_run()
    done = mome("report", folder.name, cwd=folder.parent)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{folder.name}/report.html\n")
    assert (folder / "loss.png").exists() and (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "report needs at least one run folder"),
        (["nowhere"], "nowhere is no folder"),
        (["."], ". is no run folder"),
        (["x", "--otu", "y"], "did you mean --out?"),
        (["x", "--out"], "--out"),
    ],
)
def test_a_wrong_report_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--arms"),
        (["--arms"], "--arms"),
        (["--arms", "local", "--seeds", "0"], "--seeds 0: at least one"),
        (["--arms", "local", "--seeds", "many"], "--seeds"),
        (["--arms", "--seeds", "2"], "--arms"),
        (["--arms", "local --seed 3"], "which compare sets itself"),
        (["--arms", "local", "--", "--runs-dir", "x"], "what follows -- holds --runs-dir"),
        (["--arms", "local", "--sedes", "3"], "did you mean --seeds?"),
        (["--arms", "locla"], "did you mean local?"),
        (["--arms", "local", "local-dense --stpes 3"], "did you mean --steps?"),
        (["--arms", "local", "--", "--cycle", "0"], "--cycle 0"),
    ],
)
def test_a_wrong_comparison_is_one_line_before_anything_is_trained(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(make_run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["report", str(make_run()), "--out", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_trace(make_run):
    command = f'"{sys.executable}" -m mome --help | true; "{sys.executable}" -m mome report "{make_run()}" | true'
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", f"sleep 0; {command}"], env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_ctrl_c_is_one_word(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mome.tools.report.main", interrupted)
    assert main(["report"]) == 130
    assert capsys.readouterr().err == "stopped\n"


@dataclass(frozen=True)
class Some:
    """Options of no command."""

    a_number: int = 1
    """A number."""

    def __post_init__(self):
        if self.a_number < 0:
            raise UserError(f"--a-number {self.a_number}: give a number that is 0 or more, such as 1")


def test_a_mistake_in_the_options_is_a_user_error():
    assert parse(Some, ["--a-number", "3"], "x", default=Some(2)) == Some(3)
    with pytest.raises(UserError, match=r"--a-nubmer.*\(did you mean --a-number\?\); see x --help$"):
        parse(Some, ["--a-nubmer", "3"], "x")
    with pytest.raises(UserError, match=r"^--a-number -1: give a number that is 0 or more, such as 1; see x --help$"):
        parse(Some, ["--a-number", "-1"], "x")


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_no_generator_takes_is_refused(seed, tmp_path, capsys):
    assert main(["sample", str(tmp_path), "--seed", str(seed)]) == 1
    assert f"--seed {seed}: give a whole number from 0 to" in capsys.readouterr().err
