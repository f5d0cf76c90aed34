"""Archives, their entries and the contents of their files."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import stat
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from operator import index
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any, ClassVar, NamedTuple, Union

from . import _native
from ._errors import Damaged, Error, InvalidArgument, IsADirectory

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


#: Options that are paths, unless they are a truth value or a URL, and their environment variables.
_PATHS = {
    "cache_dir": "TARFS_CACHE_DIR",
    "netrc": "NETRC",
    "cacert": None,
    "cert": None,
    "key": None,
    "hosts_dir": None,
    "index": None,
}


def absolute(url: StrPath, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns a location and options with absolute paths, because the process may change its directory.

    An empty path has no effect.
    """
    options = dict(options)
    with contextlib.suppress(FileNotFoundError):
        # Files in TARFS_HEADERS are relative to it.
        options.setdefault("start_dir", os.getcwd())
    for name, variable in _PATHS.items():
        value, start = options.get(name), os.environ.get(variable or "")
        if isinstance(value, (str, bytes)) and not value:
            del options[name]
            value = None
        if start and (value is None or value is True and name == "cache_dir"):
            value = start
        if isinstance(value, (str, bytes, os.PathLike)):
            path = os.fsdecode(value)
            local = _native.local_path(path)
            if local is not None and not os.path.isabs(local):
                path = os.path.join(os.getcwd(), local)
            if value is not start or path != start:
                options[name] = path
    return _native.absolute_source(os.fsdecode(url)), options


#: The share of an open archive in the limit of open files, connections included.
_FILES_OF_AN_ARCHIVE = 16


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
    """A part of an archive, as ``tarfs shard plan`` prints it."""

    number: int
    entries: int
    bytes: int
    packed_start: int
    packed_end: int


class Archive:
    """An archive or image that is indexed. :func:`tarfs.open` returns it.

    Threads may share it. Pickled, it opens the same version of the archive again where it is used, as does a forked
    process; another version is :class:`tarfs.Changed`. Options with secrets are pickled, too;
    those from the environment are not.

    A process holds as many archives open as its limit of open files allows, and opens others again when they are used.
    """

    _open_archives: ClassVar[weakref.WeakSet[Archive]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _clock: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, url: StrPath, options: dict[str, Any], version: str | None = None) -> None:
        self._url, self._options = absolute(url, options)
        self._version = version
        self._native: _native.Archive | None = None
        self._pid, self._is_closed, self._used = 0, False, 0
        self._files: weakref.WeakSet[File] = weakref.WeakSet()
        if version is None:
            self._open()

    def _open(self) -> _native.Archive:
        native = _native.Archive(self._url, self._options, self._version)
        for note in native.notes():
            warnings.warn(f"{native.info()[0]}: {note}", stacklevel=4)
        self._native, self._pid, self._version = native, os.getpid(), native.info()[1]
        with self._lock:
            self._open_archives.add(self)
            opened = [archive for archive in self._open_archives if archive._native is not None]
            excess = len(opened) - max(8, getrlimit(RLIMIT_NOFILE)[0] // _FILES_OF_AN_ARCHIVE)
            for archive in sorted(opened, key=lambda archive: archive._used)[: max(excess, 0)]:
                if archive is not self:
                    archive._native = None
        return native

    @property
    def _handle(self) -> _native.Archive:
        if self._is_closed:
            raise ValueError("the archive is closed")
        return self._opened()

    def _opened(self) -> _native.Archive:
        """Returns the native archive, also for files of a closed one."""
        self._used, native = next(self._clock), self._native
        # The threads of the archive stay in the process that opened it.
        return native if native is not None and self._pid == os.getpid() else self._open()

    @property
    def version(self) -> str:
        """Names the version of the archive's bytes: equal for equal ones, wherever they are read."""
        return self._version or ""

    def ls(self, path: StrPath = "", *, detail: bool = False) -> list[Any]:
        """Returns the paths in a directory, or with ``detail`` its entries, in archive order."""
        entries = self._entries(path, deep=False)
        return entries if detail else [entry.path for entry in entries]

    def walk(self, path: StrPath = "") -> list[Entry]:
        """Returns all entries below a directory."""
        return self._entries(path, deep=True)

    def _entries(self, path: StrPath, deep: bool) -> list[Entry]:
        return list(map(Entry._make, self._handle.entries(os.fsdecode(path), deep)))

    def stat(self, path: StrPath, *, follow_symlinks: bool = True) -> Entry:
        """Returns the entry at ``path``. Symbolic links are followed inside the archive."""
        return Entry._make(self._handle.stat(os.fsdecode(path), follow_symlinks))

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
        return _read_all(self._handle, entry.ino, start, max(end - start, 0))

    def _file(self, path: StrPath) -> Entry:
        entry = self.stat(path)
        if entry.is_dir():
            raise IsADirectory(f"{entry.path}: it is a directory")
        if not entry.is_file():
            raise Error(f"{entry.path}: it is not a regular file")
        self._handle.compare(entry.ino)
        return entry

    def plan_shards(self, count: int) -> list[Shard]:
        """Cuts the archive into ``count`` shards of about equal length, as ``tarfs shard plan`` does."""
        return [Shard(number, *rest) for number, rest in self._handle.plan_shards(count)]

    def shard_entries(self, number: int, count: int) -> list[Entry]:
        """Returns the entries of a shard, under all their names."""
        return list(map(Entry._make, self._handle.shard_entries(_number(number, count), count)))

    def shards_of(self, entries: Iterable[Entry], count: int) -> list[int]:
        """Returns the number of the shard, of ``count``, in which each entry is."""
        return self._handle.shards_of([(entry.path, entry.ino) for entry in entries], count)

    def members(
        self, number: int = 1, count: int = 1, *, only: Iterable[Entry] | None = None
    ) -> Members:
        """Reads a shard in archive order and in one pass, or those of its entries that are ``only``.

        Hard links follow their file. After :class:`tarfs.Damaged` in a content the iteration goes on with the next
        member. An entry that the archive does not have, because a published index is wrong, ends it.
        """
        names = None if only is None else [(entry.path, entry.ino) for entry in only]
        return Members(self._handle.members(_number(number, count), count, names))

    def __iter__(self) -> Members:
        return self.members()

    def write_shard(self, directory: StrPath, number: int, count: int) -> tuple[int, int]:
        """Writes shard ``number``, from 1, of ``count`` below a directory. Returns the numbers of entries and bytes."""
        return self._handle.write_shard(os.fsdecode(directory), _number(number, count), count)

    def finish_shards(self, directory: StrPath) -> None:
        """Finishes a tree that all shards have written: its hard links, and the attributes of directories.

        Then it raises :class:`tarfs.Damaged` if members are damaged or not in the tree.
        """
        self._handle.write_shard(os.fsdecode(directory), 0, 1)

    def counters(self) -> dict[str, int]:
        """Returns counters of the work done so far, as ``--stats`` prints them."""
        return dict(self._handle.info()[3])

    @property
    def problems(self) -> int:
        """Number of members that are damaged or not in the tree."""
        return self._handle.info()[2]

    def close(self) -> None:
        """Closes the archive. Files and members that are in use can be read further."""
        self._is_closed = True
        if not self._files:
            self._native = None

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Archive, (self._url, self._options, self._version)

    def __repr__(self) -> str:
        return f"<tarfs.Archive {self._native.info()[0] if self._native else '(closed)'}>"


class _Readable(io.RawIOBase):
    """A file that is only read."""

    mode = "rb"

    def readable(self) -> bool:
        """Always true."""
        self._checkClosed()
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the front of ``buffer``; nothing only at the end."""
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise TypeError("the buffer is read-only")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def write(self, _: Any) -> int:
        """Raises :class:`io.UnsupportedOperation`."""
        raise io.UnsupportedOperation("write")


class File(_Readable):
    """A regular file of an archive. It seeks, and threads may read it."""

    def __init__(self, archive: Archive, entry: Entry, position: int = 0) -> None:
        self._archive, self.entry, self.name = archive, entry, entry.path
        self._position = position
        archive._files.add(self)

    def seekable(self) -> bool:
        """Always true."""
        return self.readable()

    def tell(self) -> int:
        """Returns the offset of the next byte."""
        self._checkClosed()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the offset of the next byte."""
        self._checkClosed()
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.entry.size}
        if whence not in bases:
            raise InvalidArgument(f"{self.name}: whence is {whence} instead of 0, 1 or 2")
        position = bases[whence] + index(offset)
        if position < 0:
            raise InvalidArgument(f"{self.name}: the offset {position} is before the file")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        """Reads up to ``size`` bytes, fewer only at the end or before damage, or all that are left."""
        self._checkClosed()
        left = max(self.entry.size - self._position, 0)
        is_all = size is None or index(size) < 0
        size = left if size is None or is_all else min(index(size), left)
        native = self._archive._opened()
        read = functools.partial(_read_all, native) if is_all else native.read
        data = read(self.entry.ino, self._position, size) if size else b""
        self._position += len(data)
        return data

    readall = read

    def close(self) -> None:
        """Closes the file, and its archive if that was closed before."""
        super().close()
        archive = self._archive
        archive._files.discard(self)
        if archive._is_closed and not archive._files:
            archive._native = None

    def __reduce__(self) -> tuple[Any, ...]:
        return File, (self._archive, self.entry, self.tell())


class Members(Iterator["Member"]):
    """Members in archive order. The content of each can be read until the next one is taken."""

    def __init__(self, native: _native.Members) -> None:
        self._native: Iterator[Any] = native
        self._current: Member | None = None

    def __next__(self) -> Member:
        if self._current is not None:
            self._current._skip()
        try:
            row = next(self._native)
        except Error:
            self._native = iter(())
            raise
        self._current = Member(self._native, Entry._make(row))
        return self._current


class Member(_Readable):
    """A member, and its content as a stream without seeks."""

    def __init__(self, native: Iterator[Any], entry: Entry) -> None:
        self.entry, self.name = entry, entry.path
        self._native, self._left = native, entry.size if entry.is_file() else 0
        self._piece, self._is_over = memoryview(b""), False
        self._error: Error | None = None

    def read(self, size: int | None = -1) -> bytes:
        """Reads up to ``size`` bytes, or all that are left."""
        self._checkClosed()
        if size is None or index(size) < 0:
            piece, self._piece = self._piece, memoryview(b"")
            # Of one piece alone, this makes no copy.
            return b"".join([*([piece] if piece else []), *iter(self._next, b"")])
        if not self._piece:
            self._piece = memoryview(self._next())
        data, self._piece = bytes(self._piece[: index(size)]), self._piece[index(size) :]
        return data

    readall = read

    def _next(self) -> bytes:
        """Returns the next piece, which is empty at the end."""
        while self._error is None and not self._is_over:
            try:
                piece = next(self._native)
                if piece:
                    self._left -= len(piece)
                    return piece
                if piece is None and self._left:
                    raise Damaged(f"{self.name}: its content is not as long as its header says")
                self._is_over = piece is None
            except Error as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return b""

    def _skip(self) -> None:
        """Passes what is left of the content, which may be damaged."""
        try:
            while self._next():
                pass
        except Damaged:
            pass
        self.close()


os.register_at_fork(after_in_child=lambda: setattr(Archive, "_lock", threading.Lock()))


def _read_all(native: _native.Archive, ino: int, start: int, size: int) -> bytes:
    """Returns ``size`` bytes, or raises."""
    data = native.read(ino, start, size)
    while len(data) < size:
        data += native.read(ino, start + len(data), size - len(data))
    return data


def _number(number: int, count: int) -> int:
    if not 1 <= number <= count:
        raise InvalidArgument(f"shard {number}/{count}: shards are numbered from 1")
    return number
