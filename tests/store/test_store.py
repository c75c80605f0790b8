"""The promises of a store, on a folder and on S3 alike."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests.store.s3_server import FaultyS3
from windlass.errors import UserError
from windlass.store import Store, StoreOptions, is_store_url, open_store
from windlass.store.folder import FolderStore

MiB = 2**20
QUICK = StoreOptions(part_bytes=5 * MiB, first_delay_s=0.01, patience_s=20)


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "store"))
    request.getfixturevalue("s3")
    return open_store("s3://bucket/some/prefix", QUICK)


def file_of(folder: Path, size: int, name: str = "file") -> Path:
    path = folder / name
    unit = hashlib.sha256(str(size).encode()).digest() * 32
    path.write_bytes((unit * (size // len(unit) + 1))[:size])
    return path


@pytest.mark.parametrize("size", [0, 1, 5 * MiB, 10 * MiB + 7])
def test_there_and_back(size: int, store: Store, tmp_path: Path) -> None:
    path = file_of(tmp_path, size)
    store.put(path, "a/file", sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    found = store.stat("a/file")
    assert found is not None
    assert found.size == size
    assert store.get("a/file", tmp_path / "new" / "back").size == size
    assert (tmp_path / "new" / "back").read_bytes() == path.read_bytes()
    assert [one.name for one in (tmp_path / "new").iterdir()] == ["back"], "nothing else is left"
    assert store.unfinished() == []


def test_ranges(store: Store) -> None:
    store.write("file", b"0123456789")
    assert store.read("file") == b"0123456789"
    assert store.read("file", 3) == b"3456789"
    assert store.read("file", 3, 4) == b"3456"
    assert store.read("file", 8, 10) == b"89"
    assert store.read("file", 10, 5) == b""
    assert store.read("file", 3, 0) == b""


def test_listing(store: Store) -> None:
    names = ["a/1", "a/2", "a/b/3", "ab/4", "c"]
    for name in reversed(names):
        store.write(name, name.encode())
    assert [entry.name for entry in store.entries()] == names
    assert [entry.name for entry in store.entries("a/")] == ["a/1", "a/2", "a/b/3"]
    assert [entry.name for entry in store.entries("a")] == ["a/1", "a/2", "a/b/3", "ab/4"]
    assert store.folders() == ["a", "ab"]
    assert store.folders("a/") == ["b"]
    assert store.folders("nothing/") == []
    assert [entry.name for entry in store.below("a").entries()] == ["1", "2", "b/3"]
    assert store.below("a").below("b").read("3") == b"a/b/3"
    assert [entry.size for entry in store.entries("a/b")] == [5]


def test_what_is_not_there(store: Store, tmp_path: Path) -> None:
    assert store.stat("none") is None
    assert list(store.entries("none")) == []
    with pytest.raises(FileNotFoundError):
        store.read("none")
    with pytest.raises(FileNotFoundError):
        store.get("none", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    store.delete(["none"])


def test_a_conditional_write(store: Store) -> None:
    assert store.write("file", b"first", only_new=True) is True
    assert store.write("file", b"second", only_new=True) is False
    assert store.read("file") == b"first"
    assert store.write("file", b"third") is True
    assert store.read("file") == b"third"


@pytest.mark.parametrize("only_new", [False, True])
def test_a_write_below_a_file_is_refused(tmp_path: Path, only_new: bool) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        FolderStore(tmp_path).write("file/below", b"lost", only_new=only_new)


def test_a_file_that_changes_while_it_is_read(store: Store) -> None:
    store.write("file", b"first")
    entry = store.stat("file")
    assert entry is not None
    assert store.read("file", 0, 2, version=entry.version) == b"fi"
    store.write("file", b"other one")
    with pytest.raises(OSError, match="changed"):
        store.read("file", 0, 2, version=entry.version)


def test_deleting_many(store: Store) -> None:
    for index in range(20):
        store.write(f"folder/{index:04d}", b"x")
    store.delete(f"folder/{index:04d}" for index in range(19))
    assert [entry.name for entry in store.entries()] == ["folder/0019"]
    store.delete(["folder/0019"])
    assert store.folders() == []


@pytest.mark.parametrize(
    ("text", "store"), [("s3://b/c", True), ("/a/b", False), ("runs", False), ("https://x", False), ("gs://x", False)]
)
def test_which_names_are_stores(text: str, store: bool) -> None:
    assert is_store_url(text) is store


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://", "s3://Bad_Bucket/x", "s3:///x"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UserError) as caught:
        open_store(url)
    assert "s3://BUCKET/PREFIX" in (caught.value.fix or "")


@pytest.mark.slow
def test_more_than_a_page_of_names(s3: FaultyS3, tmp_path: Path) -> None:
    """Listing and deletion go by thousands on S3."""
    client = s3.client()
    names = [f"many/{index:05d}" for index in range(1005)]
    for name in names:
        client.put_object(Bucket="bucket", Key=name, Body=b"")
    store = open_store("s3://bucket", QUICK)
    assert [entry.name for entry in store.entries("many/")] == names
    store.delete(names)
    assert s3.keys("bucket") == []


def test_parts_carry_checksums_and_go_in_parallel(s3: FaultyS3, tmp_path: Path) -> None:
    path = file_of(tmp_path, 11 * MiB)
    open_store("s3://bucket", QUICK).put(path, "file")
    head = s3.client().head_object(Bucket="bucket", Key="file", ChecksumMode="ENABLED")
    assert head["ETag"].strip('"').endswith("-3")
    sent = [path for method, path in s3.requests if method == "PUT"]
    assert sorted(re.findall(r"partNumber=(\d)", " ".join(sent))) == list("123")
    assert [headers["x-amz-checksum-sha256"] != "" for headers in s3.headers("PUT")] == [True] * 3
