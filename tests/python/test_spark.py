"""The data source for Spark, with executors of their own."""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import tarfs
import tarfs.spark
from conftest import Server, make_tar, run_filter, write_tar
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, sha2
from tarfs.spark import TarfsReader

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


# Promises: spark-cost
def test_executors_read_each_byte_once(spark: SparkSession, server: Server, url: str) -> None:
    server.sent = 0
    frame = spark.read.format("tarfs").option("shards", 2).option("cache_size", "false").load(url)
    rows = frame.select("path", sha2(col("content"), 256).alias("digest")).collect()
    sent, length = server.sent, (server.directory / "large.tar.gz").stat().st_size
    assert {row["path"].replace("\ufffd", "\udce9"): row["digest"] for row in rows} == digests(url)
    # Beyond that, each task may read up to a seek distance twice.
    assert length * 0.9 < sent <= length * 1.05 + 2 * SEEK_BYTES


# Promises: spark-cost
def test_each_shard_decodes_its_part(url: str) -> None:
    decoded = []
    for number in (1, 2):
        with tarfs.open(url, cache_size=False) as archive:
            total = archive.plan_shards(2)[-1].packed_end
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


# Promises: spark-filters
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


# Promises: spark-cost
def test_schema_without_content_reads_only_the_index(
    spark: SparkSession, server: Server, url: str
) -> None:
    server.sent = 0
    frame = spark.read.format("tarfs").schema("path string, size bigint").load(url)
    assert frame.count() == len(files(url))
    assert server.sent < 1 << 20


# Promises: spark-materialize
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


# Promises: spark-materialize
def test_materialize_without_all_members_raises(spark: SparkSession, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {"../out": b"1", "in": b"2"})
    with pytest.raises(tarfs.Damaged, match="not in the tree: 1"):
        tarfs.spark.materialize(spark, str(path), str(tmp_path / "out"), shards=1)
    assert (tmp_path / "out/in").read_bytes() == b"2"


# Promises: spark-materialize
def test_materialize_writes_below_the_directory_of_the_driver(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "a.tar", {"d/f": b"1"})
    monkeypatch.chdir(tmp_path)
    assert tarfs.spark.materialize(spark, str(path), "out", shards=2) == 1
    assert (tmp_path / "out/d/f").read_bytes() == b"1"


def read(spark: SparkSession, *paths: object, schema: str = "", **options: object) -> DataFrame:
    reader = spark.read.format("tarfs").options(**options)
    return (reader.schema(schema) if schema else reader).load([*map(str, paths)])


# Promises: spark-filters
def test_filters_compare_the_paths_that_are_shown(
    spark: SparkSession, url: str, server: Server
) -> None:
    shown, frame = "latin-\ufffd", read(spark, url, schema="path string, size bigint")
    for condition in (
        col("path") == shown,
        col("path").startswith(shown),
        col("path").endswith("-\ufffd"),
        col("path").contains("n-\ufffd"),
        col("path").isin(shown, "none"),
        (col("size") == 9) & (col("path") < "m") & (col("path") > "l"),
    ):
        assert [tuple(row) for row in frame.where(condition).collect()] == [(shown, 9)]


# Promises: spark-schema
def test_schema_has_names_without_case_and_is_checked_in_the_plan(
    spark: SparkSession, url: str
) -> None:
    frame = read(spark, url, schema="SIZE bigint, Path string")
    assert frame.columns == ["SIZE", "Path"]
    assert frame.where("path = 'empty'").collect()[0].SIZE == 0
    for schema, options, text in (
        ("size int", {}, "the column size is bigint"),
        ("other string", {}, "there are no columns other"),
        ("path string", {"shards": -1}, "there can be 1 to 65536"),
        ("path string", {"shards": 100_000}, "there can be 1 to 65536"),
        ("path string", {"mode": "LAX"}, "neither FAILFAST nor PERMISSIVE"),
    ):
        with pytest.raises(AnalysisException, match=text):
            read(spark, url, schema=schema, **options).count()


# Promises: spark-schema
def test_archives_are_a_list_or_a_pattern(spark: SparkSession, tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / f"{n}.tar.gz", {f"f{n}": b"%d" % n}) for n in range(3)]
    for frame, wanted in (
        (read(spark, *paths[:2]), {"f0": b"0", "f1": b"1"}),
        (read(spark, tmp_path / "*.tar.gz"), {f"f{n}": b"%d" % n for n in range(3)}),
    ):
        assert {row["path"]: bytes(row["content"]) for row in frame.collect()} == wanted
    with pytest.raises(Exception, match="there is no such archive"):
        read(spark, tmp_path / "none-*").count()


# Promises: spark-version
def test_task_reads_no_other_version(spark: SparkSession, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"f{n}": b"1" * 100 for n in range(40)})
    reader = TarfsReader({"path": "path", "content": "content"}, {"path": str(path), "shards": "2"})
    partitions = reader.partitions()
    write_tar(path, {f"f{n}": b"2" * 100 for n in range(40)})
    with pytest.raises(tarfs.Changed):
        list(reader.read(partitions[0]))
    # The next query has the new version, also in the same workers.
    for version in (b"2", b"3"):
        write_tar(path, {f"f{n}": version * 100 for n in range(40)})
        rows = read(spark, path, shards=2).collect()
        assert {bytes(row["content"]) for row in rows} == {version * 100} and len(rows) == 40


# Promises: spark-permissive
def test_damaged_member_is_null_or_left_out_by_option(
    spark: SparkSession, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TARFS_CACHE_DIR", spark.conf.get("spark.executorEnv.TARFS_CACHE_DIR"))
    data = {f"f{n}": os.urandom(1_500_000) for n in range(12)}
    plain = write_tar(server.directory / "broken.tar", data).read_bytes()
    parts = [gzip.compress(plain[n : n + 500_000], 1) for n in range(0, len(plain), 500_000)]
    packed, path = bytearray(b"".join(parts)), server.directory / "broken.tar.gz"
    path.write_bytes(packed)
    server.etag, url = "same", server.url(path.name)
    tarfs.open(url, cache_size=False).close()
    packed[len(packed) // 2] ^= 0xFF
    path.write_bytes(packed)
    options = {"shards": 1, "cache_size": "false"}
    with pytest.raises(Exception, match="Damaged"):
        read(spark, url, **options).collect()
    rows = read(spark, url, mode="PERMISSIVE", **options).collect()
    broken = {row["path"] for row in rows if row["content"] is None}
    assert "f6" in broken and len(broken) < 6 and len(rows) == 12
    assert all((row["error"] is None) == (row["path"] not in broken) for row in rows)
    assert all(row["path"] in broken or row["content"] == data[row["path"]] for row in rows)
    left = read(spark, url, ignoreCorruptFiles="true", **options).collect()
    assert {row["path"] for row in left} == set(data) - broken


# Promises: spark-permissive
def test_content_that_is_too_long_is_null_by_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tarfs.spark, "_MAX_CONTENT_BYTES", 10)
    path = write_tar(tmp_path / "a.tar", {"long": b"0" * 11, "short": b"0" * 10})
    columns, options = dict.fromkeys(["path", "content", "error"]), {"path": str(path)}
    columns = {name: name for name in columns}
    with pytest.raises(tarfs.InvalidArgument, match="mode=PERMISSIVE"):
        rows(TarfsReader(columns, dict(options)))
    found = rows(TarfsReader(columns, {**options, "mode": "permissive"}))
    assert [(row["path"], row["content"]) for row in found] == [("long", None), ("short", b"0" * 10)]
    assert "too many for Spark" in found[0]["error"]


def rows(reader: TarfsReader) -> list[dict[str, object]]:
    batches = chain.from_iterable(map(reader.read, reader.partitions()))
    return list(chain.from_iterable(batch.to_pylist() for batch in batches))


def test_times_beyond_those_of_python_are_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("far")
        member.pax_headers = {"mtime": "300000000000"}
        archive.addfile(member)
    reader = TarfsReader({"mtime": "mtime"}, {"path": str(tmp_path / "a.tar")})
    batches = [batch for it in reader.partitions() for batch in reader.read(it)]
    assert batches[0]["mtime"].cast("int64").to_pylist()[0] > 0


def test_number_of_shards_is_limited() -> None:
    class Huge:
        def plan_shards(self, _: int) -> list[tarfs.Shard]:
            return [tarfs.Shard(1, 1, 1, 0, 1 << 50)]

    assert tarfs.spark._default_shards(Huge()) == tarfs.spark.MAX_SHARDS


# Promises: spark-cost
def test_entries_of_all_shards_are_those_of_the_archive(url: str) -> None:
    with tarfs.open(url) as archive:
        found = [entry for number in range(1, 8) for entry in archive.shard_entries(number, 7)]
        assert sorted(found) == sorted(archive.walk())


def test_errors_reach_the_driver(spark: SparkSession, server: Server) -> None:
    with pytest.raises(Exception, match="check how it is spelled"):
        spark.read.format("tarfs").load(server.url("none")).count()
    with pytest.raises(Exception, match="there are no columns"):
        spark.read.format("tarfs").schema("other string").load(server.url("a.tar")).count()
