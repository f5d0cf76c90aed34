"""The data source for Spark, with executors of their own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tarfs
import tarfs.spark
from conftest import Server, make_tar, run_filter
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, sha2

#: Packed bytes between two seek points, at most.
SEEK_BYTES = 4 << 20


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    # Executors inherit the environment, and share one cache.
    os.environ["TARFS_CACHE_DIR"] = str(tmp_path_factory.mktemp("spark-cache"))
    os.chdir(tmp_path_factory.mktemp("spark"))
    session = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.executorEnv.TARFS_CACHE_DIR", os.environ["TARFS_CACHE_DIR"])
        .getOrCreate()
    )
    tarfs.spark.register(session)
    yield session
    session.stop()


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch, spark: SparkSession) -> str:
    """An archive of some MiB whose index is saved, and nothing else."""
    monkeypatch.setenv("TARFS_CACHE_DIR", spark.conf.get("spark.executorEnv.TARFS_CACHE_DIR"))
    path = server.directory / "large.tar.gz"
    if not path.exists():
        path.write_bytes(run_filter(["gzip", "-1"], make_tar(1500, 60_000)))
    url = server.url("large.tar.gz")
    tarfs.open(url, cache_size=False)
    return url


def files(url: str) -> list[tarfs.Entry]:
    with tarfs.open(url) as archive:
        return [entry for entry in archive.walk() if entry.is_file()]


def digests(url: str) -> dict[str, str]:
    """SHA-256 of all files, read one after the other."""
    paths = [entry.path for entry in files(url)]
    with tarfs.open(url, cache_size=False) as archive:
        return {path: hashlib.sha256(archive.read_range(path)).hexdigest() for path in paths}


def test_executors_read_each_byte_once(spark: SparkSession, server: Server, url: str) -> None:
    server.sent = 0
    frame = spark.read.format("tarfs").option("shards", 2).option("cache_size", "false").load(url)
    rows = frame.select("path", sha2(col("content"), 256).alias("digest")).collect()
    sent, length = server.sent, (server.directory / "large.tar.gz").stat().st_size
    assert {row["path"].replace("\ufffd", "\udce9"): row["digest"] for row in rows} == digests(url)
    # Beyond that, each task may read up to a seek distance twice.
    assert length * 0.9 < sent <= length * 1.05 + 2 * SEEK_BYTES


def test_each_shard_decodes_its_part(url: str) -> None:
    decoded = []
    for number in (1, 2):
        with tarfs.open(url, cache_size=False) as archive:
            total = archive.plan(2)[-1].packed_end
            for _ in archive.members(number, 2):
                pass
            decoded.append(archive.counters()["decoded_bytes"])
    assert total > 0 and max(decoded) < 0.6 * sum(decoded)
    assert sum(decoded) < 1.2 * sum(entry.size for entry in files(url))


def test_rows_have_the_attributes(spark: SparkSession, url: str) -> None:
    frame = spark.read.format("tarfs").load(url)
    assert frame.columns == ["path", "size", "mtime", "mode", "content"]
    row = frame.where("path = 'table.csv'").collect()[0]
    assert (row["size"], row["mode"], row["mtime"].timestamp()) == (
        len(row["content"]),
        0o100640,
        1_600_000_000,
    )


def test_path_filters_spare_the_other_members(
    spark: SparkSession, server: Server, url: str
) -> None:
    server.sent = 0
    frame = spark.read.format("tarfs").options(shards=8, cache_size="false").load(url)
    rows = frame.where(col("path").startswith("data/d1/f000")).select("path", "size").collect()
    rows += frame.where(col("path").isin("hard", "none")).collect()
    rows += frame.where((col("path") == "table.csv") & (col("size") > 5)).collect()
    assert {row["path"] for row in rows} == {"data/d1/f0001", "data/d1/f0008", "hard", "table.csv"}
    assert server.sent < 0.6 * (server.directory / "large.tar.gz").stat().st_size


def test_schema_without_content_reads_only_the_index(
    spark: SparkSession, server: Server, url: str
) -> None:
    server.sent = 0
    frame = spark.read.format("tarfs").schema("path string, size bigint").load(url)
    assert frame.count() == len(files(url))
    assert server.sent < 1 << 20


def test_materialize_writes_the_tree(spark: SparkSession, url: str, tmp_path: Path) -> None:
    written = tarfs.spark.materialize(spark, url, str(tmp_path / "out"), shards=3)
    found = {}
    for directory, _, names in os.walk(tmp_path / "out"):
        for name in names:
            path = os.path.join(directory, name)
            if not os.path.islink(path):
                data = Path(path).read_bytes()
                found[os.path.relpath(path, tmp_path / "out")] = hashlib.sha256(data).hexdigest()
    assert found == digests(url) and written > 0
    assert os.path.samefile(tmp_path / "out/hard", tmp_path / "out/data/d2/f0002")
    assert (tmp_path / "out/data").stat().st_mtime == 1_600_000_000


def test_errors_reach_the_driver(spark: SparkSession, server: Server) -> None:
    with pytest.raises(Exception, match="check how it is spelled"):
        spark.read.format("tarfs").load(server.url("none")).count()
    with pytest.raises(Exception, match="there are no columns"):
        spark.read.format("tarfs").schema("other string").load(server.url("a.tar")).count()
