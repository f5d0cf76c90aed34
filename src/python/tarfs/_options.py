"""Options of ``tarfs.open``: completes them from the environment as the command line does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Union

from ._errors import InvalidArgument

Headers = Union[Mapping[str, str], Callable[[], Mapping[str, str]]]

_SIZE = re.compile(r"([0-9.]+) *([kmgt]?)(i?b)?", re.IGNORECASE)


def complete(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``options`` as the native module takes them, with the defaults of the environment."""
    done = {name: value for name, value in options.items() if value is not None}
    for name in ("cache_dir", "cache_size"):
        if done.get(name) is True:
            del done[name]
    done.setdefault("cache_dir", _cache_dir())
    if done["cache_dir"] is False:
        del done["cache_dir"]
    if size := os.environ.get("TARFS_CACHE_SIZE"):
        done.setdefault("cache_size", size)
    for name in ("memory", "index_memory", "cache_size"):
        if done.get(name) not in (None, False):
            done[name] = size_in_bytes(name, done[name])
    if done.get("cache_size") is not False and "cache_dir" not in done:
        done["cache_size"] = False
    if "cacert" in done:
        done["cacert"] = _pem("cacert", done["cacert"])
    if key := done.pop("key", done.get("cert")):
        done["cert"] = _pem("cert", done["cert"]), _pem("key", key)
    return done


def size_in_bytes(name: str, size: int | str) -> int:
    """Returns a size such as ``4096``, ``"64K"``, ``"8MiB"`` or ``"1.5GB"`` in bytes."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    if match := _SIZE.fullmatch(str(size).strip()):
        number, unit, suffix = match.groups(default="")
        base = 1000 if unit and suffix.lower() == "b" else 1024
        try:
            return int(float(number) * base ** "_kmgt".index(unit.lower() or "_"))
        except ValueError:
            pass
    raise InvalidArgument(f"{name}: {size!r} is not a size like 4096, 64K, 8MiB or 1.5GB")


def _cache_dir() -> str | bool:
    """The directory that the command line uses; ``False`` without one."""
    if directory := os.environ.get("TARFS_CACHE_DIR"):
        return directory
    if os.path.isabs(directory := os.environ.get("XDG_CACHE_HOME", "")):
        return os.path.join(directory, "tarfs")
    if directory := os.environ.get("HOME"):
        return os.path.join(directory, ".cache/tarfs")
    return "/var/cache/tarfs" if os.geteuid() == 0 else False


def _pem(name: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{name}: {error}") from error
