"""A data source for PySpark 4: ``spark.read.format("tarfs").load(url)``, and archives written by many machines."""

from __future__ import annotations

import fnmatch
import glob
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator
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
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)
from pyspark.sql.types import StructType

from . import _native
from . import open as open_archive
from ._archive import Archive, Entry, absolute
from ._errors import Damaged, InvalidArgument

#: Packed bytes of an archive for each of its shards, unless the option ``shards`` gives their number.
SHARD_BYTES = 32 << 20

#: Maximum number of shards of an archive.
MAX_SHARDS = _native.MAX_SHARDS

#: Bytes of contents, and number of rows, of a batch.
_BATCH_BYTES, _BATCH_ROWS = 16 << 20, 4096

#: Maximum length of a content, so that a row with it fits into an array of Java.
_MAX_CONTENT_BYTES = (1 << 31) - (1 << 20)

_BOOLEANS = {"true": True, "false": False}
_NUMBERS = {"connections": int, "retries": int, "max_entries": int, "timeout": float}

#: Columns with their types, of Spark and of Arrow. ``error`` is one only in the mode PERMISSIVE.
_COLUMNS = {
    "path": ("string", pa.string()),
    "size": ("bigint", pa.int64()),
    "mtime": ("timestamp", pa.timestamp("us", tz="UTC")),
    "mode": ("int", pa.int32()),
    "content": ("binary", pa.binary()),
    "error": ("string", pa.string()),
}

_EQUALS: dict[type, Callable[[Any, Any], bool]] = {
    EqualTo: operator.eq,
    In: lambda value, values: value in values,
}

#: Filters that give what Spark gives. It compares text by bytes, so that ``<`` of paths is not among them.
_FILTERS: dict[str, dict[type, Callable[[Any, Any], bool]]] = {
    "path": {
        **_EQUALS,
        StringStartsWith: str.startswith,
        StringEndsWith: str.endswith,
        StringContains: operator.contains,
    },
    "size": {
        **_EQUALS,
        GreaterThan: operator.gt,
        GreaterThanOrEqual: operator.ge,
        LessThan: operator.lt,
        LessThanOrEqual: operator.le,
    },
}


def register(spark: SparkSession) -> None:
    """Registers the format ``tarfs``, and lets Spark push filters down to it."""
    spark.dataSource.register(TarfsDataSource)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def materialize(
    spark: SparkSession, url: str, directory: str, *, shards: int | None = None, **options: Any
) -> int:
    """Writes an archive below a directory that all executors share. Returns the number of bytes.

    A relative ``directory`` is below the current directory of this process.
    Each task writes one shard. Then this process finishes the tree. A task that Spark repeats writes the same.
    At its end it raises :class:`tarfs.Damaged` if members are damaged or not in the tree.
    """
    directory = os.path.join(os.getcwd(), directory)
    os.makedirs(directory, exist_ok=True)
    archive = open_archive(url, **options)
    count = shards or _default_shards(archive)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in chain.from_iterable(batch["id"].to_pylist() for batch in batches):
            written = archive.write_shard(directory, number, count)
            yield pa.RecordBatch.from_pydict({"bytes": [written[1]]})

    numbers = spark.range(1, count + 1, 1, count)
    rows = numbers.mapInArrow(write, "bytes bigint").collect()
    archive.finish_shards(directory)
    return sum(row["bytes"] for row in rows)


class TarfsDataSource(DataSource):
    """Regular files of archives as rows, one shard a task.

    Options, beside those of :func:`tarfs.open` with plain values: ``path`` or the argument of ``load``, which may be a
    list or have wildcards, ``shards`` of each archive, ``mode`` and ``ignoreCorruptFiles``. In the mode ``PERMISSIVE`` a
    content that is damaged, or too long for Spark, is NULL, and the column ``error`` says why; otherwise it ends the
    query. With ``ignoreCorruptFiles`` it has no row, nor has an archive that cannot be opened because of damage.
    """

    @classmethod
    def name(cls) -> str:
        """The format."""
        return "tarfs"

    def schema(self) -> str:
        """A schema of the user may leave columns out. Without ``content`` no content is read."""
        columns = [f"{name} {kind}" for name, (kind, _) in _COLUMNS.items()]
        return ", ".join(columns if _is_permissive(dict(self.options)) else columns[:-1])

    def reader(self, schema: StructType) -> TarfsReader:
        """Returns the reader."""
        columns = {field.name: field.name.lower() for field in schema.fields}
        unknown = sorted(name for name, known in columns.items() if known not in _COLUMNS)
        if unknown:
            raise InvalidArgument(f"there are no columns {', '.join(unknown)}")
        for field in schema.fields:
            kind, _ = _COLUMNS[field.name.lower()]
            if field.dataType.simpleString() != kind:
                raise InvalidArgument(f"the column {field.name} is {kind}")
        return TarfsReader(columns, dict(self.options))


class TarfsReader(DataSourceReader):
    """Reads shards."""

    def __init__(self, columns: dict[str, str], options: dict[str, str]) -> None:
        self.columns = columns
        self.filters: list[Any] = []
        self.is_permissive = _is_permissive(options)
        self.ignores_corrupt = options.pop("ignorecorruptfiles", "false").lower() == "true"
        shards, path = options.pop("shards", None), options.pop("path", None)
        options.pop("mode", None)
        self.patterns = [path] if path else json.loads(options.pop("paths", "[]"))
        if not self.patterns:
            raise InvalidArgument("there is no path (name it in load)")
        self.shards = int(shards) if shards else None
        if self.shards is not None and not 1 <= self.shards <= MAX_SHARDS:
            raise InvalidArgument(f"{shards} shards: there can be 1 to {MAX_SHARDS}")
        self.options = tuple(sorted((name, _value(name, text)) for name, text in options.items()))

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Keeps the filters of path and size, and returns the others to Spark."""
        for filter in filters:
            names = [name.lower() for name in getattr(filter, "attribute", ())]
            if len(names) == 1 and type(filter) in _FILTERS.get(names[0], ()):
                self.filters.append((names[0], type(filter), filter.value))
            else:
                yield filter

    def partitions(self) -> list[InputPartition]:
        """Cuts each archive into shards, and leaves those out that the filters exclude.

        A partition names the version, so that no task reads another one.
        """
        partitions = []
        for url in chain.from_iterable(_expand(it, dict(self.options)) for it in self.patterns):
            try:
                archive = open_archive(url, **dict(self.options))
            except Damaged:
                if self.ignores_corrupt:
                    continue
                raise
            count = self.shards or _default_shards(archive)
            numbers: Iterable[int] = range(1, count + 1)
            if self.filters:
                wanted = filter(self._is_wanted, archive.walk())
                numbers = sorted(set(archive.shards_of(wanted, count)))
            version = archive.version
            partitions += [InputPartition((url, version, number, count)) for number in numbers]
        # Spark asks for at least one.
        return partitions or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Reads one shard in one pass."""
        batch: list[tuple[Entry, bytes | None, str | None]] = []
        size = 0
        for row in self._rows(*partition.value) if partition.value else ():
            length = len(row[1] or b"")
            if batch and (size + length > _BATCH_BYTES or len(batch) >= _BATCH_ROWS):
                yield self._batch(batch)
                batch, size = [], 0
            batch.append(row)
            size += length
        yield self._batch(batch)

    def _rows(
        self, url: str, version: str, number: int, count: int
    ) -> Iterator[tuple[Entry, bytes | None, str | None]]:
        """The wanted files of a shard, with their contents or what is wrong with them, if these are wanted."""
        archive = _opened(url, self.options, version)
        if "content" not in self.columns.values():
            for entry in filter(self._is_wanted, archive.shard_entries(number, count)):
                yield entry, None, None
            return
        only = None
        if self.filters:
            only = list(filter(self._is_wanted, archive.shard_entries(number, count)))
        for member in archive.members(number, count, only=only):
            entry = member.entry
            if entry.is_file():
                file, (content, error) = entry, self._content(member)
            elif entry.kind == "hard_link":
                # It follows its file.
                entry = file._replace(path=entry.path)
            else:
                continue
            if self._is_wanted(entry) and not (error and self.ignores_corrupt):
                yield entry, content, error

    def _content(self, member: Any) -> tuple[bytes | None, str | None]:
        try:
            if member.entry.size > _MAX_CONTENT_BYTES:
                raise InvalidArgument(
                    f"{member.name}: {member.entry.size} bytes are too many for Spark (use the option mode=PERMISSIVE, "
                    "a filter or a schema without content)"
                )
            return member.read(), None
        except (Damaged, InvalidArgument) as error:
            if self.is_permissive or self.ignores_corrupt:
                return None, str(error)
            raise

    def _is_wanted(self, entry: Entry) -> bool:
        values = {"path": _shown(entry.path), "size": entry.size}
        return entry.is_file() and all(
            _FILTERS[name][kind](values[name], value) for name, kind, value in self.filters
        )

    def _batch(self, rows: list[tuple[Entry, bytes | None, str | None]]) -> pa.RecordBatch:
        of: dict[str, Callable[[Entry, bytes | None, str | None], Any]] = {
            "path": lambda entry, *_: _shown(entry.path),
            "size": lambda entry, *_: entry.size,
            "mtime": lambda entry, *_: entry.mtime_ns // 1000,
            "mode": lambda entry, *_: entry.st_mode,
            "content": lambda _, content, error: content,
            "error": lambda _, content, error: error,
        }
        columns = {
            name: pa.array([of[known](*row) for row in rows], _COLUMNS[known][1])
            for name, known in self.columns.items()
        }
        return pa.RecordBatch.from_pydict(columns)


def _shown(path: str) -> str:
    """A path as Spark shows it, which has only text."""
    return os.fsencode(path).decode(errors="replace")


def _expand(pattern: str, options: dict[str, Any]) -> list[str]:
    """Returns the archives that ``pattern`` names: files, or objects of a store."""
    head, _, _ = pattern.partition("*")
    if head == pattern or pattern.startswith(("http://", "https://")):
        return [pattern]
    path = _native.local_path(pattern)
    if path is None:
        place = head[: head.rindex("/") + 1]
        parts = pattern[len(place) :].split("/")
        listed = _native.list_archives(*absolute(place, options))
        names = [name.split("/") for name in listed]
        found = [
            place + "/".join(name)
            for name in names
            if len(name) == len(parts) and all(map(fnmatch.fnmatchcase, name, parts))
        ]
    else:
        found = glob.glob(os.fspath(path))
    if not found:
        raise InvalidArgument(f"{pattern}: there is no such archive")
    return sorted(found)


@lru_cache(maxsize=4)
def _opened(url: str, options: tuple[tuple[str, Any], ...], version: str) -> Archive:
    """Tasks of the same process share an archive."""
    return Archive(url, dict(options), version)


def _value(name: str, text: str) -> Any:
    if name in _NUMBERS:
        return _NUMBERS[name](text)
    return _BOOLEANS.get(text.lower(), text)


def _is_permissive(options: dict[str, str]) -> bool:
    mode = options.get("mode", "FAILFAST").upper()
    if mode not in ("FAILFAST", "PERMISSIVE"):
        raise InvalidArgument(f"mode: {mode} is neither FAILFAST nor PERMISSIVE")
    return mode == "PERMISSIVE"


def _default_shards(archive: Archive) -> int:
    return min(max(1, archive.plan_shards(1)[0].packed_end // SHARD_BYTES), MAX_SHARDS)
