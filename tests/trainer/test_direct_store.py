"""Checkpoints straight to a store and back: no disk, any layout, each byte once, and what is cut off or damaged."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.campaign import campaign
from tests.store.s3_server import Fault, FaultyS3
from tests.targets.test_oom import memory_limited
from tests.trainer.state_ranks import StateRanks, on_a_node_of_its_own
from windlass.checkpoint.manifest import BLOCK_BYTES
from windlass.checkpoint.stored import StoredCheckpoints, current_id
from windlass.common.files import read_json_lines
from windlass.store import StoreOptions, open_store

pytestmark = pytest.mark.train

# The first and the second are longer than a block, and than a part of an upload; the others are small.
SHAPES = {"embedding": (5000, 1024), "experts": (4, 1200, 1024), "norm": (7,), "matrix": (300, 200), "step": ()}
BYTES = 4 * (5000 * 1024 + 4 * 1200 * 1024 + 7 + 300 * 200 + 1)


def state_ranks(s3: FaultyS3, tmp_path: Path) -> StateRanks:
    return StateRanks(tmp_path, SHAPES, "s3://bucket/runs", environment=s3.environment)


def stored(s3: FaultyS3) -> StoredCheckpoints:
    """Past the proxy."""
    store = open_store("s3://bucket/runs", StoreOptions(endpoint=s3.server))
    run_id = current_id(store, "run")
    assert run_id is not None
    return StoredCheckpoints.of_run(store, "run", run_id)


def steps(s3: FaultyS3) -> list[tuple[int, bool]]:
    return [(checkpoint.step, checkpoint.complete) for checkpoint in stored(s3).all()]


def bytes_of_tensors(s3: FaultyS3) -> int:
    """How many bytes of tensors were asked for since the last time."""
    ranges = [headers["range"] for method, path, headers in s3.received() if method == "GET" and ".distcp" in path]
    parts = [re.fullmatch(r"bytes=(\d+)-(\d+)", text) for text in ranges]
    return sum(int(part[2]) - int(part[1]) + 1 for part in parts if part)


def test_any_layout_reads_what_another_wrote_and_each_byte_once(s3: FaultyS3, tmp_path: Path) -> None:
    ranks = state_ranks(s3, tmp_path)
    saved = ranks.run("save", ranks=4, layout="tensor × shard")
    assert max(rank["disk"] for rank in saved) < 10_000, "nothing is staged on a disk"
    assert stored(s3).store.unfinished() == []
    size = sum(record.size for name, record in stored(s3).manifest(1).files.items() if name != ".metadata")
    assert BYTES < size < 1.01 * BYTES, "each value is written once"
    for layout, number in (("shard", 4), ("replicate", 2), ("shard", 1)):
        bytes_of_tensors(s3)
        found = ranks.run("load", ranks=number, layout=layout)
        assert [(rank["step"], rank["wrong"]) for rank in found] == [(1, [])] * number, layout
        assert bytes_of_tensors(s3) == size, "ranks of one node read every byte once, whatever each of them needs"


def test_a_node_reads_only_what_its_ranks_need(s3: FaultyS3, tmp_path: Path) -> None:
    ranks = StateRanks(tmp_path, {"matrix": (16384, 1024)}, "s3://bucket/runs", environment=s3.environment)
    ranks.run("save", ranks=1)
    size = stored(s3).manifest(1).files["__0_0.distcp"].size
    assert size > 4 * BLOCK_BYTES
    bytes_of_tensors(s3)
    ranks.prelude = on_a_node_of_its_own
    assert [rank["wrong"] for rank in ranks.run("load", ranks=3)] == [[], [], []]
    assert bytes_of_tensors(s3) == size + 2 * BLOCK_BYTES, "two blocks lie on a border between nodes"


def test_kill_in_the_middle_of_an_upload(s3: FaultyS3, tmp_path: Path) -> None:
    """Step 1 stays; of step 2 nothing counts, and the next attempt takes away what it left."""
    ranks = state_ranks(s3, tmp_path)
    ranks.run("save", ranks=2)
    s3.inject(slow := Fault("latency", method="PUT", path="step-00000002.*partNumber=1", times=10, seconds=1.0))
    job = ranks.start("save", ranks=2, step=2)
    deadline = time.monotonic() + 100
    while slow.met < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(job.processes[1].pid, signal.SIGKILL)
    job.end()
    assert steps(s3)[0] == (1, True)
    assert (2, True) not in steps(s3)
    assert stored(s3).store.unfinished() != [], "it was in the middle"
    s3.clear()
    assert [rank["step"] for rank in ranks.run("load", ranks=2)] == [1, 1]
    ranks.run("save", ranks=2, step=3)
    assert steps(s3) == [(1, True), (3, True)]
    assert stored(s3).store.unfinished() == []


def test_a_job_that_was_replaced_cannot_harm_what_its_successor_saved(s3: FaultyS3, tmp_path: Path) -> None:
    """Its uploads are in flight while the next attempt clears up, saves the same step and publishes it."""
    ranks = state_ranks(s3, tmp_path)
    s3.inject(held_up := Fault("503", method="PUT", path="partNumber", times=10**9))
    old = ranks.start("save", ranks=1, step=2)
    deadline = time.monotonic() + 100
    while not held_up.met and time.monotonic() < deadline:
        time.sleep(0.01)
    (upload,) = stored(s3).store.unfinished()
    s3.inject(Fault("503", method="PUT", path=f"uploadId={upload.key}", times=10**9))
    s3.faults.remove(held_up)
    ranks.run("save", ranks=2, step=2)
    s3.clear()
    old.end()
    assert old.processes[0].exitcode not in (0, None), "it must learn that it was replaced"
    assert steps(s3) == [(2, True)]
    assert [(rank["step"], rank["wrong"]) for rank in ranks.run("load", ranks=1)] == [(2, [])]


def test_a_store_that_fails_now_and_then_and_one_that_is_down(s3: FaultyS3, tmp_path: Path) -> None:
    ranks = state_ranks(s3, tmp_path)
    flaky = [
        Fault("503", method="PUT", path="partNumber", times=2),
        Fault("dropped", method="PUT", path="partNumber", times=2),
        Fault("dropped-after", method="PUT", path="partNumber", times=1),
        Fault("dropped-after", method="POST", path="uploadId", times=1),  # completed, but the answer is lost
        Fault("latency", method="PUT", times=3, seconds=0.3),
    ]
    s3.inject(*flaky)
    ranks.run("save", ranks=2)
    assert [fault.met for fault in flaky] == [fault.times for fault in flaky]
    s3.inject(Fault("truncated", method="GET", path="distcp", times=2), Fault("dropped", method="GET", times=2))
    assert [rank["wrong"] for rank in ranks.run("load", ranks=2)] == [[], []]
    s3.clear()
    s3.inject(Fault("503", method="PUT", path="step-00000002", times=10**9))
    job = ranks.start("save", ranks=2, step=2, upload_seconds=1)
    job.end()
    assert all(process.exitcode not in (0, None) for process in job.processes), "it was to be waited for"
    assert steps(s3) == [(1, True)]
    assert stored(s3).store.unfinished() == []


def test_sigterm_gives_up_an_upload_that_would_take_too_long(s3: FaultyS3, tmp_path: Path) -> None:
    """It is tried for ten minutes, and the ranks have 4 s: the near tier gets the step, then the store does."""
    ranks = state_ranks(s3, tmp_path)
    s3.inject(Fault("503", method="PUT", path="step-00000001.*partNumber", times=10**9))
    job = ranks.start(
        "save, then SIGTERM", ranks=2, upload_seconds=600, every=1, grace_seconds=4, local_every=1,
        local_path=str(tmp_path / "disk"),
    )  # fmt: skip
    job.results(60)
    history = [
        (record["event"], record["step"], record["tier"])
        for record in read_json_lines(next(job.folder.glob("pod-0/*/history.jsonl")))
        if record["event"].startswith("checkpoint")
    ]
    assert history == [
        ("checkpoint", 1, "local"),
        ("checkpoint-failed", 1, "store"),
        ("checkpoint", 2, "local"),
        ("checkpoint", 2, "store"),
    ]
    assert steps(s3)[-1] == (2, True)
    assert [(rank["step"], rank["wrong"]) for rank in ranks.run("load", ranks=1)] == [(2, [])]


def test_a_store_that_cannot_be_read_is_not_a_damaged_checkpoint(s3: FaultyS3, tmp_path: Path) -> None:
    """Credentials of one rank end half-way: to go on from an older step would throw away what was trained since."""
    ranks = state_ranks(s3, tmp_path)
    ranks.run("save", ranks=2)
    for path in ("__1_0.distcp", "manifest.json"):
        s3.inject(fault := Fault("403", method="GET", path=path, times=10**9))
        job = ranks.start("load", ranks=2)
        job.end()
        assert fault.met
        assert [process.exitcode for process in job.processes] == [1, 1], "all ranks learn of it"
        assert not (job.folder / "pod-0" / "run" / "history.jsonl").exists(), "nothing is called damaged"
        s3.clear()


def test_a_store_out_of_reach_does_not_send_a_run_back_to_an_older_step_of_its_folder(
    s3: FaultyS3, tmp_path: Path
) -> None:
    """It has saved in its folder first, and straight into the store since: only its history tells of that now."""
    ranks = StateRanks(tmp_path, {"norm": (7,)}, "s3://bucket/runs", environment=s3.environment)
    ranks.prelude = functools.partial(in_one_folder, tmp_path / "runs")
    ranks.run("save", ranks=1, step=1, direct=False, store=None)
    ranks.run("save", ranks=1, step=2)
    s3.inject(Fault("403", method="GET", times=10**9))
    job = ranks.start("load", ranks=1)
    job.end()
    assert job.processes[0].exitcode == 1


def in_one_folder(runs: Path, rank: int) -> None:
    os.environ["WINDLASS_RUNS"] = str(runs)


@pytest.mark.parametrize("harm", campaign(["changed", "shortened"], always=1))
def test_damaged_parts_are_named_and_the_step_before_is_taken(harm: str, s3: FaultyS3, tmp_path: Path) -> None:
    ranks = state_ranks(s3, tmp_path)
    for step in (1, 2):
        ranks.run("save", ranks=2, step=step)
    (key,) = s3.keys("bucket", f"{stored(s3).store.url.removeprefix('s3://bucket/')}/step-00000002/__1_0.distcp")
    client = s3.client()
    content = bytearray(client.get_object(Bucket="bucket", Key=key)["Body"].read())
    if harm == "changed":
        content[-500_000] ^= 1
    else:
        del content[-500_000:]
    client.put_object(Bucket="bucket", Key=key, Body=bytes(content))
    job = ranks.start("load", ranks=2)
    assert [(rank["step"], rank["wrong"]) for rank in job.results()] == [(1, [])] * 2
    (named,) = read_json_lines(job.folder / "pod-0" / "run" / "history.jsonl")
    assert (named["event"], named["checkpoint"], named["file"], named["tier"]) == (
        "checkpoint-damaged",
        "step-00000002",
        "__1_0.distcp",
        "store",
    )


@pytest.mark.slow
@pytest.mark.campaign_only  # 1.2 GB through a server that is written in Python
def test_a_state_larger_than_the_memory_of_each_rank(s3: FaultyS3, tmp_path: Path) -> None:
    """Six ranks save 1.2 GB, four read it back; the limit of each is below that."""
    limit = 1000 * 2**20
    shapes = {f"tensor-{index}": (24, 1024, 350) for index in range(38)}
    assert len(shapes) * 24 * 1024 * 350 * 4 > 1.2 * limit
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(memory_limited(limit, f"-{rank}")) for rank in range(6)]
        enter = functools.partial(enter_group, groups)
        ranks = StateRanks(tmp_path, shapes, "s3://bucket/runs", environment=s3.environment, prelude=enter)
        saved = ranks.start("save", ranks=6).results(500)
        found = ranks.start("load", ranks=4).results(500)
        print("peak MiB of a rank:", [rank["peak"] // 2**20 for rank in (*saved, *found)])
    assert [(rank["step"], rank["wrong"]) for rank in found] == [(1, [])] * 4
    assert max(rank["disk"] for rank in (*saved, *found)) < 10_000


def enter_group(groups: list[Path], rank: int) -> None:
    (groups[rank] / "cgroup.procs").write_text(str(os.getpid()))
