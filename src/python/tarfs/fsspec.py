"""A file system for fsspec: ``fsspec.open("tarfs://PATH::s3://bucket/a.tar.gz")``."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any

import fsspec
from fsspec.archive import AbstractArchiveFileSystem
from fsspec.utils import tokenize

from . import _archive, _native
from . import open as open_archive
from ._errors import Damaged, InvalidArgument

#: Protocols of fsspec for paths.
_PATHS = ("", "file", "local")

#: Options of :func:`tarfs.open`.
OPTIONS = set(inspect.signature(open_archive).parameters) - {"url"}

#: Options of fsspec's file systems that look like those.
_OPTIONS_OF_FSSPEC = {"batch_size"}

_BUFFER_BYTES = 256 << 10
_CONCURRENT_READS = 8


def _remove_copy(path: str, pid: int) -> None:
    """Removes a copy that the process ``pid`` made. Its forked children read the same file."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(path)


class TarfsFileSystem(AbstractArchiveFileSystem):
    """The tree of an archive, for reading."""

    protocol = "tarfs"
    root_marker = ""
    #: As of all archives of fsspec: one that is not used any more is closed, and a new one has the current version.
    cachable = False

    def __init__(
        self,
        fo: Any = "",
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        version: str | None = None,
        **options: Any,
    ) -> None:
        """Opens the archive ``fo``.

        An archive that tarfs cannot read itself is copied to a temporary file first.

        :param fo: path or URL of the archive, or a file object with it
        :param target_protocol: protocol of ``fo``, which fsspec reads unless tarfs knows it
        :param target_options: fsspec's options for the protocol of ``fo``: for those that tarfs reads itself only
            ``headers`` and ``endpoint_url``, because it finds credentials as the command line does
        :param version: version that the archive must have
        :param options: those of :func:`tarfs.open`; options of other file systems have no effect
        """
        super().__init__(**options)
        own = _own_options(options)
        target, fo = dict(target_options or {}), os.fsdecode(fo) if _is_path(fo) else fo
        #: What keeps a local copy, if the archive is one.
        self._copy: list[Any] = []
        if isinstance(fo, str):
            scheme, colon, rest = fo.partition("://")
            scheme, rest = (scheme, rest) if colon else (target_protocol or "", fo)
            name = _own_name(scheme, rest)
            if name is not None and _own_name(target_protocol or scheme, rest) is not None:
                fo = name
                own = {**_known(target), **own}
            else:
                opened = fsspec.open(fo, protocol=target_protocol, **target)
                self._copy.append(opened)
                with opened as file:
                    fo = self._local_path(file)
        else:
            fo = self._local_path(fo)
        self.fo = fo
        self.archive = _archive.Archive(fo, own, version)

    def _local_path(self, file: Any) -> str:
        """Returns the path of a local file, or else of a copy of what is left of ``file``."""
        try:
            if os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
                return os.path.abspath(os.fsdecode(file.name))
        except (AttributeError, OSError, TypeError):
            pass
        with tempfile.NamedTemporaryFile(prefix="tarfs-", delete=False) as copy:
            # It is removed with this object.
            self._copy.append(weakref.finalize(self, _remove_copy, copy.name, os.getpid()))
            shutil.copyfileobj(file, copy, _BUFFER_BYTES)
        return copy.name

    def __reduce__(self) -> Any:
        make, (cls, args, options) = super().__reduce__()
        # Another copy of the same archive has another date.
        version = None if self._copy else self.archive.version
        return make, (cls, args, {**options, "version": version})

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        return stripped if isinstance(stripped, list) else stripped.lstrip("/")

    def _get_dirs(self) -> None:
        """Listings come from the archive's index."""

    def ukey(self, path: str) -> str:
        """Names the content at ``path``."""
        return tokenize(self._strip_protocol(path), self.archive.version)

    def exists(self, path: str, **_: Any) -> bool:
        """Whether ``path`` leads to an entry."""
        return self.archive.exists(self._strip_protocol(path))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Returns the attributes at ``path``; links are followed if they lead to something."""
        entry = self.archive.stat(self._strip_protocol(path), follow_symlinks=False)
        return self._describe(entry, "directory")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Lists a directory, or one file. In the list, a link to a directory is no directory, so that it is not walked."""
        info = self.info(path)
        infos = [info]
        if info["type"] == "directory":
            infos = list(map(self._describe, self.archive.ls(info["name"], detail=True)))
        return infos if detail else [info["name"] for info in infos]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **_: Any,
    ) -> Any:
        """Lists all files below ``path``, and with ``withdirs`` the directories."""
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        path = self._strip_protocol(path)
        try:
            top = self.info(path)
        except FileNotFoundError:
            return {} if detail else []
        found = {}
        if top["type"] != "directory" or withdirs and path:
            found[path] = top
        if top["type"] == "directory":
            depth = path.count("/") + (1 if path else 0)
            for entry in self.archive.walk(path):
                if maxdepth is not None and entry.path.count("/") >= depth + maxdepth:
                    continue
                if withdirs or not entry.is_dir():
                    found[entry.path] = self._describe(entry)
        found = dict(sorted(found.items()))
        return found if detail else list(found)

    def _describe(self, entry: _archive.Entry, link_to_directory: str = "other") -> dict[str, Any]:
        target, link = entry, {}
        if entry.is_symlink():
            link = {"destination": entry.target}
            try:
                target = self.archive.stat(entry.path)
            except (FileNotFoundError, Damaged):
                pass
        kind = target.kind if target.kind in ("file", "directory") else "other"
        return {
            "name": entry.path,
            "size": 0 if target.is_symlink() else target.size,
            "type": link_to_directory if link and kind == "directory" else kind,
            "mtime": target.mtime,
            "mode": target.st_mode,
            "uid": target.uid,
            "gid": target.gid,
            "ino": target.ino,
            "islink": bool(link),
            **link,
        }

    def modified(self, path: str) -> datetime:
        """Returns the time of the last modification."""
        return datetime.fromtimestamp(self.info(path)["mtime"], tz=timezone.utc)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Returns the bytes from ``start`` to before ``end``."""
        return self.archive.read_range(self._strip_protocol(path), start or 0, end)

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """Returns ranges of files, which are read at the same time."""
        if not isinstance(paths, list):
            raise TypeError("paths are a list")
        starts = starts if isinstance(starts, Iterable) else [starts] * len(paths)
        ends = ends if isinstance(ends, Iterable) else [ends] * len(paths)
        starts, ends = list(starts), list(ends)
        if not len(paths) == len(starts) == len(ends):
            raise ValueError("there are not as many starts and ends as paths")

        def read(path: str, start: int | None, end: int | None) -> Any:
            try:
                return self.cat_file(path, start, end)
            except Exception as error:
                if on_error == "return":
                    return error
                raise

        with ThreadPoolExecutor(_CONCURRENT_READS) as threads:
            return list(threads.map(read, paths, starts, ends))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> OpenedFile:
        if mode != "rb":
            raise InvalidArgument(f"{path}: archives are read-only")
        return OpenedFile(self, self._strip_protocol(path))


class OpenedFile(io.BufferedReader):
    """A file with the attributes of those of fsspec."""

    def __init__(self, fs: TarfsFileSystem, path: str) -> None:
        file = fs.archive.open(path)
        super().__init__(file, _BUFFER_BYTES)
        self.fs, self.path, self.size = fs, path, file.entry.size
        self.details = fs.info(path)


def _is_path(fo: Any) -> bool:
    return isinstance(fo, (os.PathLike, str, bytes)) and not hasattr(fo, "read")


def _own_name(protocol: str, name: str) -> str | None:
    """Returns what tarfs calls a file of ``protocol``, if it reads that itself."""
    return name if protocol in _PATHS else _native.own_name(f"{protocol}://{name}")


def _own_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns those of :func:`tarfs.open`; an error for one that was meant to be."""
    for name in options.keys() - OPTIONS - _OPTIONS_OF_FSSPEC:
        if meant := difflib.get_close_matches(name, OPTIONS, 1, 0.8):
            raise InvalidArgument(f"{name}: there is no such option (there is {meant[0]})")
    return {name: value for name, value in options.items() if name in OPTIONS}


def _known(target: dict[str, Any]) -> dict[str, Any]:
    """Returns those of fsspec's options for a protocol that tarfs has, too."""
    given = {**(target.pop("client_kwargs", None) or {}), **target}
    found: dict[str, Any] = {
        name: given[name] for name in ("headers", "endpoint_url") if name in given
    }
    # Without a value these change nothing. With one, tarfs would send other credentials than the caller names.
    unknown = sorted(name for name in target if name not in found and target[name])
    if unknown := [name for name in unknown if name not in _HARMLESS]:
        raise InvalidArgument(
            f"target_options: tarfs does not know {', '.join(unknown)} (it finds credentials as its command line does; "
            "options of tarfs.open are given beside target_options)"
        )
    return found


#: Options of fsspec's file systems about buffers and writing.
_HARMLESS = {
    "asynchronous",
    "auto_mkdir",
    "block_size",
    "cache_options",
    "cache_type",
    "compression",
    "default_block_size",
    "default_cache_type",
    "encoding",
    "hf",
    "loop",
    "mode",
    "protocol",
    "skip_instance_cache",
    "use_listings_cache",
}
