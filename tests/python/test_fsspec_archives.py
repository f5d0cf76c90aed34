"""What the archive file systems of fsspec have in common, for every format.

The tests of fsspec for its own archives are in neither its wheel nor its source distribution, so each of them has its
counterpart here. Two have none: the text of ``repr``, and ``_all_dirnames``, which is a private method of another class.
An empty archive differs on purpose: its root can be examined, as the root of any mount.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import fsspec
import pytest
from conftest import PACKERS
from fsspec.implementations.cached import WholeFileCacheFileSystem
from tarfs.fsspec import TarfsFileSystem

CONTENTS = {"a": b"", "b": b"hello", "deeply/nested/path": b"stuff"}


def write_archive(path: Path, contents: dict[str, bytes]) -> Path:
    """Write ``contents`` without members for their directories."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    path.write_bytes(PACKERS[path.name.partition(".")[2]](plain.getvalue()))
    return path


@pytest.fixture(params=PACKERS)
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_archive(tmp_path / f"archive.{request.param}", CONTENTS)


@pytest.fixture
def fs(archive: Path) -> TarfsFileSystem:
    return fsspec.filesystem("tarfs", fo=str(archive))


def test_empty_archive_has_a_root(tmp_path: Path) -> None:
    fs = fsspec.filesystem("tarfs", fo=str(write_archive(tmp_path / "empty.tar", {})))
    assert fs.find("") == fs.find("", withdirs=True) == fs.ls("") == []
    assert fs.info("")["type"] == "directory"


def test_listings_infer_directories(fs: TarfsFileSystem) -> None:
    assert fs.ls("", detail=False) == ["a", "b", "deeply"]
    assert fs.ls("deeply", detail=False) == ["deeply/nested"]
    assert fs.ls("deeply/nested", detail=False) == ["deeply/nested/path"]
    for path in ("", "deeply", "deeply/nested"):
        assert fs.ls(f"{path}/") == fs.ls(path)
    assert fs.find("") == sorted(CONTENTS)
    assert fs.find("/", withdirs=True) == sorted([*CONTENTS, "deeply", "deeply/nested"])
    assert fs.find("deeply/") == fs.find("deeply") == ["deeply/nested/path"]
    assert fs.glob("*/*/*th") == ["deeply/nested/path"]


@pytest.mark.parametrize("topdown", [True, False])
@pytest.mark.parametrize("prunes", [True, False])
def test_walk_leaves_out_what_the_caller_removes(
    fs: TarfsFileSystem, topdown: bool, prunes: bool
) -> None:
    levels = [("", ["deeply"], ["a", "b"]), ("deeply", ["nested"], []), ("deeply/nested", [], ["path"])]
    if topdown and prunes:
        levels.pop()
    walked = []
    for path, directories, files in fs.walk("", topdown=topdown):
        walked.append((path, sorted(directories), sorted(files)))
        if prunes and "nested" in directories:
            directories.remove("nested")
    assert walked == (levels if topdown else levels[::-1])


def test_contents_and_attributes(fs: TarfsFileSystem) -> None:
    with pytest.raises(FileNotFoundError):
        fs.info("none")
    for name in ("deeply", "deeply/nested"):
        info = fs.info(name)
        assert (info["name"], info["size"], info["type"]) == (name, 0, "directory")
    for name, data in CONTENTS.items():
        info = fs.info(name)
        assert (info["name"], info["size"], info["type"]) == (name, len(data), "file")
        assert {"mode", "uid", "gid", "mtime"} <= info.keys()
        assert fs.open(name).read() == fs.cat(name) == data


def test_mapping_has_the_files(fs: TarfsFileSystem) -> None:
    mapping = fs.get_mapper()
    assert dict(mapping) == CONTENTS
    assert list(mapping) == sorted(CONTENTS)


def test_copy_by_pickle_reads(fs: TarfsFileSystem) -> None:
    assert pickle.loads(pickle.dumps(fs)).cat("b") == b"hello"


@pytest.mark.parametrize("depth", [128, 512])
def test_types_of_many_levels(tmp_path: Path, depth: int) -> None:
    parents = ["/".join("ABCDEFGHIJ"[int(digit)] for digit in str(i)) for i in range(depth)]
    files = {f"{parent}/{i}": b"" for i, parent in enumerate(parents)}
    directories = {parent[:end] for parent in parents for end in range(1, len(parent) + 1, 2)}
    fs = fsspec.filesystem("tarfs", fo=str(write_archive(tmp_path / "deep.tar", files)))
    entries = files.keys() | directories
    assert {name for name in entries if fs.isdir(name)} == directories
    assert {name for name in entries if fs.isfile(name)} == files.keys()


def test_file_object_of_another_file_system(archive: Path, tmp_path: Path) -> None:
    local = fsspec.filesystem("file")
    with local.open(str(archive)) as file:
        assert fsspec.filesystem("tarfs", fo=file).cat("b") == b"hello"
    storage = tmp_path / "copies"
    cached = WholeFileCacheFileSystem(fs=local, cache_storage=str(storage))
    with cached.open(str(archive)) as file:
        assert fsspec.filesystem("tarfs", fo=file).cat("b") == b"hello"
    assert len(list(storage.iterdir())) == 2
    cached.clear_cache()
    assert list(storage.iterdir()) == []


def test_chains_of_urls(archive: Path) -> None:
    fs, path = fsspec.core.url_to_fs(f"tarfs://inner::file://{archive}")
    assert (fs.cat("b"), path) == (b"hello", "inner")
    fs, _ = fsspec.core.url_to_fs(f"tarfs://inner::simplecache::file://{archive}")
    assert fs.cat("b") == b"hello"


def test_names_with_repeated_slashes_are_found(tmp_path: Path) -> None:
    files = {"path/with/extra/slash//test.txt": b"extra", "regular/file.txt": b"regular"}
    fs = fsspec.filesystem("tarfs", fo=str(write_archive(tmp_path / "slashes.tar", files)))
    assert fs.find("/") == ["path/with/extra/slash/test.txt", "regular/file.txt"]
    assert fs.glob("path/**/*.txt") == ["path/with/extra/slash/test.txt"]
    assert fs.ls("path/with/extra/slash", detail=False) == ["path/with/extra/slash/test.txt"]
    assert fs.isdir("path/with/extra/slash")
    for path in ("path/with/extra/slash/test.txt", "path/with/extra/slash//test.txt"):
        assert fs.cat(path) == b"extra"
