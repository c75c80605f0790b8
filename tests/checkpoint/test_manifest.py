"""What a manifest may say: it comes from pods, buckets and folders that others write to."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_checkpoint import publish
from windlass.checkpoint import CheckpointFolder, FileRecord, Manifest
from windlass.checkpoint.manifest import MANIFEST_NAME
from windlass.checkpoint.stored import StoredCheckpoints, fetch_whole
from windlass.common.files import json_digest
from windlass.errors import UserError
from windlass.store import open_store
from windlass.targets.kubernetes import checkpoints as in_cluster

EVIL = b"ssh-ed25519 AAAA attacker\n"
RECORD = FileRecord(len(EVIL), hashlib.sha256(EVIL).hexdigest())
BAD_NAMES = [
    "/etc/cron.d/x",
    "../../.bashrc",
    "..",
    ".",
    "",
    "a/../../b",
    "sub/file",
    "a\\b",
    "a\0b",
    "line\nbreak",
    "manifest.json",
    "lone \udc80 surrogate",
    "x" * 300,
]


def signed(body: dict[str, Any]) -> str:
    """The text of a manifest with the checksum that fits: whoever writes to a bucket can compute it."""
    return json.dumps({"checksum": json_digest(body), **body})


def body_with(**changes: Any) -> dict[str, Any]:
    good = {
        "format": 1,
        "step": 4,
        "tokens": 256,
        "files": {"__0_0.distcp": {"size": 3, "sha256": "0" * 64}},
        "model": {"fingerprint": "f", "config": {}},
        "order": {"seed": 0},
        "data_state": None,
        "world_size": 1,
        "created": 1.5,
        "versions": {},
    }
    return {**good, **changes}


def files_named(name: str) -> dict[str, Any]:
    return {name: {"size": RECORD.size, "sha256": RECORD.sha256}}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_file_name_that_leaves_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        Manifest.parse(signed(body_with(files=files_named(name))))


def test_one_name_twice_is_refused() -> None:
    text = signed(body_with())
    twice = text.replace('"files": {', '"files": {"__0_0.distcp": {"size": 3, "sha256": "' + "0" * 64 + '"}, ')
    with pytest.raises(ValueError, match="twice"):
        Manifest.parse(twice)
    both = {"A": {"size": 1, "sha256": "0" * 64}, "a": {"size": 1, "sha256": "1" * 64}}
    with pytest.raises(ValueError, match="twice"):
        Manifest.parse(signed(body_with(files=both)))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "4"},
        {"step": -1},
        {"step": True},
        {"step": 4.0},
        {"tokens": None},
        {"world_size": 0},
        {"created": "yesterday"},
        {"model": []},
        {"order": None},
        {"data_state": 7},
        {"versions": []},
        {"layout": "x"},
        {"files": []},
        {"files": {"a": 7}},
        {"files": {"a": {"size": -1, "sha256": "0" * 64}}},
        {"files": {"a": {"size": True, "sha256": "0" * 64}}},
        {"files": {"a": {"size": 1, "sha256": "short"}}},
        {"files": {"a": {"size": 1, "sha256": "0" * 64, "more": 1}}},
        {"files": {"a": {"size": 1}}},
        {"unknown": 1},
        {"layout": {"world_size": 2}, "world_size": 2},
        {"validation": {"best_step": "x"}},
    ],
    ids=json.dumps,
)
def test_values_of_another_type_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Manifest.parse(signed(body_with(**changes)))


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "[" * 100_000, '{"a":' * 100_000, "NaN", '{"format": 1e999}', "9" * 5000, "\ud800"]
)
def test_text_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Manifest.parse(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(key=st.sampled_from([*body_with(), "layout", "validation", "files"]), value=json_values, name=st.text())
def test_whatever_is_in_it_only_plain_names_come_through(key: str, value: Any, name: str) -> None:
    """Fuzz: any value anywhere, any text as a name, properly signed. It is refused with ValueError or harmless."""
    for body in (body_with(**{key: value}), body_with(files=files_named(name))):
        try:
            manifest = Manifest.parse(signed(body))
        except ValueError:
            continue
        assert Manifest.parse(manifest.to_json()) == manifest
        folder = Path("/somewhere/checkpoints/step-00000004")
        for one, record in manifest.files.items():
            assert (folder / one).parent == folder
            assert Path(one).name == one != MANIFEST_NAME
            assert isinstance(record.size, int)


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", "replace")))
def test_any_text(text: str) -> None:
    with pytest.raises(ValueError):
        Manifest.parse(text)


class HostilePod:
    """A pod that answers what it likes."""

    def __init__(self, rows: Any, manifest: str, names: list[str]) -> None:
        self.rows, self.manifest, self.names = rows, manifest, names

    def ask(self, task: str, *arguments: str, timeout: float = 60.0) -> Any:
        return self.rows

    def read(self, task: str, *arguments: str, timeout: float = 60.0) -> bytes:
        return self.manifest.encode()

    def stream(self, task: str, *arguments: str, to: Callable[[bytes], object], timeout: float = 300.0) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name in self.names:
                entry = tarfile.TarInfo(name)
                entry.size = len(EVIL)
                archive.addfile(entry, io.BytesIO(EVIL))
        to(buffer.getvalue())


ROW = {"step": 4, "path": "/runs/run/checkpoints/step-00000004", "bytes": 1, "complete": True}


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("outside", ["absolute", "relative"])
def test_a_pod_cannot_write_outside_the_folder(outside: str, tmp_path: Path) -> None:
    name = str(tmp_path / "home/.bashrc") if outside == "absolute" else "../../../home/.bashrc"
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.bashrc").write_text("original")
    to = tmp_path / "runs/run/checkpoints"
    to.mkdir(parents=True)
    pod = HostilePod([ROW], signed(body_with(files=files_named(name))), [name])
    before = tree(tmp_path)
    with pytest.raises(UserError, match="manifest of step 4 is damaged"):
        in_cluster.fetch(pod, "run", None, to)  # type: ignore[arg-type]
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "row",
    [
        {**ROW, "step": "../../x"},
        {**ROW, "step": -3},
        {**ROW, "step": True},
        {**ROW, "path": 7},
        {"complete": True},
        "nonsense",
        None,
    ],
    ids=str,
)
def test_rows_of_a_pod_are_checked(row: Any, tmp_path: Path) -> None:
    pod = HostilePod([row], signed(body_with()), [])
    with pytest.raises(UserError, match="not understood"):
        in_cluster.fetch(pod, "run", None, tmp_path)  # type: ignore[arg-type]


def test_a_pod_that_sends_another_step(tmp_path: Path) -> None:
    pod = HostilePod([{**ROW, "step": 99}], signed(body_with(files=files_named("__0_0.distcp"))), ["__0_0.distcp"])
    with pytest.raises(UserError, match="step 99") as caught:
        in_cluster.fetch(pod, "run", None, tmp_path)  # type: ignore[arg-type]
    assert "it is of step 4" in (caught.value.evidence or "")
    assert CheckpointFolder(tmp_path).all() == []


def test_a_pod_with_a_good_checkpoint(tmp_path: Path) -> None:
    pod = HostilePod([ROW], signed(body_with(files=files_named("__0_0.distcp"))), ["__0_0.distcp"])
    here = in_cluster.fetch(pod, "run", None, tmp_path)  # type: ignore[arg-type]
    assert list(here.damages()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"], "nothing else is left"


def test_a_store_cannot_write_outside_the_folder(tmp_path: Path) -> None:
    stored = StoredCheckpoints.of_run(open_store(str(tmp_path / "store")), "run", "abc")
    name = "../../home/.bashrc"
    stored.store.write("step-00000004/manifest.json", signed(body_with(files=files_named(name))).encode())
    stored.store.write("step-00000004/x", EVIL)
    (tmp_path / "store/run/home").mkdir()
    (tmp_path / "store/run/home/.bashrc").write_bytes(EVIL)
    with pytest.raises(UserError, match="is damaged") as caught:
        fetch_whole(stored, 4, CheckpointFolder(tmp_path / "run/checkpoints"))
    assert "file name" in (caught.value.evidence or "")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("where", ["folder", "store"])
def test_a_renamed_checkpoint_is_damaged_and_not_newer(where: str, tmp_path: Path) -> None:
    five = publish(tmp_path / "checkpoints", 5)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    if where == "folder":
        five.path.rename(folder.at(99).path)
        (found,) = folder.at(99).damages()
        assert (found.file, "it is of step 5" in found.reason) == (MANIFEST_NAME, True)
    else:
        stored = StoredCheckpoints.of_run(open_store(str(tmp_path / "store")), "run", "abc")
        for path in five.path.iterdir():
            stored.store.put(path, f"step-00000099/{path.name}")
        with pytest.raises(ValueError, match="it is of step 5"):
            stored.manifest(99)
