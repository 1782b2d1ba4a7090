"""Files are whole or not there, and reach the disk; JSON holds no number that a reader may refuse.

Lives here: mome/files.py, with a disk that fails.
Not here: the files themselves.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mome.files import json_text, sync, write_atomic, write_json

ROOT = Path(__file__).resolve().parents[2]


def test_text_and_bytes_are_written_and_replaced(tmp_path):
    target = tmp_path / "new/folder/file"
    write_atomic(target, "caf\u00e9\n")
    assert target.read_bytes() == b"caf\xc3\xa9\n"
    write_atomic(target, b"\x00\xff")
    assert target.read_bytes() == b"\x00\xff" and list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_writing_is_whole_or_not_at_all(step, tmp_path, monkeypatch):
    target = tmp_path / "file"
    write_atomic(target, "old")

    def full(*_):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, "new")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_the_content_reaches_the_disk_before_the_name_and_then_the_name(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noted_replace(draft, path):
        done.append("replace")
        replace(draft, path)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_atomic(tmp_path / "file", "x")
    draft, *rest = done
    assert draft.startswith(".file.") and rest == ["replace", tmp_path.name]
    sync(tmp_path / "file")
    assert done[-1] == "file"


def test_json_has_no_number_that_is_not_finite(tmp_path):
    value = {"a": [1.5, math.nan, (math.inf, -math.inf)], "b": {"c": np.float64("nan"), 7: None}, "d": "NaN"}
    expected = {"a": [1.5, None, [None, None]], "b": {"c": None, "7": None}, "d": "NaN"}
    assert json.loads(json_text(value), parse_constant=pytest.fail) == expected
    assert "\n" not in json_text(value, indent=None) and json_text(value).count("\n") > 5
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == expected and text.endswith("}\n")


def test_tools_that_only_read_and_draw_import_no_torch():
    modules = ["mome.files", *(f"mome.tools.{name}" for name in ("compare", "report", "verdict", "runs", "plots"))]
    script = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0
