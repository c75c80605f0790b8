"""A disk that fills up under a run: the end is written down all the same, and names the disk."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from tests.commands import run_forked
from tests.targets.local_runs import events
from windlass.runfolder import RunFolder
from windlass.targets.local.render import LocalRequest
from windlass.targets.local.supervisor import REQUEST_FILE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("torchrun", [False, True])
def test_the_end_names_the_disk(small_disk, request, make_run, in_tmp, monkeypatch, torchrun):
    runs = small_disk(2**20) / "runs"
    monkeypatch.setenv("WINDLASS_RUNS", str(runs))
    local = request.getfixturevalue("local" if torchrun else "alone")
    job = local.submit(make_run(), fill_disk=[0, 7])
    status = local.wait(job)
    assert status.state == "failed"
    assert f"the disk of {job.folder.path} is full" in status.reason
    lines = job.folder.history.read_text().splitlines()
    assert [record["event"] for record in map(json.loads, lines)][-2:] == ["gave-up", "exit"]
    assert events(job, "gave-up")[0]["class"] == "disk_full"
    assert len(events(job, "launched")) == 1, "another attempt would meet the same disk"
    assert not list(job.folder.path.rglob("*.tmp"))
    (job.folder.path / "filled").unlink()  # also when there is room again
    done = run_forked(("why", "r", "--json"), cwd=in_tmp, env=os.environ, timeout=120)
    why = json.loads(done.stdout)
    assert why["class"] == "disk_full"
    assert "full" in why["evidence"][0]["line"] or "No space left" in why["evidence"][0]["line"]


def test_a_disk_with_room_for_records_alone_is_enough_for_a_supervisor(small_disk, make_run):
    disk = small_disk(2**20)
    folder = RunFolder(disk / "r")
    folder.create(make_run())
    request = LocalRequest(argv=(sys.executable, "-c", ""), folder=folder.path, working_directory=disk)
    (folder.path / REQUEST_FILE).write_text(json.dumps(request.as_dict()))
    with (disk / "filled").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        file.truncate(file.tell() - 3 * 4096)
    lock = os.open(folder.path / ".lock", os.O_CREAT | os.O_RDWR)
    ready, says_ready = os.pipe()
    words = [sys.executable, "-m", "windlass.targets.local.supervisor", folder.path, str(lock), str(says_ready)]
    done = subprocess.run(words, pass_fds=(lock, says_ready), capture_output=True, text=True, check=False)
    for handle in (lock, says_ready, ready):
        os.close(handle)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["event"] for line in folder.history.read_text().splitlines()] == ["launched", "exit"]
