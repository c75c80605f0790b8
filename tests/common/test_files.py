"""Files on a disk that is full: a record is whole or not there, and a file that could not be written leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from windlass.cli.main import run_command
from windlass.common.files import append_json_line, read_json_lines, write_atomically, write_output
from windlass.errors import UserError


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filled").open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


@pytest.mark.parametrize("torn", [False, True])
def test_a_record_is_whole_or_not_there(small_disk: Callable[[int], Path], torn: bool) -> None:
    disk = small_disk(2**18)
    path = disk / "history.jsonl"
    path.write_text('{"number":0' if torn else '{"number":0}\n')
    fill(disk)
    written = 0
    with contextlib.suppress(OSError):
        while True:  # into the page that the file has already
            append_json_line(path, {"number": written + 1, "text": "word " * 23})
            written += 1
    assert written > 10
    _, *lines = path.read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == list(range(1, written + 1))
    (disk / "filled").unlink()
    append_json_line(path, {"number": written + 1})
    numbers = [record["number"] for record in read_json_lines(path)]
    assert numbers == list(range(torn, written + 2))


def test_a_file_that_cannot_be_written_leaves_nothing(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(2**18)
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(disk / "run.yaml", "x" * 10_000)
    assert [path.name for path in disk.iterdir()] == ["filled"]


@pytest.mark.parametrize("exists", [False, True])
def test_init_on_a_full_disk_leaves_what_was_there(
    small_disk: Callable[[int], Path], exists: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = small_disk(2**18)
    path = disk / "my.yaml"
    if exists:
        path.write_text("name: mine\n")
    fill(disk)
    assert run_command(["init", str(path), "--force"]) != 0
    assert "No space left" in capsys.readouterr().err
    assert (path.read_text() if exists else path.exists()) == ("name: mine\n" if exists else False)
    assert len(list(disk.iterdir())) == 1 + exists


def test_the_output_goes_through_a_pipe() -> None:
    command = [sys.executable, "-m", "windlass", "init", "/dev/stdout", "--force"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "model:" in done.stdout


def test_the_output_goes_to_a_file_that_is_a_mount_of_its_own(
    small_disk: Callable[[int], Path], tmp_path: Path
) -> None:
    small_disk(2**18)  # skips where nothing can be mounted
    path, source = tmp_path / "my.yaml", tmp_path / "source.yaml"
    path.touch()
    source.write_text("name: mine\n")
    subprocess.run(["mount", "--bind", source, path], check=True)
    try:
        write_output(path, "name: other\n")
    finally:
        subprocess.run(["umount", path], check=True)
    assert source.read_text() == "name: other\n"
    assert sorted(file.name for file in tmp_path.glob(".*")) == []


@pytest.mark.parametrize("name", ["x" * 250, "loop"])
def test_the_output_has_an_odd_name(tmp_path: Path, name: str) -> None:
    if name == "loop":
        os.symlink("loop", tmp_path / "loop")
    write_output(tmp_path / name, "text")
    assert (tmp_path / name).read_text() == "text"


def test_the_output_has_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        write_output(tmp_path / "none" / "loss.svg", b"")
