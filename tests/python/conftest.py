"""Archives of every format, and an HTTP server with ranges that counts the bytes it sends."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

# Short runs are faster without the second compiler of Java.
os.environ["JAVA_TOOL_OPTIONS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"

PACKERS = {
    "tar": lambda data: data,
    "tar.gz": lambda data: gzip.compress(data, 6, mtime=0),
    "tar.bz2": bz2.compress,
    "tar.xz": lambda data: lzma.compress(data, preset=1),
    "tar.zst": lambda data: run_filter(["zstd", "-q", "-c"], data),
    "tar.lz4": lambda data: run_filter(["lz4", "-q", "-c"], data),
}

# Shells ignore it for programs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)



def run_filter(command: list[str], data: bytes) -> bytes:
    return subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout


class Server(ThreadingHTTPServer):
    """Serves a directory by ranges. ``user`` is the login that it asks for, and ``etag`` that of all files, if set.

    ``refusal`` is the status without the login.
    """

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.directory, self.user, self.etag, self.refusal = directory, "", "", 401
        #: While it is set, the first request interrupts this process, and none is answered before its end.
        self.silence: threading.Event | None = None
        #: Set when the call begins that is interrupted. A request of an earlier one may still be on its way.
        self.is_called = threading.Event()
        self.was_waited_for, self.unanswered = False, 0
        self.lock, self.sent, self.requests = threading.Lock(), 0, 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may close connections early."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        # Earlier calls may still look for a published index.
        is_for_an_archive = not self.path.endswith(".tarfs")
        if self.server.silence is not None and is_for_an_archive:
            self.keep_silent(self.server.silence)
            return
        data = b""
        try:
            data, status = (self.server.directory / self.path.lstrip("/")).read_bytes(), 200
        except OSError:
            status = 404
        if self.server.user and self.headers["Authorization"] != self.server.user:
            data, status = b"", self.server.refusal
        etag = self.server.etag or hashlib.sha256(data).hexdigest()[:16]
        total = len(data)
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        if found and status == 200:
            first, last = int(found[1]), min(int(found[2] or total), total - 1)
            data, status = data[first : last + 1], 206 if first < total else 416
        self.send_response(status)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{total}")
        self.end_headers()
        if self.command == "HEAD":
            return
        with self.server.lock:
            self.server.requests += 1
        for start in range(0, len(data), 65536):
            self.wfile.write(data[start : start + 65536])
            with self.server.lock:
                self.server.sent += len(data[start : start + 65536])

    do_HEAD = do_GET

    def keep_silent(self, end: threading.Event) -> None:
        with self.server.lock:
            self.server.unanswered += 1
            is_first = self.server.unanswered == 1
        if is_first and self.server.is_called.wait(40):
            os.kill(os.getpid(), signal.SIGINT)
        self.server.was_waited_for |= not end.wait(40)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


def write_tar(path: Path, files: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w" + (":gz" if path.suffix == ".gz" else "")) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return path


def make_tar(files: int, size: int) -> bytes:
    """An archive with directories, links, names that are not UTF-8, and ``files`` files of up to ``size`` bytes."""
    output, randomness = io.BytesIO(), random.Random(7)
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:

        def add(name: str, data: bytes = b"", **attributes: object) -> None:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(data), 1_600_000_000, 0o640
            for key, value in attributes.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(data))

        add("data", type=tarfile.DIRTYPE, mode=0o755)
        for number in range(files):
            length = randomness.randrange(size)
            # Half of it can be compressed.
            data = randomness.randbytes(length // 2) + bytes(length - length // 2)
            add(f"data/d{number % 7}/f{number:04}", data)
        add("table.csv", b"name,value\n" + b"".join(b"n%d,%d\n" % (n, n * n) for n in range(500)))
        add("link", type=tarfile.SYMTYPE, linkname="data/d1/f0001")
        add("hard", type=tarfile.LNKTYPE, linkname="data/d2/f0002")
        add(os.fsdecode(b"latin-\xe9"), b"not UTF-8")
        add("empty")
    return output.getvalue()


@pytest.fixture(scope="session")
def plain() -> bytes:
    return make_tar(300, 40_000)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, plain: bytes) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    for suffix, pack in PACKERS.items():
        (directory / f"a.{suffix}").write_bytes(pack(plain))
    server = Server(directory)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test a cache of its own."""
    monkeypatch.setenv("TARFS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TARFS_HEADERS", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def server(served: Server) -> Iterator[Server]:
    served.sent = served.requests = 0
    yield served
    served.user, served.etag, served.refusal = "", "", 401


@pytest.fixture(scope="session")
def contents(plain: bytes) -> dict[str, bytes]:
    """What Python's tarfile reads, by the names of regular files and of hard links."""
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        files = filter(lambda member: member.isreg() or member.islnk(), archive.getmembers())
        return {member.name: archive.extractfile(member).read() for member in files}
