"""The native interface, against Python's tarfile."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import tarfs
from conftest import PACKERS, Server

Contents = dict[str, bytes]


@pytest.mark.parametrize("suffix", PACKERS)
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


def test_listing_has_one_directory(server: Server) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    assert archive.ls() == ["data", "hard", "table.csv", "link", "latin-\udce9", "empty"]
    assert archive.ls("/data/") == [f"data/d{number}" for number in range(7)]
    assert [entry.kind for entry in archive.ls("data", detail=True)] == ["directory"] * 7
    assert archive.exists("data/d1/f0001") and not archive.exists("data/d1/f0002")


def test_names_that_are_not_utf8_survive(server: Server) -> None:
    archive = tarfs.open(server.url("a.tar.xz"))
    for name in (b"latin-\xe9", os.fsdecode(b"latin-\xe9")):
        assert archive.open(name).read() == b"not UTF-8"


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


def test_links_are_followed_inside_the_archive(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    assert archive.open("link").read() == contents["data/d1/f0001"]
    assert archive.open("data/../link").read() == contents["data/d1/f0001"]
    with pytest.raises(FileNotFoundError, match="leads outside"):
        archive.open("../link")


def test_shards_are_disjoint_and_complete(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    plan = archive.plan(7)
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


def test_members_can_be_selected(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"))
    wanted = archive.ls("data/d3", detail=True)
    found = {member.name: member.read() for member in archive.members(only=wanted)}
    assert found == {entry.path: contents[entry.path] for entry in wanted}


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


def test_saved_index_spares_the_archive(server: Server) -> None:
    assert tarfs.open(server.url("a.tar.bz2"), cache_size=False).ls()
    server.sent = 0
    assert len(tarfs.open(server.url("a.tar.bz2"), cache_size=False).walk()) > 300
    assert server.sent < 100_000


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
        assert archive.plan(3)[0].entries > 50


def test_archive_is_pickled(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.gz"), memory="64MiB")
    copy = pickle.loads(pickle.dumps(archive))
    assert copy.open("table.csv").read() == contents["table.csv"]
    with get_context("spawn").Pool(2) as pool:
        paths = archive.ls("data/d1")
        assert pool.starmap(archive.read_range, [(path,) for path in paths]) == [
            contents[path] for path in paths
        ]


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


def test_threads_share_an_archive(server: Server, contents: Contents) -> None:
    archive = tarfs.open(server.url("a.tar.xz"))
    with ThreadPoolExecutor(8) as threads:
        assert dict(zip(contents, threads.map(archive.read_range, contents))) == contents


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


def test_errors_have_kinds_and_texts(server: Server, tmp_path: Path) -> None:
    archive = tarfs.open(server.url("a.tar"))
    cases = [
        (lambda: archive.open("none"), FileNotFoundError, "none: not in the archive"),
        (lambda: archive.open("data"), IsADirectoryError, "data: it is a directory"),
        (lambda: archive.stat("table.csv/x"), FileNotFoundError, "not a directory"),
        (lambda: archive.members(3, 2), ValueError, "shard 3/2"),
        (lambda: archive.plan(0), ValueError, "0 shards"),
        (lambda: tarfs.open(server.url("none")), FileNotFoundError, "check how it is spelled"),
        (lambda: tarfs.open(tmp_path / "none.tar"), tarfs.NotFound, "cannot read"),
        (lambda: tarfs.open(tmp_path / "none.tar", memory="much"), ValueError, "memory: 'much'"),
        (lambda: tarfs.open("a.tar", compression="rar"), tarfs.InvalidArgument, "compression: "),
        (lambda: tarfs.open("ftp://example.com/a.tar"), ValueError, "not a known scheme"),
        (lambda: tarfs.open("http://127.0.0.1:1/a.tar", retries=0), ConnectionError, "refuses"),
    ]
    for call, kind, text in cases:
        with pytest.raises(kind, match=text) as raised:
            call()
        assert isinstance(raised.value, tarfs.Error)


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


def test_secrets_are_not_shown(server: Server) -> None:
    url = server.url("a.tar").replace("//", "//user:geheim@")
    assert "geheim" not in repr(tarfs.open(url))
    with pytest.raises(tarfs.Error) as raised:
        tarfs.open(url + "?signature=geheim&none")
    assert "geheim" not in str(raised.value)


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
