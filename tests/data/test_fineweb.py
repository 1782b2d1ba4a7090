"""The FineWeb download against a small server that speaks the Hub's endpoints, over connections that break.

Lives here: the server, resuming by Range in one call and across killed ones, checks of what came, the error lines.
Not here: the shard format (test_shards.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from huggingface_hub import constants

import data.fineweb as module
from data.errors import DataError
from data.fineweb import VALIDATION, download, main
from data.shards import Shard, write_shard

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "fineweb_train_000001.bin"
RESOLVE = "/datasets/kjj0/fineweb10B-gpt2/resolve/main/"


class Hub(ThreadingHTTPServer):
    """As the Hub: /resolve/ answers with the metadata of an LFS file and a redirect to another host, which knows Range.

    files: name -> bytes; breaks: name -> one (bytes, how) for each connection to come, how "close", "reset" or "stall";
    etags, sizes: what is announced instead of the truth; status: what /resolve/ answers instead;
    asked: (method, path, Range).
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.asked, self.breaks, self.etags, self.sizes = files, [], {}, {}, {}
        self.status: list[int] = []
        self.knows_range = True
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def ranges(self, name: str) -> list[str | None]:
        return [asked[2] for asked in self.asked if asked[:2] == ("GET", f"/cdn/{name}")]


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        hub, name = self.server, self.path.rpartition("/")[2]
        hub.asked.append((self.command, self.path, self.headers.get("Range")))
        if self.path.startswith("/cdn/"):
            self.send_file(hub.files[name], hub.breaks.get(name, []))
        elif hub.status and self.path.startswith(RESOLVE):
            self.head(hub.status.pop(0), {})
        elif self.path.startswith(RESOLVE) and name in hub.files:
            etag = hub.etags.get(name, hashlib.sha256(hub.files[name]).hexdigest())
            headers = {"Location": f"http://localhost:{hub.server_port}/cdn/{name}", "X-Repo-Commit": "a" * 40}
            if etag:
                headers |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": hub.sizes.get(name, len(hub.files[name]))}
            self.head(302, headers)
        else:
            self.head(404, {"X-Error-Code": "EntryNotFound"})

    def head(self, status: int, headers: dict, length: int = 0):
        self.send_response(status)
        for key, value in (headers | {"Content-Length": length}).items():
            self.send_header(key, str(value))
        self.end_headers()

    def send_file(self, content: bytes, breaks: list[tuple[int, str]]):
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if self.server.knows_range else None
        start = int(asked[1]) if asked else 0
        if start >= len(content):
            self.head(416, {"Content-Range": f"bytes */{len(content)}"})
            return
        ranged = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if asked else {}
        self.head(206 if asked else 200, ranged, len(content) - start)
        count, how = breaks.pop(0) if breaks else (len(content), "whole")
        self.wfile.write(content[start : start + count])
        if how == "whole":
            return
        if how == "stall":
            self.server.released.wait(60)
        if how == "reset":
            time.sleep(0.2)  # or the reset overtakes the bytes
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close() if how == "reset" else self.connection.shutdown(socket.SHUT_RDWR)


def shard_bytes(folder: Path, seed: int, count: int) -> bytes:
    path = folder / f"{seed}.bin"
    write_shard(path, np.random.default_rng(seed).integers(0, 50257, count))
    return path.read_bytes()


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("content")
    names = [VALIDATION, TRAIN, "fineweb_train_000002.bin", "fineweb_train_000003.bin"]
    return {name: shard_bytes(folder, seed, 150_000 + seed) for seed, name in enumerate(names)}


@pytest.fixture
def hub(content, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    server = Hub(dict(content))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


def names_under(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_the_shards_asked_for_come_whole(hub, content, tmp_path):
    lines = []
    paths = download(2, tmp_path / "fineweb", hub.url, lines.append)
    assert [path.name for path in paths] == list(content)[:3]
    assert {path.name: path.read_bytes() for path in paths} == {name: content[name] for name in list(content)[:3]}
    assert names_under(tmp_path / "fineweb") == sorted(path.name for path in paths)
    assert f"{VALIDATION}: downloaded, 150,000 tokens" in lines
    assert ("HEAD", f"{RESOLVE}{TRAIN}", None) in hub.asked


def test_what_is_there_needs_no_network(hub, content, tmp_path):
    download(1, tmp_path, hub.url, print)
    hub.asked.clear()
    lines = []
    assert len(download(1, tmp_path, "http://127.0.0.1:9", lines.append)) == 2
    assert not hub.asked and all("there already" in line for line in lines)
    download(2, tmp_path, hub.url, print)
    assert {path for _, path, _ in hub.asked if path.startswith(RESOLVE)} == {f"{RESOLVE}fineweb_train_000002.bin"}


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_connection_that_breaks_half_way_is_resumed_by_range(hub, content, tmp_path, how):
    hub.breaks[TRAIN] = [(120_000, how), (100_000, how)]
    lines = []
    download(1, tmp_path, hub.url, lines.append)
    assert (tmp_path / TRAIN).read_bytes() == content[TRAIN]
    if how == "close":
        assert hub.ranges(TRAIN) == ["bytes=0-", "bytes=120000-", "bytes=220000-"]
    else:  # a reset may overtake some of the bytes
        starts = [int(one[6:-1]) for one in hub.ranges(TRAIN)]
        assert len(starts) == 3 and starts == sorted(starts) and 0 < starts[2] <= 220_000
    assert hub.ranges(VALIDATION) == ["bytes=0-"]
    assert sum("stopped at" in line for line in lines) == 2
    assert names_under(tmp_path) == sorted([TRAIN, VALIDATION])


def test_patience_begins_anew_with_every_byte_that_comes(hub, content, tmp_path):
    hub.breaks[VALIDATION] = [(30_000, "close"), (0, "close")] * 8
    download(1, tmp_path, hub.url, print)
    assert (tmp_path / VALIDATION).read_bytes() == content[VALIDATION]
    assert len(hub.ranges(VALIDATION)) == 17


def test_a_later_call_resumes_what_an_earlier_one_left(hub, content, tmp_path):
    hub.breaks[VALIDATION] = [(100_000, "close"), *[(0, "close")] * 4]
    with pytest.raises(DataError, match=r"cannot download fineweb_val_000000.bin.*What came so far is kept"):
        download(1, tmp_path, hub.url, print)
    (part,) = tmp_path.glob("*.part")
    assert part.read_bytes() == content[VALIDATION][:100_000]
    hub.breaks.clear()
    hub.asked.clear()
    download(1, tmp_path, hub.url, print)
    assert hub.ranges(VALIDATION) == ["bytes=100000-"]
    assert (tmp_path / VALIDATION).read_bytes() == content[VALIDATION]
    assert names_under(tmp_path) == sorted([TRAIN, VALIDATION])


def test_killed_and_called_again_through_the_command(hub, content, tmp_path):
    hub.breaks[VALIDATION] = [(200_000, "stall")]
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "data.fineweb", "--shards", "1", "--out", str(tmp_path / "out")]
    run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        parts = list((tmp_path / "out").glob("*.part"))
        if parts and parts[0].stat().st_size > 150_000:
            break
        time.sleep(0.05)
    run.kill()
    run.wait()
    hub.released.set()
    have = parts[0].stat().st_size
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert hub.ranges(VALIDATION) == ["bytes=0-", f"bytes={have}-"] and have > 150_000
    assert {name: (tmp_path / "out" / name).read_bytes() for name in (VALIDATION, TRAIN)} == {
        name: content[name] for name in (VALIDATION, TRAIN)
    }
    assert str(tmp_path / "out" / "fineweb_train_*.bin") in done.stdout and "downloaded, 150,001 tokens" in done.stdout


def test_a_whole_but_unnamed_file_is_not_fetched_again(hub, content, tmp_path):
    etag = hashlib.sha256(content[VALIDATION]).hexdigest()
    (tmp_path / f"{VALIDATION}.{etag[:16]}.part").write_bytes(content[VALIDATION])
    download(1, tmp_path, hub.url, print)
    assert hub.ranges(VALIDATION) == [] and (tmp_path / VALIDATION).read_bytes() == content[VALIDATION]


def test_a_server_that_ignores_the_range_sends_all_anew(hub, content, tmp_path):
    hub.knows_range = False
    hub.breaks[VALIDATION] = [(100_000, "close")]
    download(1, tmp_path, hub.url, print)
    assert hub.ranges(VALIDATION) == ["bytes=0-", "bytes=100000-"]
    assert (tmp_path / VALIDATION).read_bytes() == content[VALIDATION]


def test_parts_of_another_version_and_parts_too_long_are_dropped(hub, content, tmp_path):
    etag = hashlib.sha256(content[VALIDATION]).hexdigest()
    (tmp_path / f"{VALIDATION}.{'0' * 16}.part").write_bytes(b"of another version")
    (tmp_path / f"{VALIDATION}.{etag[:16]}.part").write_bytes(content[VALIDATION] + b"more")
    download(1, tmp_path, hub.url, print)
    assert hub.ranges(VALIDATION) == ["bytes=0-"] and (tmp_path / VALIDATION).read_bytes() == content[VALIDATION]
    assert names_under(tmp_path) == sorted([TRAIN, VALIDATION])


def test_a_busy_server_is_asked_again(hub, content, tmp_path):
    hub.status = [503, 429]
    download(1, tmp_path, hub.url, print)
    assert (tmp_path / VALIDATION).read_bytes() == content[VALIDATION]


def test_a_shard_that_is_not_whole_is_replaced(hub, content, tmp_path):
    (tmp_path / VALIDATION).write_bytes(content[VALIDATION][:-100])
    lines = []
    download(1, tmp_path, hub.url, lines.append)
    assert "not whole, downloading it again" in lines[0] and "truncated" in lines[0]
    assert (tmp_path / VALIDATION).read_bytes() == content[VALIDATION]


def bad_content(good: bytes, kind: str) -> bytes:
    return {
        "magic": b"\1" + good[1:],
        "version": good[:4] + b"\2" + good[5:],
        "count": good + b"\0\0",
        "page": b"<html>Log in</html>",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("magic", "magic number"), ("version", "format version 2"), ("count", "over-long"), ("page", "truncated")],
)
def test_what_is_no_shard_is_deleted(hub, content, tmp_path, kind, words):
    hub.files[VALIDATION] = bad_content(content[VALIDATION], kind)
    with pytest.raises(DataError, match=f"is not that shard and was deleted: .*{words}.*HF_ENDPOINT"):
        download(1, tmp_path, hub.url, print)
    assert names_under(tmp_path) == []


def test_bytes_that_do_not_have_the_announced_hash_are_deleted(hub, content, tmp_path):
    good = content[VALIDATION]
    hub.files[VALIDATION] = good[:5000] + bytes([good[5000] ^ 1]) + good[5001:]
    hub.etags[VALIDATION] = hashlib.sha256(good).hexdigest()
    with pytest.raises(DataError, match="was deleted: its SHA-256 is"):
        download(1, tmp_path, hub.url, print)
    assert names_under(tmp_path) == []


def test_an_etag_that_is_no_hash_will_do(hub, content, tmp_path):
    hub.etags[VALIDATION] = "../v-12"
    hub.breaks[VALIDATION] = [(100_000, "close")]
    download(1, tmp_path, hub.url, print)
    assert (tmp_path / VALIDATION).read_bytes() == content[VALIDATION]
    assert hub.ranges(VALIDATION) == ["bytes=0-", "bytes=100000-"]


@pytest.mark.parametrize(
    ("more", "message"), [(-100, "bytes, not the .* it announced: deleted"), (100, "cannot download")]
)
def test_another_size_than_announced(hub, content, tmp_path, more, message):
    hub.sizes[VALIDATION] = len(content[VALIDATION]) + more
    with pytest.raises(DataError, match=message):
        download(1, tmp_path, hub.url, print)
    assert VALIDATION not in names_under(tmp_path)


def test_a_server_that_is_no_hub(hub, tmp_path):
    hub.etags[VALIDATION] = ""
    with pytest.raises(DataError, match=r"answers without the size and ETag of .*: is HF_ENDPOINT a Hub"):
        download(1, tmp_path, hub.url, print)


def unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("refused", r"cannot download fineweb_val_000000.bin from http://127.0.0.1:\d+ \(.*refused\).*HF_ENDPOINT"),
        ("no scheme", r"from hub.example \(.*protocol.*HF_ENDPOINT"),
        ("offline", "HF_HUB_OFFLINE forbids downloading it: unset HF_HUB_OFFLINE"),
        ("missing", "has no fineweb_val_000000.bin in kjj0/fineweb10B-gpt2 .*404.*HF_ENDPOINT"),
        ("private", "refuses kjj0/fineweb10B-gpt2 .*401.*HF_TOKEN"),
        ("teapot", r"cannot download fineweb_val_000000.bin .*HTTP status 418"),
        ("broken", r"cannot download fineweb_val_000000.bin .*HTTP status 500"),
        ("range", "--shards 0 is out of range: 1 to 103"),
        ("above", "--shards 104 is out of range: 1 to 103"),
        ("twice", "another download into .* is running"),
        ("file", "error: .*out"),
    ],
)
def test_the_command_fails_with_one_line(hub, tmp_path, monkeypatch, capsys, case, message):
    endpoints = {"refused": f"http://127.0.0.1:{unused_port()}", "no scheme": "hub.example"}
    endpoint = endpoints.get(case, hub.url)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", case == "offline")
    if case == "missing":
        hub.files.clear()
    hub.status = {"private": [401], "teapot": [418], "broken": [500] * 4}.get(case, [])
    if case == "file":
        (tmp_path / "out").write_text("")
    else:
        (tmp_path / "out").mkdir()
    lock = FileLock(tmp_path / "out" / ".lock")
    if case == "twice":
        lock.acquire()
    assert main(["--shards", {"range": "0", "above": "104"}.get(case, "1"), "--out", str(tmp_path / "out")]) == 1
    lock.release()
    shown, error = capsys.readouterr()
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error)
    assert shown.count("trying again") == (3 if case in ("refused", "broken") else 0), (
        "only what may pass is tried again"
    )


def test_every_file_is_a_shard_of_its_own_length(hub, tmp_path):
    assert [len(Shard(path)) for path in download(3, tmp_path, hub.url, print)] == [150_000, 150_001, 150_002, 150_003]
