"""The native interface, against Python's tarfile."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import tarfs
from conftest import PACKERS, Server, run_filter, write_tar
from tarfs.fsspec import TarfsFileSystem

Contents = dict[str, bytes]


@pytest.mark.parametrize("suffix", PACKERS)
# Promises: python-content
def test_every_format_has_the_contents_of_tarfile(
    server: Server, contents: Contents, suffix: str
) -> None:
    with tarfs.open(server.url(f"a.{suffix}")) as archive:
        entries = [entry for entry in archive.walk() if entry.is_file()]
        assert {entry.path for entry in entries} == set(contents)
        for entry in entries:
            assert archive.open(entry.path).read() == contents[entry.path], entry


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("opened", ["open", "stream"])
# Promises: python-iteration
def test_iteration_yields_members_in_archive_order(
    server: Server, plain: bytes, contents: Contents, suffix: str, opened: str
) -> None:
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        names = archive.getnames()
    found = []
    for member in getattr(tarfs, opened)(server.url(f"a.{suffix}")):
        found.append(member.name)
        if member.entry.is_file():
            assert member.read() == contents[member.name], member.name
    if opened == "open":
        # A hard link follows its file, and directories without members of their own are left out.
        assert sorted(found) == sorted(names)
    else:
        assert found == names


def test_attributes_are_those_of_tarfile(server: Server, plain: bytes) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    with tarfile.open(fileobj=io.BytesIO(plain)) as expected:
        for member in expected:
            entry = archive.stat(member.name, follow_symlinks=False)
            assert (entry.mode, entry.mtime, entry.uid) == (
                {tarfile.DIRTYPE: 0o755, tarfile.SYMTYPE: 0o777}.get(member.type, 0o640),
                member.mtime,
                member.uid,
            )
            assert (entry.is_dir(), entry.is_symlink()) == (member.isdir(), member.issym())
    assert archive.stat("hard").ino == archive.stat("data/d2/f0002").ino
    assert archive.stat("link", follow_symlinks=False).target == "data/d1/f0001"


# Promises: acl-mode
def test_mode_follows_the_access_acl(tmp_path: Path) -> None:
    member = tarfile.TarInfo("f")
    member.mode = 0o666
    acl = "user::rw-,user:4343:rw-,group::r--,mask::rw-,other::---"
    member.pax_headers = {"SCHILY.acl.access": acl}
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member)
    path = str(tmp_path / "a.tar")
    assert tarfs.open(path).stat("f").mode == 0o660
    assert [member.entry.mode for member in tarfs.stream(path)] == [0o660]


def test_listing_has_one_directory(server: Server) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    assert archive.ls() == ["data", "hard", "table.csv", "link", "latin-\udce9", "empty"]
    assert archive.ls("/data/") == [f"data/d{number}" for number in range(7)]
    assert [entry.kind for entry in archive.ls("data", detail=True)] == ["directory"] * 7
    assert archive.exists("data/d1/f0001") and not archive.exists("data/d1/f0002")


# Promises: python-names
def test_names_that_are_not_utf8_survive(server: Server) -> None:
    archive = tarfs.open(server.url("a.tar.xz"))
    for name in (b"latin-\xe9", os.fsdecode(b"latin-\xe9")):
        assert archive.open(name).read() == b"not UTF-8"


# Promises: python-files
def test_ranges_are_slices(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    data = contents["table.csv"]
    for start, end in [
        (0, None),
        (5, 17),
        (-9, None),
        (3, -4),
        (10, 5),
        (0, 10**12),
        (10**12, None),
    ]:
        assert archive.read_range("table.csv", start, end) == data[start:end]


def test_file_seeks_and_fills_buffers(server: Server, contents: Contents) -> None:
    data = contents["table.csv"]
    with tarfs.open(server.url("a.tar.gz")).open("table.csv") as file:
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
        buffer = bytearray(10)
        assert file.seek(-15, io.SEEK_END) == len(data) - 15
        assert (file.readinto(buffer), bytes(buffer)) == (10, data[-15:-5])
        assert (file.readinto(buffer), bytes(buffer[:5])) == (5, data[-5:])
        assert (file.readinto(buffer), file.read(), file.tell()) == (0, b"", len(data))
        file.seek(0)
        assert io.TextIOWrapper(io.BufferedReader(file)).read().encode() == data
    with pytest.raises(ValueError):
        file.read()


# Promises: python-names
def test_links_are_followed_inside_the_archive(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    assert archive.open("link").read() == contents["data/d1/f0001"]
    assert archive.open("data/../link").read() == contents["data/d1/f0001"]
    with pytest.raises(FileNotFoundError, match="leads above the root"):
        archive.open("../link")
    with pytest.raises(FileNotFoundError, match="not a directory"):
        archive.stat("data/d1/f0001/")
    assert archive.stat("/./data//d1/").path == "data/d1"
    assert archive.ls("data/d1/") == archive.ls("data/d1")


# Promises: spark-cost
def test_shards_are_disjoint_and_complete(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    plan = archive.plan_shards(7)
    assert [shard.number for shard in plan] == list(range(1, 8))
    found: Contents = {}
    for shard in plan:
        for member in archive.members(shard.number, 7):
            if member.entry.is_file():
                assert member.name not in found
                found[member.name] = member.read()
    assert found == {name: data for name, data in contents.items() if name != "hard"}
    entries = [entry for entry in archive.walk() if entry.is_file()]
    shards = archive.shards_of(entries, 7)
    assert sorted(set(shards)) == list(range(1, 8))
    assert shards[[entry.path for entry in entries].index("empty")] == 7


# Promises: spark-cost
def test_members_can_be_selected(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    wanted = archive.ls("data/d3", detail=True)
    found = {member.name: member.read() for member in archive.members(only=wanted)}
    assert found == {entry.path: contents[entry.path] for entry in wanted}


# Promises: python-iteration
def test_member_is_a_stream(server: Server, contents: Contents) -> None:
    for member in tarfs.stream(server.url("a.tar.gz")):
        data = contents.get(member.name, b"")
        if member.entry.is_file():
            assert member.read(10) + member.read(0) + member.read() == data
            assert member.read() == b""
    copy = io.BytesIO()
    for member in tarfs.stream(server.url("a.tar.gz")):
        if member.name == "data/d1/f0001":
            shutil.copyfileobj(member, copy)
    assert copy.getvalue() == contents["data/d1/f0001"]
    with pytest.raises(ValueError):
        member.read()


@pytest.mark.parametrize("hole", [0, 1 << 20])
# Promises: python-damaged
def test_stream_has_all_bytes_of_a_huge_member(tmp_path: Path, hole: int) -> None:
    size, path = 128 << 20, tmp_path / "a.tar"
    huge, sparse_map = tarfile.TarInfo("huge"), b""
    if hole:
        sparse_map = f"1\n{hole}\n{size}\n".encode().ljust(512, b"\0")
        version = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        names = {"GNU.sparse.name": "huge", "GNU.sparse.realsize": str(hole + size)}
        huge.pax_headers = {**version, **names}
    huge.size = len(sparse_map) + size
    content = bytearray(hole + size)
    with open(path, "wb") as file:
        file.write(huge.tobuf(tarfile.PAX_FORMAT) + sparse_map)
        start = file.tell()
        for place in range(0, size, 1 << 20):
            content[hole + place : hole + place + 8] = mark = b"%08x" % place
            file.seek(start + place)
            file.write(mark)
        file.seek(start + size)
        file.write(tarfile.TarInfo("last").tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    members = tarfs.stream(path, memory="64MiB")
    # A comparison by pytest would show the whole content.
    is_whole = next(members).read() == content
    assert is_whole
    assert [member.name for member in members] == ["last"]


# Promises: python-damaged, expect-digest
def test_stream_raises_at_its_end_if_it_is_damaged(server: Server, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {name: name.encode() for name in "abc"})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(list(tarfs.stream(path, sha256=digest))) == 3
    damaged = bytearray(path.read_bytes())
    damaged[1024 + 150] ^= 1
    (tmp_path / "lost.tar").write_bytes(damaged)
    for place, options, names, text in [
        (path, {"sha256": "0" * 64}, "abc", "0000"),
        (server.url("a.tar.gz"), {"sha256": "0" * 64}, None, "0000"),
        (tmp_path / "lost.tar", {}, "ac", "members may be lost at"),
    ]:
        found = []
        with pytest.raises(tarfs.Damaged, match=text):
            for member in tarfs.stream(place, **options):
                found.append(member.name)
                if names:
                    assert member.read() == member.name.encode()
        assert names is None or found == list(names)


def test_early_end_of_iteration_stops_the_reading(server: Server) -> None:
    members = tarfs.stream(server.url("a.tar"))
    next(members)
    del members
    assert not any(map(is_reading, os.listdir("/proc/self/task")))


def is_reading(thread: str) -> bool:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip() == "tarfs-members"
    except FileNotFoundError:
        # It has ended meanwhile.
        return False


# Promises: python-indexes
def test_saved_index_spares_the_archive(server: Server) -> None:
    assert tarfs.open(server.url("a.tar.bz2"), cache_size=False).ls()
    server.sent = 0
    assert len(tarfs.open(server.url("a.tar.bz2"), cache_size=False).walk()) > 300
    assert server.sent < 100_000


# Promises: python-indexes
def test_published_index_spares_the_archive(server: Server, contents: Contents) -> None:
    (server.directory / "p.tar.gz").write_bytes((server.directory / "a.tar.gz").read_bytes())
    program = Path(sys.executable).with_name("tarfs")
    index = server.directory / "p.tar.gz.tarfs"
    command = [program, "index", "--quiet", "--output", index, server.url("p.tar.gz")]
    subprocess.run(command, check=True)
    for options in ({}, {"index": server.url(index.name)}, {"index": index}):
        archive = tarfs.open(server.url("p.tar.gz"), cache_dir=False, **options)
        assert archive.read_range("data/d1/f0001", 5) == contents["data/d1/f0001"][5:]
        assert archive.counters()["scanned_packed_bytes"] == 0
        assert archive.plan_shards(3)[0].entries > 50


# Promises: python-indexes
def test_index_has_each_name_of_a_source(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(server.directory)
    program = Path(sys.executable).with_name("tarfs")
    (server.directory / "named.tar.gz").write_bytes((server.directory / "a.tar.gz").read_bytes())
    command = [program, "index", "--quiet", "--output", "named.idx", server.url("named.tar.gz")]
    subprocess.run(command, check=True)
    path = server.directory / "named.idx"
    for index in (f"file:{path}", f"file://{path}", f" file:{path}", b"named.idx", Path("named.idx")):
        archive = tarfs.open(server.url("named.tar.gz"), cache_dir=False, index=index)
        assert archive.counters()["scanned_packed_bytes"] == 0, index


# Promises: python-indexes, published-copies
def test_links_of_a_published_index_are_compared(server: Server) -> None:
    def write(path: Path, target: str, mode: int) -> None:
        with tarfile.open(path, "w") as archive:
            for name in "good", "evil":
                member = tarfile.TarInfo(name)
                member.size = len(name)
                archive.addfile(member, io.BytesIO(name.encode()))
            member = tarfile.TarInfo("link")
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
            member = tarfile.TarInfo("empty")
            member.mode = mode
            archive.addfile(member)

    server.etag = "same"
    program = Path(sys.executable).with_name("tarfs")
    for target, mode, is_forged in ("./good", 0o600, False), ("./evil", 0o644, True):
        path, url = server.directory / f"{mode:o}.tar", server.url(f"{mode:o}.tar")
        # The index is made of another archive that has the same version by its tag.
        write(path, target, mode)
        subprocess.run([program, "index", "--quiet", "--output", f"{path}.tarfs", url], check=True)
        write(path, "./good", 0o600)
        with pytest.warns(UserWarning, match="publisher chooses names.*index=False"):
            archive = tarfs.open(url, cache_dir=False)
        assert archive.counters()["published_indexes"] == 1
        targets = {entry.path: entry.target for entry in archive.walk()}
        assert targets["link"] == target
        files = TarfsFileSystem(fo=url, cache_dir=False)
        assert sorted(files.find("")) == ["empty", "evil", "good", "link"]
        if is_forged:
            for call in archive.stat, archive.open, files.cat_file:
                with pytest.raises(tarfs.Damaged):
                    call("link")
            with pytest.raises(tarfs.Damaged):
                archive.open("empty")
        else:
            assert archive.read_range("link") == files.cat_file("link") == b"good"
            assert archive.open("empty").read() == b""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        archive = tarfs.open(url, cache_dir=False, index=False)
    assert archive.read_range("link") == b"good"


@pytest.mark.parametrize("is_saved", [False, True])
# Promises: python-indexes
def test_tree_of_a_published_index_is_not_written(
    server: Server, contents: Contents, tmp_path: Path, is_saved: bool
) -> None:
    (server.directory / "w.tar.gz").write_bytes((server.directory / "a.tar.gz").read_bytes())
    program = Path(sys.executable).with_name("tarfs")
    index = server.directory / "w.tar.gz.tarfs"
    command = [program, "index", "--quiet", "--output", index, server.url("w.tar.gz")]
    subprocess.run(command, check=True)
    cache_dir = tmp_path / "cache of another machine" if is_saved else False
    archive = tarfs.open(server.url("w.tar.gz"), cache_dir=cache_dir)
    assert archive.counters()["published_indexes"] == 1
    # What is only shown needs no scan, and is cut as the tree that is written.
    scanned_archive = tarfs.open(server.url("a.tar.gz"))
    entries = [shard.entries for shard in archive.plan_shards(2)]
    assert entries == [shard.entries for shard in scanned_archive.plan_shards(2)]
    shown = {member.name: member.read() for member in archive.members(1, 2)}
    assert shown == {member.name: member.read() for member in scanned_archive.members(1, 2)}
    assert archive.counters()["scanned_packed_bytes"] == 0
    out = tmp_path / "out"
    out.mkdir()
    for number in 1, 2:
        archive.write_shard(out, number, 2)
    scanned = archive.counters()["scanned_packed_bytes"]
    assert scanned > 0
    archive.finish_shards(out)
    assert archive.counters()["scanned_packed_bytes"] == scanned
    assert (out / "data/d1/f0001").read_bytes() == contents["data/d1/f0001"]


# Promises: python-processes
def test_archive_is_pickled(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"), memory="64MiB")
    copy = pickle.loads(pickle.dumps(archive))
    assert copy.open("table.csv").read() == contents["table.csv"]
    with get_context("spawn").Pool(2) as pool:
        paths = archive.ls("data/d1")
        assert pool.starmap(archive.read_range, [(path,) for path in paths]) == [
            contents[path] for path in paths
        ]


# Promises: python-processes
def test_forked_process_opens_again(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    file, members = archive.open("table.csv"), iter(archive)
    with get_context("fork").Pool(2) as pool:
        assert pool.apply(archive.read_range, ("table.csv",)) == contents["table.csv"]
    child = os.fork()
    if child == 0:
        try:
            is_right = file.read() == contents["table.csv"]
            with pytest.raises(tarfs.Error, match="forked"):
                next(members)
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert file.read() == contents["table.csv"]


# Promises: python-threads
def test_threads_share_an_archive(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.xz"))
    with ThreadPoolExecutor(8) as threads:
        assert dict(zip(contents, threads.map(archive.read_range, contents))) == contents


# Promises: python-threads
def test_other_threads_run_while_one_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    failed = []

    def read() -> None:
        try:
            list(tarfs.stream(tmp_path / "pipe"))
        except tarfs.Error as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    # The other thread waits for the first bytes, so this one can only go on because that one released the lock.
    with open(tmp_path / "pipe", "wb") as pipe:
        time.sleep(0.1)
        assert thread.is_alive()
        pipe.write(b"no archive")
    thread.join()
    assert isinstance(failed[0], tarfs.Damaged)


# Promises: python-errors
def test_errors_have_kinds_and_texts(server: Server, tmp_path: Path) -> None:
    archive = tarfs.open(server.url("a.tar"))
    cases = [
        (lambda: archive.open("none"), FileNotFoundError, "none: not in the archive"),
        (lambda: archive.open("data"), IsADirectoryError, "data: it is a directory"),
        (lambda: archive.stat("table.csv/x"), FileNotFoundError, "not a directory"),
        (lambda: archive.members(3, 2), ValueError, "shard 3/2"),
        (lambda: archive.plan_shards(0), ValueError, "0 shards"),
        (lambda: tarfs.open(server.url("none")), FileNotFoundError, "check how it is spelled"),
        (lambda: tarfs.open(tmp_path / "none.tar"), tarfs.NotFound, "cannot read"),
        (lambda: tarfs.open(tmp_path / "none.tar", memory="much"), ValueError, "memory: 'much'"),
        (lambda: tarfs.open("a.tar", compression="rar"), tarfs.InvalidArgument, "compression: "),
        (lambda: tarfs.open("oci:a", compression="gzip"), tarfs.InvalidArgument, "with an image"),
        (lambda: tarfs.open("ftp://example.com/a.tar"), ValueError, "not a known scheme"),
        (lambda: tarfs.open("http://127.0.0.1:1/a.tar", retries=0), ConnectionError, "refuses"),
    ]
    for call, kind, text in cases:
        with pytest.raises(kind, match=text) as raised:
            call()
        assert isinstance(raised.value, tarfs.Error)


# Promises: python-damaged
def test_damage_is_a_value_error(server: Server, tmp_path: Path) -> None:
    whole = (server.directory / "a.tar.gz").read_bytes()
    for data in (
        b"",
        b"<!doctype html><html>",
        whole[:-5000],
        whole[:9000] + bytes(100) + whole[9100:],
    ):
        (tmp_path / "bad.tar.gz").write_bytes(data)
        with pytest.raises(tarfs.Damaged) as raised:
            tarfs.open(tmp_path / "bad.tar.gz")
        assert isinstance(raised.value, ValueError) and "bad.tar.gz" in str(raised.value)


# Promises: python-errors
def test_limits_are_no_damage(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"a": b"1", "b": b"2"})
    with pytest.raises(tarfs.Error, match="allowed") as raised:
        tarfs.open(path, cache_dir=False, max_entries=1)
    assert not isinstance(raised.value, tarfs.Damaged)


# Promises: python-damaged
def test_cut_file_has_the_bytes_before_the_cut(tmp_path: Path) -> None:
    data = os.urandom(100_000)
    path = write_tar(tmp_path / "a.tar", {"a": data})
    path.write_bytes(path.read_bytes()[:60_000])
    archive = tarfs.open(path, cache_dir=False, allow_truncated=True)
    file = archive.open("a")
    front = file.read(80_000)
    assert len(front) == 60_000 - 512 and data.startswith(front)
    for read in (lambda: file.read(10), archive.open("a").read, lambda: archive.read_range("a")):
        with pytest.raises(tarfs.Damaged):
            read()


# Promises: python-headers
def test_headers_are_loaded_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.user, logins = "token 1", iter(["token 1", "token 2"])
    with pytest.raises(PermissionError, match="refuses access"):
        tarfs.open(server.url("a.tar"), headers={"Authorization": "token 0"})
    options = {"cache_dir": False, "retries": 0}
    archive = tarfs.open(
        server.url("a.tar"), headers=lambda: {"Authorization": next(logins)}, **options
    )
    server.user = "token 2"
    assert archive.open("table.csv").read(4) == b"name"
    monkeypatch.setenv("TARFS_HEADERS", "X-Other: 1\nAuthorization: token 2")
    assert tarfs.open(server.url("a.tar"), **options).exists("table.csv")


# Promises: header-file
def test_headers_of_the_environment_are_parsed_as_by_the_command_line(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login, server.user = tmp_path / "login", "token 1"
    login.write_text("# a comment\n\nAuthorization: token 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TARFS_HEADERS", "# the user\n@login")
    archive = tarfs.open(server.url("a.tar"), cache_dir=False, retries=0)
    monkeypatch.chdir("/")
    login.write_text("Authorization: token 2\n")
    server.user = "token 2"
    assert archive.open("table.csv").read(4) == b"name"
    login.write_text("@login\n")
    for text, message in [(f"@{login}", "login, line 1: "), ("@/dev/zero", "longer than")]:
        monkeypatch.setenv("TARFS_HEADERS", text)
        with pytest.raises(tarfs.InvalidArgument, match=message):
            tarfs.open(server.url("a.tar"))


# Promises: python-headers
def test_headers_of_the_environment_are_read_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ({}, {"headers": {"X-Other": "1"}}, {"headers": lambda: {"X-Other": "1"}}):
        server.user = "token 1"
        monkeypatch.setenv("TARFS_HEADERS", "Authorization: token 1")
        archive = tarfs.open(server.url("a.tar"), cache_dir=False, retries=0, **options)
        server.user = "token 2"
        monkeypatch.setenv("TARFS_HEADERS", "Authorization: token 2")
        assert archive.open("table.csv").read(4) == b"name"


# Promises: header-file, python-processes
def test_header_file_of_an_archive_that_is_opened_again_is_relative_to_the_start(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.user = "token 1"
    (tmp_path / "login").write_text("Authorization: token 1\n")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TARFS_HEADERS", "@login")
    archive = tarfs.open(server.url("a.tar"), cache_dir=False, retries=0)
    monkeypatch.chdir(tmp_path / "other")
    assert pickle.loads(pickle.dumps(archive)).read_range("table.csv", 0, 4) == b"name"
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            is_right = archive.read_range("table.csv", 0, 4) == b"name"
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0


#: Writes the second argument to the pipe that the third one names, from a thread.
WRITER = """
import os, sys, threading, tarfs
url, text, pipe = sys.argv[1:]
os.mkfifo(pipe)
threading.Thread(target=lambda: open(pipe, "w").write(text), daemon=True).start()
"""


def run_with_writer(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", WRITER + script, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=60).stdout


# Promises: python-threads, header-file
def test_headers_come_from_a_thread_of_the_same_process(server: Server, tmp_path: Path) -> None:
    server.user = "token 1"
    script = """
os.environ["TARFS_HEADERS"] = f"@{pipe}"
print(tarfs.open(url, cache_dir=False).exists("table.csv"))
"""
    text = "Authorization: token 1\n"
    assert run_with_writer(script, server.url("a.tar"), text, tmp_path / "pipe") == "True\n"


def test_certificate_with_its_key_is_read_once(server: Server, tmp_path: Path) -> None:
    script = """
try:
    tarfs.open(url, cert=pipe)
except tarfs.InvalidArgument as error:
    print(error)
"""
    text = run_with_writer(script, server.url("a.tar"), "nothing\n", tmp_path / "pipe")
    assert text.startswith("cert: ")


def test_empty_paths_have_no_effect(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for empty in ("", b""):
        names = ["netrc", "cacert", "cert", "key", "hosts_dir", "index", "cache_dir"]
        archive = tarfs.open(server.url("a.tar"), **dict.fromkeys(names, empty))
        assert archive.exists("table.csv")
        assert next(tarfs.stream(server.url("a.tar"), cert=empty)).name == "data"
    assert os.listdir(tmp_path) == ["cache"]


def test_sizes_are_those_of_the_command_line(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for memory in (64 << 20, "64MiB", "64 M", "0.0625gib"):
        assert tarfs.open(server.url("a.tar"), memory=memory).exists("table.csv")
    for memory in ("64ib", " 64M", "1e9T", -1):
        with pytest.raises(tarfs.InvalidArgument, match="memory: .* is not a size like"):
            tarfs.open(server.url("a.tar"), memory=memory)
    monkeypatch.setenv("TARFS_CACHE_SIZE", "much")
    assert tarfs.open(server.url("a.tar"), cache_size="1G").exists("table.csv")
    with pytest.raises(tarfs.InvalidArgument, match="TARFS_CACHE_SIZE: 'much'"):
        tarfs.open(server.url("a.tar"))


# Promises: python-errors
def test_options_have_the_ranges_of_the_command_line(server: Server) -> None:
    for name, values, text in [
        ("connections", (0, -1, 257, 10**30, "4"), "from 1 to 256"),
        ("timeout", (0, -1, 0.5, 86_400.5, 86_401, float("nan"), float("inf"), "1"), "from 1 to 86400"),
        ("retries", (-1, 1_000_001, 0.5), "from 0 to 1000000"),
        ("memory", ("1MiB", 0, (32 << 20) - 1), "the smallest valid value is 32MiB"),
    ]:
        for value in values:
            with pytest.raises(tarfs.InvalidArgument, match=f"{name}: .*{text}"):
                tarfs.open(server.url("a.tar"), **{name: value})
    options = {"connections": 256, "timeout": 1.5, "retries": 0, "memory": "32MiB"}
    assert tarfs.open(server.url("a.tar"), **options).exists("table.csv")


def test_cache_directory_is_relative_to_the_start(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TARFS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "ignored because it is relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    tarfs.open(server.url("a.tar"), cache_dir=True)
    assert list((tmp_path / "home/.cache/tarfs/index").glob("*.idx"))
    archive = tarfs.open(server.url("a.tar.gz"), cache_dir="own")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert archive.open("table.csv").read(4) == b"name"
    assert not list((tmp_path / "other").iterdir())


# Promises: python-processes, python-version
def test_archive_that_is_opened_again_is_relative_to_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, other = tmp_path / "start", tmp_path / "other"
    for place, data in [(start, b"1"), (other, b"2")]:
        place.mkdir()
        inner = write_tar(tmp_path / "inner.tar", {"f": data})
        write_tar(place / "a.tar", {"f": data})
        write_tar(place / "outer.tar", {"inner.tar": inner.read_bytes()})
    monkeypatch.setenv("TARFS_CACHE_DIR", "own")
    monkeypatch.chdir(start)
    tarfs.open("a.tar").close()
    shutil.copy(next(Path("own/index").glob("*.idx")), "join:a.idx")
    archives = [
        tarfs.open("a.tar"),
        tarfs.open(b"./a.tar", cache_dir=True),
        tarfs.open(Path("a.tar"), index="join:a.idx", cache_dir=False),
        tarfs.open("tar:outer.tar!/inner.tar", hosts_dir="hosts"),
    ]
    saved = sorted(os.listdir(start))
    monkeypatch.chdir(other)
    for archive in archives:
        assert pickle.loads(pickle.dumps(archive)).read_range("f") == b"1"
        child = os.fork()
        if child == 0:
            is_right = False
            try:
                is_right = archive.read_range("f") == b"1"
            finally:
                os._exit(0 if is_right else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert sorted(os.listdir(other)) == ["a.tar", "outer.tar"]
    assert sorted(os.listdir(start)) == saved and "own" in saved


# Promises: auth-netrc
def test_netrc_file_is_relative_to_the_start(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logins, server.user = tmp_path / "logins", "Basic bWU6MQ=="
    logins.write_text("machine 127.0.0.1 login me password 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", "logins")
    archive = tarfs.open(server.url("a.tar"), cache_dir=False, retries=0)
    monkeypatch.chdir("/")
    logins.write_text("machine 127.0.0.1 login me password 2\n")
    server.user = "Basic bWU6Mg=="
    assert archive.open("table.csv").read(4) == b"name"


# Promises: auth-netrc
def test_login_of_netrc_needs_a_challenge(server: Server, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password 1\n")
    server.user = "Basic bWU6MQ=="
    for headers in (None, {"X-Other": "1"}, lambda: {"X-Other": "1"}):
        server.refusal = 403
        with pytest.raises(PermissionError):
            tarfs.open(server.url("a.tar"), headers=headers, cache_dir=False)
        server.refusal = 401
        archive = tarfs.open(server.url("a.tar"), headers=headers, cache_dir=False)
        assert archive.exists("table.csv")


# Promises: python-secrets
def test_secrets_are_not_shown(server: Server) -> None:
    url = server.url("a.tar").replace("//", "//user:geheim@")
    assert "geheim" not in repr(tarfs.open(url))
    with pytest.raises(tarfs.Error) as raised:
        tarfs.open(url + "?signature=geheim&none")
    assert "geheim" not in str(raised.value)


# Promises: python-secrets
def test_options_without_cache_write_nothing(server: Server, tmp_path: Path) -> None:
    archive = tarfs.open(server.url("a.tar.gz"), cache_dir=False)
    assert archive.open("table.csv").read(4) == b"name"
    assert not (tmp_path / "cache").exists()
    assert archive.counters()["source_read_bytes"] > 0
    assert archive.problems == 0


def test_wheel_brings_the_program(server: Server, contents: dict[str, bytes]) -> None:
    command = [Path(sys.executable).with_name("tarfs"), "ls", server.url("a.tar.gz"), "data/d1"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert listed.split() == [name[8:] for name in contents if name.startswith("data/d1/")]


# Promises: python-files
def test_file_is_a_raw_file_of_python(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"), cache_size=True)
    file = archive.open("table.csv")
    assert (file.mode, file.read(-1), file.seek(0)) == ("rb", contents["table.csv"], 0)
    for call, kind in [
        (lambda: file.write(b"x"), io.UnsupportedOperation),
        (lambda: file.seek(0, 17), ValueError),
        (lambda: file.seek(-1), ValueError),
        (lambda: file.seek(1.5), TypeError),
        (lambda: file.readinto(bytes(4)), TypeError),
        (lambda: file.readinto(memoryview(bytearray(8))[::2]), TypeError),
    ]:
        with pytest.raises(kind):
            call()
        assert file.tell() == 0
    file.close()
    for call in (file.tell, file.readable, file.seekable, lambda: file.seek(0)):
        with pytest.raises(ValueError, match="closed"):
            call()
    with pytest.raises(tarfs.InvalidArgument, match="memory: 'True'"):
        tarfs.open(server.url("a.tar.gz"), memory=True)


# Promises: python-files
def test_file_outlives_its_archive(server: Server, contents: Contents) -> None:
    with tarfs.open(server.url("a.tar.gz")) as archive:
        file = archive.open("table.csv")
    assert file.read() == contents["table.csv"]
    with pytest.raises(ValueError, match="closed"):
        archive.ls()
    file.close()
    assert "closed" in repr(archive)


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
@pytest.mark.parametrize("is_local", [True, False])
# Promises: python-version
def test_other_version_is_never_read(server: Server, suffix: str, is_local: bool) -> None:
    path = server.directory / f"version.{suffix}"
    write_tar(path, {name: name.encode() * 9 for name in ("alice", "bobby", "carol")})
    archive = tarfs.open(path if is_local else server.url(path.name))
    entries = archive.ls(detail=True)
    same = pickle.loads(pickle.dumps(archive.open("bobby")))
    assert same.read() == b"bobby" * 9
    frozen = pickle.dumps((archive, same))
    write_tar(path, {name: name.encode() * 9 for name in ("zelda", "alice", "bobby")})
    for work in (lambda archive, file: archive.ls(), lambda archive, file: file.read()):
        with pytest.raises(tarfs.Changed):
            work(*pickle.loads(frozen))
    again = tarfs.open(path if is_local else server.url(path.name))
    with pytest.raises(tarfs.InvalidArgument, match="of another archive"):
        again.members(only=entries)
    with pytest.raises(tarfs.InvalidArgument, match="of another archive"):
        again.shards_of(entries, 2)


# Promises: python-names
def test_path_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    directory = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(directory)
    write_tar(tmp_path / "a.tar", {"f": b"x"}).rename(os.fsdecode(directory + b"/a.tar"))
    for number, path in enumerate((directory + b"/a.tar", os.fsdecode(directory + b"/a.tar"))):
        with tarfs.open(path) as archive:
            assert archive.read_range("f") == b"x"
            assert pickle.loads(pickle.dumps(archive)).read_range("f") == b"x"
            out = directory + b"/%d" % number
            os.mkdir(out)
            archive.write_shard(out, 1, 1)
            archive.finish_shards(out)
            assert Path(os.fsdecode(out + b"/f")).read_bytes() == b"x"
        assert [member.name for member in tarfs.stream(path)] == ["f"]


# Promises: python-threads
def test_many_archives_need_few_files_and_threads(tmp_path: Path) -> None:
    for number in range(60):
        write_tar(tmp_path / f"{number}.tar.gz", {"t": b"%d" % number})
    script = f"""
import os, resource, tarfs
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
archives = [tarfs.open(f"{tmp_path}/{{number}}.tar.gz") for number in range(60)]
for _ in range(2):
    for number, archive in enumerate(archives):
        assert archive.read_range("t") == b"%d" % number
names = [open(f"/proc/self/task/{{task}}/comm").read() for task in os.listdir("/proc/self/task")]
print(names.count("tarfs-read\\n"), names.count("tarfs-fetch\\n"), names.count("tarfs-net\\n"))
"""
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    # Pools have one thread, and up to four while jobs wait.
    assert all(1 <= int(count) <= 4 for count in found[:2])


@pytest.mark.parametrize("work", ["open", "stream", "range", "file", "members", "write_shard"])
# Promises: python-interrupt
def test_interrupt_ends_what_waits(server: Server, tmp_path: Path, work: str) -> None:
    url = server.url("a.tar.gz")
    options = {"cache_size": False, "memory": "64MiB"}
    # Saves the index, so that no scan leaves contents in the memory of the archive below.
    tarfs.open(url, cache_size=False, memory="32MiB").close()
    archive = tarfs.open(url, **options)
    assert archive.counters()["scanned_packed_bytes"] == 0
    file = archive.open("table.csv")
    calls = {
        "open": lambda: tarfs.open(server.url("a.tar.bz2"), **options),
        "stream": lambda: next(tarfs.stream(url)),
        "range": lambda: archive.read_range("data/d1/f0001"),
        "file": file.read,
        "members": lambda: [member.read() for member in archive],
        "write_shard": lambda: archive.write_shard(tmp_path / "out", 1, 1),
    }
    (tmp_path / "out").mkdir()
    server.unanswered, server.silence, server.was_waited_for = 0, threading.Event(), False
    try:
        with pytest.raises(KeyboardInterrupt):
            server.is_called.set()
            calls[work]()
        assert not server.was_waited_for
    finally:
        server.silence.set()
        server.silence = None
        server.is_called.clear()


# Promises: python-damaged
def test_iteration_goes_on_after_damage(server: Server) -> None:
    data = {f"f{number}": random.Random(number).randbytes(1_500_000) for number in range(4)}
    plain = write_tar(server.directory / "damaged.tar", data).read_bytes()
    parts = [gzip.compress(plain[n : n + 500_000], 1) for n in range(0, len(plain), 500_000)]
    packed, path = bytearray(b"".join(parts)), server.directory / "damaged.tar.gz"
    path.write_bytes(packed)
    server.etag = "same"
    tarfs.open(server.url(path.name), cache_size=False).close()
    packed[len(packed) * 3 // 8] ^= 0xFF
    path.write_bytes(packed)
    found = {}
    for member in tarfs.open(server.url(path.name), cache_size=False):
        try:
            found[member.name] = member.read()
        except tarfs.Damaged as error:
            found[member.name] = None
            with pytest.raises(tarfs.Damaged, match=str(error)[:20]):
                member.read(1)
    # The first one is in the damaged span, too.
    assert list(found) == list(data) and found["f1"] is None
    assert (found["f2"], found["f3"]) == (data["f2"], data["f3"])
    names = [member.name for member in tarfs.open(server.url(path.name), cache_size=False)]
    assert names == list(data)


# Promises: python-threads
def test_iterations_go_on_side_by_side(server: Server) -> None:
    data = {f"f{number:02}": random.Random(number).randbytes(1_000_000) for number in range(30)}
    path = write_tar(server.directory / "side.tar", data)
    for name in ("one.tar.zst", "two.tar.zst"):
        packed = run_filter(["zstd", "-q", "-1", "-c"], path.read_bytes())
        (server.directory / name).write_bytes(packed)
    script = f"""
import tarfs
options = {{"cache_size": False, "memory": "64MiB"}}
one, two = (tarfs.open(f"{server.directory}/{{name}}.tar.zst", **options) for name in ("one", "two"))
for members in zip(one, one, two):
    assert len({{member.read() for member in members}}) == 1
    assert two.read_range("f29", -5) == one.open("f29").readall()[-5:]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


# Promises: python-damaged
def test_content_is_never_silently_short() -> None:
    entry = tarfs.Entry("a", "file", 5, 0, 0o644, 0, 0, "", "", "", 1)
    for items in ([b"abc", None], [b"abc", b"", None]):
        member = tarfs.Member(iter(items), entry)
        with pytest.raises(tarfs.Damaged, match="as long as"):
            member.read()


# Promises: shard-finish
def test_finished_tree_without_all_members_raises(tmp_path: Path) -> None:
    archive = tarfs.open(write_tar(tmp_path / "a.tar", {"../out": b"1", "in": b"2"}))
    (tmp_path / "out").mkdir()
    archive.write_shard(tmp_path / "out", 1, 1)
    with pytest.raises(tarfs.Damaged, match="not in the tree: 1"):
        archive.finish_shards(tmp_path / "out")
    assert (tmp_path / "out/in").read_bytes() == b"2"


# Promises: python-errors
def test_materialize_that_cannot_write_raises(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        directory.chmod(0o755)
    write_tar(tmp_path / "a.tar", {"t": b"hello", "d/u": b"1"})
    (tmp_path / "out").mkdir(mode=0o755)
    script = f"""
import os, tarfs
archive = tarfs.open("{tmp_path}/a.tar", cache_dir=False)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(1234); os.setuid(1234)
else:
    os.chmod("{tmp_path}/out", 0o555)
try:
    print(archive.write_shard("{tmp_path}/out", 1, 1))
except PermissionError as error:
    print(error)
"""
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert "Permission denied" in found
