"""The file system for fsspec, and the programs that read by it."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import duckdb
import fsspec
import pandas as pd
import pytest
import tarfs
from conftest import Server


def test_url_chain_reads_a_member(server: Server, contents: dict[str, bytes]) -> None:
    with fsspec.open(f"tarfs://data/d1/f0001::{server.url('a.tar.gz')}") as file:
        assert file.read() == contents["data/d1/f0001"]
    with fsspec.open(f"tarfs://table.csv::{server.url('a.tar.gz')}", "r") as file:
        assert file.readline() == "name,value\n"


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


def test_file_system_is_pickled(server: Server, contents: dict[str, bytes]) -> None:
    fs = fsspec.filesystem("tarfs", fo=server.url("a.tar.gz"), memory="64MiB")
    copy = pickle.loads(pickle.dumps(fs))
    assert copy.cat("table.csv") == contents["table.csv"]
    file = pickle.loads(pickle.dumps(fsspec.open(f"tarfs://table.csv::{server.url('a.tar.gz')}")))
    with file as opened:
        assert opened.read() == contents["table.csv"]


def test_unknown_options_are_refused(server: Server) -> None:
    with pytest.raises(tarfs.InvalidArgument, match="does not know secret"):
        fsspec.filesystem("tarfs", fo=server.url("a.tar"), target_options={"secret": "x"})
    with pytest.raises(TypeError):
        fsspec.filesystem("tarfs", fo=server.url("a.tar"), no_such_option=1)
    with pytest.raises(tarfs.InvalidArgument, match="read-only"):
        fsspec.filesystem("tarfs", fo=server.url("a.tar")).open("new", "wb")


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
