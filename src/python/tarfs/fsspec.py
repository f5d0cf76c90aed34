"""A file system for fsspec: ``fsspec.open("tarfs://PATH::s3://bucket/a.tar.gz")``."""

from __future__ import annotations

import io
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any

import fsspec
from fsspec.archive import AbstractArchiveFileSystem

from . import _archive
from . import open as open_archive
from ._errors import InvalidArgument

#: Protocols of fsspec that tarfs reads itself, and what it calls them.
PROTOCOLS = {
    "": "",
    "file": "",
    "local": "",
    "http": "http",
    "https": "https",
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "oci": "oci",
}

_BUFFER_BYTES = 256 << 10
_CONCURRENT_READS = 8


class TarfsFileSystem(AbstractArchiveFileSystem):
    """The tree of an archive, for reading."""

    protocol = "tarfs"
    root_marker = ""

    def __init__(
        self,
        fo: str = "",
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Opens the archive ``fo``.

        A URL that tarfs cannot read is copied to a local file by fsspec first.

        :param fo: path or URL of the archive
        :param target_protocol: protocol of ``fo``, if that has none
        :param target_options: fsspec's options for the protocol of ``fo``: for those that tarfs reads itself only
            ``headers`` and ``endpoint_url``, because it finds credentials as the command line does
        :param options: those of :func:`tarfs.open`, and of :class:`fsspec.AbstractFileSystem`
        """
        names = {"use_listings_cache", "skip_instance_cache", "asynchronous", "loop", "batch_size"}
        super().__init__(**{name: value for name, value in options.items() if name in names})
        options = {name: value for name, value in options.items() if name not in names}
        protocol, colon, rest = fo.partition("://")
        if not colon:
            protocol, rest = target_protocol or "", fo
        target = dict(target_options or {})
        if protocol in PROTOCOLS:
            scheme = PROTOCOLS[protocol]
            self.fo = f"{scheme}://{rest}" if scheme else rest
            options = {**_known(target), **options}
        else:
            self.fo = fsspec.open_local(f"simplecache::{protocol}://{rest}", **{protocol: target})
        self.archive = open_archive(self.fo, **options)

    def _get_dirs(self) -> None:
        """Listings come from the archive's index."""

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Returns the attributes at ``path``; links are followed."""
        path = self._strip_protocol(path)
        return self._info(self.archive.stat(path, follow_symlinks=False))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Lists a directory, or one file."""
        info = self.info(path)
        infos = [info]
        if info["type"] == "directory":
            infos = list(map(self._info, self.archive.ls(info["name"], detail=True)))
        return infos if detail else [info["name"] for info in infos]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Lists all files below ``path``."""
        path = self._strip_protocol(path)
        if maxdepth is not None or self.info(path)["type"] != "directory":
            return super().find(path, maxdepth, withdirs, detail, **kwargs)
        infos = map(self._info, self.archive.walk(path))
        found = {info["name"]: info for info in infos if withdirs or info["type"] != "directory"}
        found = dict(sorted(found.items()))
        return found if detail else list(found)

    def _info(self, entry: _archive.Entry) -> dict[str, Any]:
        path, is_link = entry.path, entry.is_symlink()
        if is_link:
            try:
                entry = self.archive.stat(path)
            except FileNotFoundError:
                pass
        return {
            "name": path,
            "size": entry.size,
            "type": entry.kind if entry.kind in ("file", "directory") else "other",
            "mtime": entry.mtime,
            "mode": entry.st_mode,
            "uid": entry.uid,
            "gid": entry.gid,
            "ino": entry.ino,
            "islink": is_link,
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
        count = len(paths)
        starts = starts if isinstance(starts, Iterable) else [starts] * count
        ends = ends if isinstance(ends, Iterable) else [ends] * count

        def read(path: str, start: int | None, end: int | None) -> Any:
            try:
                return self.cat_file(path, start, end)
            except Exception as error:
                if on_error == "return":
                    return error
                raise

        with ThreadPoolExecutor(_CONCURRENT_READS) as threads:
            return list(threads.map(read, paths, starts, ends))

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BufferedReader:
        if mode != "rb":
            raise InvalidArgument(f"{path}: archives are read-only")
        file = self.archive.open(self._strip_protocol(path))
        return io.BufferedReader(file, _BUFFER_BYTES)


def _known(target: dict[str, Any]) -> dict[str, Any]:
    """Returns those of fsspec's options for a protocol that tarfs has, too."""
    given = {**target.pop("client_kwargs", {}), **target}
    found: dict[str, Any] = {
        name: given[name] for name in ("headers", "endpoint_url") if name in given
    }
    target = {name: value for name, value in target.items() if name not in found}
    target.pop("anon", None)
    if target:
        raise InvalidArgument(
            f"target_options: tarfs does not know {', '.join(sorted(target))} (it finds credentials as its command "
            "line does; options of tarfs.open are given beside target_options)"
        )
    return found
