"""The file system for fsspec, and the programs that read by it."""

from __future__ import annotations

import gc
import io
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import duckdb
import fsspec
import pandas as pd
import pytest
import tarfs
from conftest import Server, write_tar
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests
from tarfs.fsspec import OPTIONS, TarfsFileSystem


def test_url_chain_reads_a_member(server: Server, contents: dict[str, bytes]) -> None:
    with fsspec.open(f"tarfs://data/d1/f0001::{server.url('a.tar.gz')}") as file:
        assert file.read() == contents["data/d1/f0001"]
    with fsspec.open(f"tarfs://table.csv::{server.url('a.tar.gz')}", "r") as file:
        assert file.readline() == "name,value\n"


# Promises: fsspec-sources
def test_local_paths_and_other_protocols(
    server: Server, contents: dict[str, bytes], tmp_path: Path
) -> None:
    local = server.directory / "a.tar.gz"
    for fo in (str(local), f"file://{local}"):
        assert fsspec.filesystem("tarfs", fo=fo).cat("link") == contents["data/d1/f0001"]
    with fsspec.open("memory://a.tar.gz", "wb") as file:
        file.write(local.read_bytes())
    with fsspec.open("tarfs://table.csv::memory://a.tar.gz") as file:
        assert file.read() == contents["table.csv"]


# Promises: store-hadoop
def test_names_of_hadoop_are_archives(
    server: Server, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = server.directory / "a.tar.gz"
    bucket = server.directory / "bucket"
    bucket.mkdir(exist_ok=True)
    (bucket / "a.tar.gz").write_bytes(local.read_bytes())
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    endpoint = {"endpoint_url": server.url("").rstrip("/")}
    for fo, options in [(f"file:{local}", {}), ("s3a://bucket/a.tar.gz", endpoint)]:
        with tarfs.open(fo, **options) as archive:
            assert archive.open("table.csv").read() == contents["table.csv"]
        fs = fsspec.filesystem("tarfs", fo=fo, **options)
        assert fs.cat("table.csv") == contents["table.csv"]


# Promises: python-processes
def test_copy_of_an_archive_is_removed_by_its_process_only(server: Server) -> None:
    packed = (server.directory / "a.tar.gz").read_bytes()
    fs = fsspec.filesystem("tarfs", fo=io.BytesIO(packed))
    copy = fs.fo
    child = os.fork()
    if child == 0:
        del fs
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert Path(copy).read_bytes() == packed
    del fs
    gc.collect()
    assert not os.path.exists(copy)


# Promises: python-names
def test_path_may_have_bytes_that_are_not_utf8(server: Server, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.tar.gz"
    shutil.copy(server.directory / "a.tar.gz", path)
    for fo in (path, os.fsdecode(path), Path(os.fsdecode(path))):
        assert fsspec.filesystem("tarfs", fo=fo).exists("table.csv")


def test_listings_are_those_of_the_archive(server: Server, contents: dict[str, bytes]) -> None:
    fs = fsspec.filesystem("tarfs", fo=server.url("a.tar.gz"))
    assert fs.ls("", detail=False)[:3] == ["data", "hard", "table.csv"]
    assert fs.ls("table.csv", detail=False) == ["table.csv"]
    files = sorted([*contents, "link"])
    assert fs.find("") == files == fs.find("", maxdepth=9)
    assert fs.find("data/d1") == [name for name in files if name.startswith("data/d1/")]
    assert fs.find("data", withdirs=True, detail=True)["data/d3"]["type"] == "directory"
    assert fs.glob("data/d*/f000?") == [name for name in files if "/f000" in name]
    walked = {f"{root}/{name}".strip("/") for root, _, names in fs.walk("") for name in names}
    assert walked == set(files)
    info = fs.info("tarfs://link")
    assert (info["type"], info["islink"], info["size"]) == (
        "file",
        True,
        len(contents["data/d1/f0001"]),
    )
    assert fs.isdir("data") and fs.isfile("hard") and not fs.exists("none")
    assert fs.modified("table.csv").timestamp() == 1_600_000_000
    assert fs.du("data") == sum(len(data) for name, data in contents.items() if "data/" in name)


def test_ranges_of_many_files(server: Server, contents: dict[str, bytes]) -> None:
    fs = fsspec.filesystem("tarfs", fo=server.url("a.tar.xz"))
    paths = fs.find("data")
    assert fs.cat_ranges(paths, 5, 50) == [contents[path][5:50] for path in paths]
    found = fs.cat_ranges(["none", "table.csv"], [0, 1], [1, 4])
    assert isinstance(found[0], FileNotFoundError) and found[1] == b"ame"
    assert fs.cat(["table.csv", "empty"]) == {"table.csv": contents["table.csv"], "empty": b""}
    assert fs.cat_file("table.csv", start=-5) == contents["table.csv"][-5:]


# Promises: python-processes
def test_file_system_is_pickled(server: Server, contents: dict[str, bytes]) -> None:
    fs = fsspec.filesystem("tarfs", fo=server.url("a.tar.gz"), memory="64MiB")
    copy = pickle.loads(pickle.dumps(fs))
    assert copy.cat("table.csv") == contents["table.csv"]
    file = pickle.loads(pickle.dumps(fsspec.open(f"tarfs://table.csv::{server.url('a.tar.gz')}")))
    with file as opened:
        assert opened.read() == contents["table.csv"]


# Promises: fsspec-options
def test_options_of_other_file_systems_have_no_effect(server: Server) -> None:
    url = server.url("a.tar")
    for options in (
        {"hf": {"token": None}, "encoding": "utf-8", "client_kwargs": {}},
        {"mode": "r", "auto_mkdir": True, "block_size": 1, "use_listings_cache": True},
        {"target_options": {"block_size": 1, "encoding": "utf-8", "anon": False}},
    ):
        assert fsspec.filesystem("tarfs", fo=url, **options).exists("table.csv")
    assert "memory" in OPTIONS and "url" not in OPTIONS


# Promises: fsspec-options
def test_options_that_would_be_misunderstood_are_refused(server: Server) -> None:
    url = server.url("a.tar")
    for options, text in (
        ({"target_options": {"secret": "x"}}, "does not know secret"),
        ({"target_options": {"anon": True}}, "does not know anon"),
        ({"cachedir": "/tmp"}, "there is cache_dir"),
        ({"header": {}}, "there is headers"),
    ):
        with pytest.raises(tarfs.InvalidArgument, match=text):
            fsspec.filesystem("tarfs", fo=url, **options)
    with pytest.raises(tarfs.InvalidArgument, match="read-only"):
        fsspec.filesystem("tarfs", fo=url).open("new", "wb")


# Promises: fsspec-listing
def test_links_to_directories_are_not_entered(tmp_path: Path) -> None:
    links = {"bin/A": ".", "bin/B": ".", "top": "bin", "none": "missing", "file": "bin/x"}
    path = write_tar(tmp_path / "links.tar", {"bin/x": b"12345"}, links)
    fs = fsspec.filesystem("tarfs", fo=path)
    assert [root for root, _, _ in fs.walk("")] == ["", "bin"]
    names = ["bin/A", "bin/B", "bin/x", "file", "none", "top"]
    assert fs.find("") == fs.find("", maxdepth=3) == names
    assert fs.glob("*/x") == ["bin/x"] and fs.glob("**/x") == ["bin/x"]
    assert fs.isdir("top") and sorted(fs.ls("top", detail=False)) == ["top/A", "top/B", "top/x"]
    assert [fs.exists(name) for name in ("none", "file", "top")] == [False, True, True]
    assert (fs.info("file")["size"], fs.info("file")["destination"]) == (5, "bin/x")
    assert (fs.info("none")["type"], fs.du("")) == ("other", 10)
    found = {info["name"]: info["type"] for info in fs.ls("")}
    assert found == {"bin": "directory", "top": "other", "none": "other", "file": "file"}


# Promises: fsspec-listing
def test_searches_below_missing_paths_find_nothing(server: Server) -> None:
    fs = fsspec.filesystem("tarfs", fo=server.url("a.tar"))
    assert (fs.find("none"), fs.find("none", detail=True), fs.du("none")) == ([], {}, 0)
    assert fs.glob("none/**") == []
    with pytest.raises(FileNotFoundError):
        fs.ls("none")


@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache"])
# Promises: fsspec-sources
def test_caches_of_fsspec_are_below(server: Server, tmp_path: Path, cache: str) -> None:
    url = f"tarfs://table.csv::{cache}::{server.url('a.tar.gz')}"
    with fsspec.open(url, "r", **{cache: {"cache_storage": str(tmp_path / "below")}}) as file:
        assert file.readline() == "name,value\n"
    assert os.listdir(tmp_path / "below")


# Promises: fsspec-sources
def test_archive_is_a_path_or_a_file_object(server: Server, contents: dict[str, bytes]) -> None:
    path = server.directory / "a.tar.gz"
    with path.open("rb") as file, fsspec.open(str(path)) as opened:
        for fo in (path, file, opened, io.BytesIO(path.read_bytes())):
            fs = fsspec.filesystem("tarfs", fo=fo)
            assert fs.cat("table.csv") == contents["table.csv"]
    assert pickle.loads(pickle.dumps(fsspec.filesystem("tarfs", fo=path))).exists("table.csv")


# Promises: python-files
def test_files_have_the_attributes_of_fsspec(server: Server, contents: dict[str, bytes]) -> None:
    fs = fsspec.filesystem("tarfs", fo=server.url("a.tar.gz"))
    assert fs.read_block("table.csv", 1, 4) == contents["table.csv"][1:5]
    with fs.open("/table.csv") as file:
        assert (file.size, file.mode, file.path) == (len(contents["table.csv"]), "rb", "table.csv")
        assert file.fs is fs and file.details["name"] == "table.csv"
    for paths, starts, ends, kind in (
        ("table.csv", 0, 1, TypeError),
        (["table.csv"], [0, 1], [1], ValueError),
    ):
        with pytest.raises(kind):
            fs.cat_ranges(paths, starts, ends)


# Promises: python-threads
def test_archives_in_a_loop_are_closed(tmp_path: Path) -> None:
    for number in range(60):
        write_tar(tmp_path / f"{number}.tar.gz", {"t": b"%d" % number})
    script = f"""
import fsspec, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
urls = [f"tarfs://t::file://{tmp_path}/{{number}}.tar.gz" for number in range(60)]
files = [fsspec.open(url) for url in urls]
for number, url in enumerate(urls):
    with fsspec.open(url) as file, files[number] as other:
        assert file.read() == other.read() == b"%d" % number
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# Promises: python-version
def test_new_file_system_has_the_current_version(tmp_path: Path) -> None:
    for version in (b"1", b"2"):
        path = write_tar(tmp_path / "a.tar.gz", {"t": version})
        fs = fsspec.filesystem("tarfs", fo=path)
        assert fs.cat("t") == version
        keys = {*locals().get("keys", ()), fs.ukey("t")}
    frozen = pickle.dumps(fs)
    write_tar(tmp_path / "a.tar.gz", {"t": b"3"})
    assert len(keys) == 2
    with pytest.raises(tarfs.Changed):
        pickle.loads(frozen).ls("")


SCENARIOS = [
    "bulk_operations_scenario_0",
    "glob_edge_cases_files",
    "dir_and_file_with_same_name_prefix",
    "10_files_with_hashed_names",
]


class PreparedFileSystem(TarfsFileSystem):
    """An archive that has the files that a test is going to create."""

    def touch(self, path: str, truncate: bool = True, **_: object) -> None:
        assert self.exists(path)


class TestGetOfFsspec(AbstractFixtures, AbstractGetTests):
    """The tests of fsspec that need no writing. Those of copy, mv, open, pipe and put write to the file system."""

    @pytest.fixture
    def fs(self, tmp_path: Path) -> TarfsFileSystem:
        tree, local = tmp_path / "tree", LocalFileSystem(auto_mkdir=True)
        for name in SCENARIOS:
            getattr(self, f"_{name}")(local, os.path.join, str(tree / name))
        local.touch(str(tree / "fs/src/file"))
        with tarfile.open(tmp_path / "tree.tar", "w") as archive:
            archive.add(tree, "")
        return PreparedFileSystem(tmp_path / "tree.tar")

    @pytest.fixture
    def fs_path(self) -> str:
        return "fs"


def scenario(name: str) -> pytest.fixture:
    return pytest.fixture(lambda self: f"{name}/source")


for name in SCENARIOS:
    setattr(TestGetOfFsspec, f"fs_{name}", scenario(name))


def test_headers_of_the_protocol_are_sent(server: Server) -> None:
    server.user = "token"
    options = {"client_kwargs": {"headers": {"Authorization": "token"}}}
    url = f"tarfs://table.csv::{server.url('a.tar.gz')}"
    with fsspec.open(url, "r", http=options) as file:
        assert file.readline() == "name,value\n"


def test_pandas_reads_csv_and_parquet(server: Server) -> None:
    options = {"fo": server.url("a.tar.zst")}
    table = pd.read_csv("tarfs://table.csv", storage_options=options)
    chain = f"tarfs://table.csv::{server.url('a.tar.zst')}"
    # pandas would unpack what has such a name.
    chained = pd.read_csv(chain, compression=None)
    pd.testing.assert_frame_equal(chained, table)
    assert (len(table), table.value.sum()) == (500, sum(n * n for n in range(500)))
    parquet = io.BytesIO()
    table.to_parquet(parquet)
    with tarfile.open(server.directory / "tables.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("t/a.parquet")
        member.size = len(parquet.getvalue())
        archive.addfile(member, io.BytesIO(parquet.getvalue()))
    url = f"tarfs://t/a.parquet::{server.url('tables.tar.gz')}"
    pd.testing.assert_frame_equal(pd.read_parquet(url), table)


def test_duckdb_reads_by_fsspec(server: Server) -> None:
    with duckdb.connect() as database:
        database.register_filesystem(fsspec.filesystem("tarfs", fo=server.url("a.tar.gz")))
        query = "SELECT count(*), sum(value) FROM read_csv('tarfs://table.csv')"
        assert database.sql(query).fetchall() == [(500, sum(n * n for n in range(500)))]


def test_random_members_fetch_little(server: Server, contents: dict[str, bytes]) -> None:
    url = server.url("a.tar")
    tarfs.open(url, cache_size=False)
    server.sent = 0
    fs = fsspec.filesystem("tarfs", fo=url, cache_size=False, skip_instance_cache=True)
    for path in fs.find("data")[::60]:
        assert fs.cat(path) == contents[path]
    assert server.sent < 2 << 20
