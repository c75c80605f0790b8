"""Records in a run folder survive being cut off anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.common.files import append_json_line, read_json_lines, write_atomically
from windlass.errors import UserError
from windlass.runfolder import RunFolder, steps_of
from windlass.spec import load_run, parse_run
from windlass.spec.compatibility import differences


@given(records=st.lists(st.dictionaries(st.text(), st.integers() | st.text()), min_size=1, max_size=5), data=st.data())
def test_a_torn_line_costs_itself_alone(
    records: list[dict[str, int | str]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    for record in records:
        append_json_line(path, record)
    last = len(json.dumps(records[-1], separators=(",", ":"))) + 1
    cut = data.draw(st.integers(2, last))
    path.write_bytes(path.read_bytes()[:-cut])
    append_json_line(path, {"after": "the crash"})
    assert list(read_json_lines(path)) == [*records[:-1], {"after": "the crash"}]


def test_not_a_number_is_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        append_json_line(tmp_path / "metrics.jsonl", {"loss": float("nan")})


def test_what_is_not_an_object_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b'1\n[]\n\xff\xfe\n{"a": 1}\n\n{"b"')
    assert list(read_json_lines(tmp_path / "lines")) == [{"a": 1}]
    assert list(read_json_lines(tmp_path / "missing")) == []


def test_the_last_word_on_a_step_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step, loss in ((1, 5.0), (2, 4.0), (2, 4.5), (3, 3.0)):
        append_json_line(folder.metrics, {"kind": "step", "step": step, "loss": loss})
    append_json_line(folder.metrics, {"kind": "validation", "step": 3, "loss": 9.0})
    assert {step: record["loss"] for step, record in steps_of(folder).items()} == {1: 5.0, 2: 4.5, 3: 3.0}


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_atomically(tmp_path / "run.yaml", "old")
    write_atomically(tmp_path / "run.yaml", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    assert (tmp_path / "run.yaml").read_text() == "new"


def test_a_run_is_found_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_RUNS", str(tmp_path / "runs"))
    run = parse_run({"name": "mine", "model": {"preset": "llama-tiny"}, "data": {}})
    folder = RunFolder.of(run)
    folder.create(run)
    assert folder.load_run() == run
    assert RunFolder.find("mine") == folder
    assert RunFolder.find(str(folder.path)) == folder
    with pytest.raises(UserError) as refused:
        RunFolder.find("yours")
    assert "mine" in (refused.value.evidence or "")


def test_the_same_run_file_from_another_folder_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "text.jsonl").write_text('{"text": "a"}\n')
    (project / "my.yaml").write_text("model: {preset: llama-tiny}\ndata: {source: text.jsonl}\n")
    folder = RunFolder(tmp_path / "runs" / "my")
    monkeypatch.chdir(project)
    folder.create(load_run("my.yaml"))
    for place in (project, tmp_path, elsewhere):
        monkeypatch.chdir(place)
        assert differences(folder.load_run(), load_run(project / "my.yaml")) == {}, place
    shutil.copytree(project, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    assert differences(folder.load_run(), load_run("my.yaml")) == {}
