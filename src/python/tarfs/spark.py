"""A data source for PySpark 4: ``spark.read.format("tarfs").load(url)``, and archives written by many machines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from functools import lru_cache
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    In,
    InputPartition,
    StringStartsWith,
)
from pyspark.sql.types import StructType

from . import open as open_archive
from ._archive import Archive, Entry
from ._errors import InvalidArgument

#: Packed bytes of a shard, unless the option ``shards`` gives their number.
SHARD_BYTES = 32 << 20

#: Bytes of contents, and number of rows, of a batch.
_BATCH_BYTES, _BATCH_ROWS = 16 << 20, 4096

#: Maximum length of a binary value of Spark.
_MAX_CONTENT_BYTES = (1 << 31) - 1

_BOOLEANS = {"true": True, "false": False}
_NUMBERS = {"connections": int, "retries": int, "max_entries": int, "timeout": float}

_TYPES = {
    "path": pa.string(),
    "size": pa.int64(),
    "mtime": pa.timestamp("us", tz="UTC"),
    "mode": pa.int32(),
    "content": pa.binary(),
}


def register(spark: SparkSession) -> None:
    """Registers the format ``tarfs``, and lets Spark push filters down to it."""
    spark.dataSource.register(TarfsDataSource)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def materialize(
    spark: SparkSession, url: str, directory: str, *, shards: int | None = None, **options: Any
) -> int:
    """Writes an archive below a directory that all executors share. Returns the number of bytes.

    Each task writes one shard. Then this process finishes the tree. A task that Spark repeats writes the same.
    """
    os.makedirs(directory, exist_ok=True)
    archive = open_archive(url, **options)
    count = shards or _default_shards(archive)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in chain.from_iterable(batch["id"].to_pylist() for batch in batches):
            written = archive.materialize(directory, number, count)
            yield pa.RecordBatch.from_pydict({"bytes": [written[1]]})

    numbers = spark.range(1, count + 1, 1, count)
    rows = numbers.mapInArrow(write, "bytes bigint").collect()
    archive.finish(directory)
    return sum(row["bytes"] for row in rows)


class TarfsDataSource(DataSource):
    """Regular files of an archive as rows, one shard a task.

    Options: ``path`` or the argument of ``load``, ``shards``, and those of :func:`tarfs.open` with plain values.
    """

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "tarfs"

    def schema(self) -> str:
        """A schema of the user may leave columns out. Without ``content`` no content is read."""
        return "path string, size bigint, mtime timestamp, mode int, content binary"

    def reader(self, schema: StructType) -> TarfsReader:
        """Returns the reader."""
        unknown = set(schema.fieldNames()) - set(_TYPES)
        if unknown:
            raise InvalidArgument(f"there are no columns {', '.join(sorted(unknown))}")
        return TarfsReader(schema.fieldNames(), dict(self.options))


class TarfsReader(DataSourceReader):
    """Reads shards."""

    def __init__(self, columns: list[str], options: dict[str, str]) -> None:
        self.columns = columns
        self.filters: list[Any] = []
        shards, self.url = options.pop("shards", None), options.pop("path", None)
        if self.url is None:
            raise InvalidArgument("there is no path (name it in load)")
        self.shards = int(shards) if shards else None
        self.options = tuple(sorted((name, _value(name, text)) for name, text in options.items()))

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Keeps the filters of the path, and returns the others to Spark."""
        for filter in filters:
            if isinstance(filter, (EqualTo, In, StringStartsWith)) and filter.attribute == (
                "path",
            ):
                self.filters.append(filter)
            else:
                yield filter

    def partitions(self) -> list[InputPartition]:
        """Cuts the archive into shards, and leaves those out that the filters exclude."""
        archive = _opened(self.url, self.options)
        count = self.shards or _default_shards(archive)
        numbers: Iterable[int] = range(1, count + 1)
        if self.filters:
            numbers = sorted(set(archive.shards_of(self._wanted(archive), count)))
        # Spark asks for at least one.
        return [InputPartition((number, count)) for number in numbers] or [
            InputPartition((1, count))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Reads one shard in one pass."""
        archive = _opened(self.url, self.options)
        batch, size = [], 0
        for entry, content in self._rows(archive, *partition.value):
            batch.append((entry, content))
            size += len(content)
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_ROWS:
                yield self._batch(batch)
                batch, size = [], 0
        yield self._batch(batch)

    def _rows(self, archive: Archive, number: int, count: int) -> Iterator[tuple[Entry, bytes]]:
        """The wanted files of a shard, with their contents if these are wanted."""
        files = self._wanted(archive)
        shards = zip(files, archive.shards_of(files, count))
        wanted = {entry.path: entry for entry, shard in shards if shard == number}
        if "content" not in self.columns:
            yield from ((entry, b"") for entry in wanted.values())
            return
        content = b""
        for member in archive.members(number, count, only=wanted.values()):
            entry = member.entry
            if entry.is_file():
                if entry.size > _MAX_CONTENT_BYTES:
                    raise InvalidArgument(
                        f"{entry.path}: {entry.size} bytes are too many for Spark"
                    )
                content = member.read()
            # A hard link follows its file.
            if member.name in wanted and entry.kind in ("file", "hard_link"):
                yield wanted[member.name], content

    def _wanted(self, archive: Archive) -> list[Entry]:
        return [entry for entry in archive.walk() if entry.is_file() and self._matches(entry)]

    def _matches(self, entry: Entry) -> bool:
        return all(_matches(filter, entry.path) for filter in self.filters)

    def _batch(self, rows: list[tuple[Entry, bytes]]) -> pa.RecordBatch:
        of: dict[str, Callable[[Entry, bytes], Any]] = {
            "path": lambda entry, _: os.fsencode(entry.path).decode(errors="replace"),
            "size": lambda entry, _: entry.size,
            "mtime": lambda entry, _: datetime.fromtimestamp(entry.mtime, tz=timezone.utc),
            "mode": lambda entry, _: entry.st_mode,
            "content": lambda _, content: content,
        }
        columns = {
            name: pa.array([of[name](*row) for row in rows], _TYPES[name]) for name in self.columns
        }
        return pa.RecordBatch.from_pydict(columns)


def _matches(filter: Filter, path: str) -> bool:
    if isinstance(filter, EqualTo):
        return path == filter.value
    if isinstance(filter, In):
        return path in filter.value
    return isinstance(filter, StringStartsWith) and path.startswith(filter.value)


@lru_cache(maxsize=4)
def _opened(url: str, options: tuple[tuple[str, Any], ...]) -> Archive:
    """Tasks of the same process share an archive."""
    return open_archive(url, **dict(options))


def _value(name: str, text: str) -> Any:
    if name in _NUMBERS:
        return _NUMBERS[name](text)
    return _BOOLEANS.get(text.lower(), text)


def _default_shards(archive: Archive) -> int:
    return max(1, archive.plan(1)[0].packed_end // SHARD_BYTES)
