"""What a process says of its memory and its traffic with the disk, on this system and on one that says less.

Lives here: the counters against what the process is made to do.
Not here: where a run writes them (tests/tools/test_scaling.py has a run), what a report makes of them.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from mome import usage

COUNTS = usage.STATUS.exists() and usage.IO.exists()


@pytest.mark.skipif(not COUNTS, reason="not Linux")
def test_memory_that_is_touched_is_counted():
    before = usage.process_bytes()
    assert set(before) == {"resident_bytes"}
    held = np.ones(2**23)
    grown = usage.process_bytes()["resident_bytes"] - before["resident_bytes"]
    assert 0.8 * held.nbytes < grown < 1.5 * held.nbytes
    assert usage.peak_bytes(torch.device("cpu")) >= 0.9 * grown


@pytest.mark.skipif(not COUNTS, reason="not Linux")
def test_what_goes_to_the_disk_is_counted(tmp_path):
    before = usage.process_bytes(disk=True)
    assert set(before) == {"resident_bytes", "read_bytes", "written_bytes"}
    with open(tmp_path / "file", "wb") as file:
        file.write(bytes(2**22))
        file.flush()
        os.fsync(file.fileno())
    after = usage.process_bytes(disk=True)
    assert after["read_bytes"] >= before["read_bytes"] and after["written_bytes"] >= before["written_bytes"]


@pytest.mark.parametrize(
    ("status", "io", "expected"),
    [
        (None, None, {}),
        ("VmRSS:\t 900 kB\n", "rchar: 5\n", {}),
        ("RssAnon:\t 100 kB\nRssShmem:\t 7 kB\n", "", {}),
        (
            "Name:\tpython\nRssAnon:\t   100 kB\nRssFile:\t    20 kB\nRssShmem:\t 7 kB\nx\n",
            "rchar: 5\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 1\n",
            {"resident_bytes": 120 * 1024, "read_bytes": 4096, "written_bytes": 8192},
        ),
        (None, "read_bytes: 0\n", {"read_bytes": 0}),
        ("RssAnon:\nRssFile: many kB\n", "read_bytes: \n", {}),
    ],
)
def test_what_the_system_does_not_state_is_left_out(status, io, expected, tmp_path, monkeypatch):
    for name, text in (("STATUS", status), ("IO", io)):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(usage, name, path)
    assert usage.process_bytes(disk=True) == expected
    assert usage.process_bytes() == {key: value for key, value in expected.items() if key == "resident_bytes"}
