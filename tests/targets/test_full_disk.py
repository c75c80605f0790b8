"""A disk that fills up under a run: the end is written down all the same, and names the disk."""

import json
import os

import pytest

from tests.commands import run_forked
from tests.targets.local_runs import events

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
