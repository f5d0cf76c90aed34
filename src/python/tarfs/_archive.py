"""Archives, their entries and the contents of their files."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Union

from . import _native
from ._errors import Error, InvalidArgument, IsADirectory
from ._options import complete

StrPath = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]

_TYPES = {
    "file": stat.S_IFREG,
    "hard_link": stat.S_IFREG,
    "directory": stat.S_IFDIR,
    "symlink": stat.S_IFLNK,
    "char_device": stat.S_IFCHR,
    "block_device": stat.S_IFBLK,
    "fifo": stat.S_IFIFO,
}


class Entry(NamedTuple):
    """Attributes of an entry. Names that are not UTF-8 are as ``os.fsdecode`` returns them."""

    path: str
    kind: str
    """``file``, ``directory``, ``symlink``, ``char_device``, ``block_device`` or ``fifo``; of members also
    ``hard_link``."""
    size: int
    mtime_ns: int
    mode: int
    """Permissions, without the type."""
    uid: int
    gid: int
    user: str
    group: str
    target: str
    """Where a link leads."""
    ino: int
    """Number of the entry in the archive; names of the same file share it."""

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition("/")[2]

    @property
    def mtime(self) -> float:
        """Time of the last modification, in seconds since 1970."""
        return self.mtime_ns / 1e9

    @property
    def st_mode(self) -> int:
        """Type and permissions, as ``os.stat`` returns them."""
        return _TYPES[self.kind] | self.mode

    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.kind == "file"

    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.kind == "directory"

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return self.kind == "symlink"


class Shard(NamedTuple):
    """A part of an archive, as ``tarfs plan`` prints it."""

    number: int
    entries: int
    bytes: int
    packed_start: int
    packed_end: int


class Archive:
    """An archive or image that is indexed. :func:`tarfs.open` returns it.

    Threads may share it. Pickled, it opens the archive again where it is unpickled, as does a forked process at its
    first use. Options with secrets are pickled, too; those from the environment are not.
    """

    def __init__(self, url: StrPath, options: dict[str, Any]) -> None:
        self._url, self._options = os.fsdecode(url), options
        self._native: _native.Archive | None = self._open()

    def _open(self) -> _native.Archive:
        opened = _native.Archive(self._url, complete(self._options))
        self._pid = os.getpid()
        return opened

    @property
    def _handle(self) -> _native.Archive:
        if self._native is None:
            raise ValueError("the archive is closed")
        # The threads of the archive stay in the process that opened it.
        if self._pid != os.getpid():
            self._native = self._open()
        return self._native

    def ls(self, path: StrPath = "", *, detail: bool = False) -> list[Any]:
        """Returns the paths in a directory, or with ``detail`` its entries, in archive order."""
        entries = self._entries(path, deep=False)
        return entries if detail else [entry.path for entry in entries]

    def walk(self, path: StrPath = "") -> list[Entry]:
        """Returns all entries below a directory."""
        return self._entries(path, deep=True)

    def _entries(self, path: StrPath, deep: bool) -> list[Entry]:
        return list(map(Entry._make, self._handle.entries(_clean(path), deep)))

    def stat(self, path: StrPath, *, follow_symlinks: bool = True) -> Entry:
        """Returns the entry at ``path``. Symbolic links are followed inside the archive."""
        return Entry._make(self._handle.stat(_clean(path), follow_symlinks))

    def exists(self, path: StrPath) -> bool:
        """Whether ``path`` leads to an entry."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def open(self, path: StrPath) -> File:
        """Opens a regular file for reading, without a buffer: see :class:`io.BufferedReader`."""
        return File(self, self._file(path))

    def read_range(self, path: StrPath, start: int = 0, end: int | None = None) -> bytes:
        """Returns the bytes from ``start`` to before ``end``. Negative ones count from the end of the file."""
        entry = self._file(path)
        start, end, _ = slice(start, end).indices(entry.size)
        return self._handle.read(entry.ino, start, max(end - start, 0))

    def _file(self, path: StrPath) -> Entry:
        entry = self.stat(path)
        if entry.is_dir():
            raise IsADirectory(f"{entry.path}: it is a directory")
        if not entry.is_file():
            raise Error(f"{entry.path}: it is not a regular file")
        return entry

    def plan(self, shards: int) -> list[Shard]:
        """Cuts the archive into shards of about equal length, as ``tarfs plan`` does."""
        return [Shard(number, *rest) for number, rest in self._handle.plan(shards)]

    def shards_of(self, entries: Iterable[Entry], count: int) -> list[int]:
        """Returns the number of the shard, of ``count``, in which each entry is."""
        return self._handle.shards_of([entry.ino for entry in entries], count)

    def members(
        self, number: int = 1, count: int = 1, *, only: Iterable[Entry] | None = None
    ) -> Members:
        """Reads a shard in archive order and in one pass, or those of its entries that are ``only``.

        Hard links follow their file.
        """
        inos = None if only is None else [entry.ino for entry in only]
        return Members(self._handle.members(_number(number, count), count, inos))

    def __iter__(self) -> Members:
        return self.members()

    def materialize(self, directory: StrPath, number: int, count: int) -> tuple[int, int]:
        """Writes shard ``number``, from 1, of ``count`` below a directory. Returns the numbers of entries and bytes."""
        return self._handle.materialize(os.fsdecode(directory), _number(number, count), count)

    def finish(self, directory: StrPath) -> None:
        """Finishes a tree that all shards have written: its hard links, and the attributes of directories."""
        self._handle.materialize(os.fsdecode(directory), 0, 1)

    def counters(self) -> dict[str, int]:
        """Returns counters of the work done so far, as ``--stats`` prints them."""
        return dict(self._handle.info()[2])

    @property
    def problems(self) -> int:
        """Number of members that are damaged or not in the tree."""
        return self._handle.info()[1]

    def close(self) -> None:
        """Closes the archive, unless files or members of it are in use."""
        self._native = None

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Archive, (self._url, self._options)

    def __repr__(self) -> str:
        return f"<tarfs.Archive {self._handle.info()[0] if self._native else '(closed)'}>"


class File(io.RawIOBase):
    """A regular file of an archive. It seeks, and threads may read it."""

    def __init__(self, archive: Archive, entry: Entry) -> None:
        self._archive, self.entry, self.name = archive, entry, entry.path
        self._position = 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def tell(self) -> int:
        """Returns the offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the offset of the next byte."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.entry.size}
        position = base[whence] + offset
        if position < 0:
            raise InvalidArgument(f"{self.name}: the offset {position} is before the file")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        """Reads up to ``size`` bytes, fewer only at the end, or all that are left."""
        self._checkClosed()
        left = max(self.entry.size - self._position, 0)
        size = left if size is None or size < 0 else min(size, left)
        data = self._archive._handle.read(self.entry.ino, self._position, size) if size else b""
        self._position += len(data)
        return data

    readall = read

    def readinto(self, buffer: Any) -> int:
        """Fills ``buffer``, except at the end of the file."""
        return _fill(buffer, self.read(memoryview(buffer).nbytes))


class Members(Iterator["Member"]):
    """Members in archive order. The content of each can be read until the next one is taken."""

    def __init__(self, native: _native.Members) -> None:
        self._native = native
        self._current: Member | None = None

    def __next__(self) -> Member:
        if self._current is not None:
            self._current.close()
        for item in self._native:
            if isinstance(item, tuple):
                self._current = Member(self._native, Entry._make(item))
                return self._current
        raise StopIteration


class Member(io.RawIOBase):
    """A member, and its content as a stream without seeks."""

    def __init__(self, native: _native.Members, entry: Entry) -> None:
        self.entry, self.name = entry, entry.path
        # A content is pieces and then None.
        self._pieces: Iterator[Any] = iter(native.__next__, None)
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        """Always true."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Reads up to ``size`` bytes, or all that are left."""
        self._checkClosed()
        if size is None or size < 0:
            piece, self._piece = self._piece, memoryview(b"")
            # Of one piece alone, this makes no copy.
            return b"".join([*([piece] if piece else []), *self._pieces])
        if not self._piece:
            self._piece = memoryview(next(self._pieces, b""))
        data, self._piece = bytes(self._piece[:size]), self._piece[size:]
        return data

    readall = read

    def readinto(self, buffer: Any) -> int:
        """Fills the front of ``buffer``; nothing only at the end."""
        return _fill(buffer, self.read(memoryview(buffer).nbytes))


def _fill(buffer: Any, data: bytes) -> int:
    memoryview(buffer).cast("B")[: len(data)] = data
    return len(data)


def _clean(path: StrPath) -> str:
    return os.fsdecode(path).strip("/")


def _number(number: int, count: int) -> int:
    if not 1 <= number <= count:
        raise InvalidArgument(f"shard {number}/{count}: shards are numbered from 1")
    return number
