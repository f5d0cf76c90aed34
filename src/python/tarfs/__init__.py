"""Reads members of remote tarballs without downloading or unpacking them first.

>>> archive = tarfs.open("https://example.com/data.tar.gz")
>>> archive.ls("tables")
['tables/a.csv', 'tables/b.csv']
>>> archive.open("tables/b.csv").read(16)

The first open of an archive indexes it, and saves the index in the cache directory. Later ones, also by the command
line or a mount, fetch only what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from . import _archive, _native
from ._archive import Archive, Entry, File, Member, Members, Shard, StrPath
from ._errors import (
    AccessDenied,
    Changed,
    Damaged,
    Error,
    InvalidArgument,
    IsADirectory,
    NotFound,
    TimedOut,
    Unreachable,
)

Headers = Union[Mapping[str, str], Callable[[], Mapping[str, str]]]

__all__ = [
    "AccessDenied",
    "Archive",
    "Changed",
    "Damaged",
    "Entry",
    "Error",
    "File",
    "InvalidArgument",
    "IsADirectory",
    "Member",
    "Members",
    "NotFound",
    "Shard",
    "TimedOut",
    "Unreachable",
    "open",
    "stream",
]


def open(
    url: StrPath,
    *,
    cache_dir: StrPath | bool | None = None,
    cache_size: int | str | bool | None = None,
    memory: int | str | None = None,
    index_memory: int | str | None = None,
    headers: Headers | None = None,
    netrc: StrPath | None = None,
    endpoint_url: str | None = None,
    mirrors: Sequence[str] | None = None,
    via: str | None = None,
    cacert: StrPath | None = None,
    cert: StrPath | None = None,
    key: StrPath | None = None,
    hosts_dir: StrPath | None = None,
    allow_insecure_redirects: bool | None = None,
    connections: int | None = None,
    timeout: float | None = None,
    retries: int | None = None,
    offline: bool | None = None,
    index: StrPath | bool | None = None,
    sha256: str | None = None,
    compression: str | None = None,
    platform: str | None = None,
    ignore_zeros: bool | None = None,
    allow_truncated: bool | None = None,
    max_entries: int | None = None,
) -> Archive:
    """Opens an archive or image at a path or URL, as ``tarfs mount`` does, and indexes it if that is needed.

    Options are named as the flags of the command line, and environment variables are used as there.

    :param cache_dir: directory of saved indexes and decoded data; ``False`` saves nothing
    :param cache_size: maximum size of decoded data on disk; ``False`` keeps none there
    :param memory: memory for buffers, decoders and cached data, such as ``"256MiB"``; at least 32 MiB
    :param index_memory: maximum memory for the index
    :param headers: headers for the host of the URL, or a function that returns them and is called again when the
        server refuses them
    :param netrc: file with passwords of servers
    :param endpoint_url: endpoint of the object store
    :param mirrors: URLs of the same bytes
    :param via: caching proxy
    :param cacert: file with certificates to trust
    :param cert: file with the client's certificate
    :param key: file with the key of ``cert``, unless it is in the same file
    :param hosts_dir: directory with ``hosts.toml`` of registries
    :param allow_insecure_redirects: whether redirects from HTTPS to HTTP are followed
    :param connections: maximum number of requests at a time, from 1 to 256
    :param timeout: timeout of a read without progress, in seconds from 1 to 86,400, also with a fraction
    :param retries: number of retries of a failed request
    :param offline: send no request
    :param index: file or URL of the index; ``False`` ignores one that is published beside the archive
    :param sha256: expected SHA-256 of the archive, or of the manifest of an image
    :param compression: format, instead of detecting it
    :param platform: platform of an image
    :param ignore_zeros: do not stop at blocks of zeros
    :param allow_truncated: read what a truncated archive has
    :param max_entries: maximum number of entries
    """
    options = {name: value for name, value in locals().items() if name != "url"}
    return Archive(url, {name: value for name, value in options.items() if value is not None})


def stream(url: StrPath, **options: Any) -> Members:
    """Reads an archive once, from front to back, and keeps no index. Takes the options of :func:`open`.

    After the last member, :class:`Damaged` is raised if members may be lost, or if ``sha256`` differs.
    """
    return Members(_native.Members.scan(*_archive.absolute(url, options)))
