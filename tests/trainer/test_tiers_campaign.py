"""200 random faults over all tiers: the newest complete step comes back, and a run ends as if nothing had happened.

Processes are killed at named points and at any moment, memories, disks and folders are lost or damaged, the store
answers with errors, half bodies and silence. Every choice is drawn from the chain's seed, which a failure names;
the count of what really happened is printed at the end:  pytest -q tests/trainer/test_tiers_campaign.py
"""

from __future__ import annotations

import collections
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.campaign import campaign
from tests.store.s3_server import Fault, FaultyS3
from tests.trainer.harness import Result
from tests.trainer.states import state_of
from tests.trainer.tier_oracle import newest_complete
from tests.trainer.tier_runs import Cluster, tiered_run
from windlass.checkpoint import CheckpointFolder

pytestmark = pytest.mark.train

STEPS, EVERY = 32, 4
CHAINS, ATTEMPTS = 15, 6  # so many runs, each disturbed so often and then left alone to finish
DEMANDED = 200
PASSING = ["500", "503", "SlowDown", "truncated", "dropped", "dropped-after", "latency"]
POINTS = {  # each with the steps at which it is reached
    1: ["memory.written", "memory.replicated", "memory.published", "step.end"],
    2: ["local.written", "local.published"],
    4: [
        *["save.staged", "save.written", "save.manifest", "save.published", "save.retention"],
        *["upload.begin", "upload.file", "upload.manifest", "upload.published"],
    ],
}
LOSSES = [
    *["node 0", "node 1", "memory 0", "memory 1", "memory 0+memory 1", "disk 0", "disk 1", "disk 0+disk 1"],
    *["node 0+node 1", "checkpoints", "damaged memory 0", "damaged memory 1", "damaged disk 0", "damaged disk 1"],
    *["damaged checkpoints", "manifest"],
]
happened: collections.Counter[str] = collections.Counter()


@pytest.fixture(scope="module")
def s3(s3_process: FaultyS3) -> Iterator[FaultyS3]:
    yield s3_process
    s3_process.reset()


def campaign_run(corpus: Path, bucket: str) -> dict[str, Any]:
    run = tiered_run(corpus, every=EVERY, keep=2, store=f"s3://{bucket}/runs", upload_seconds=60)
    run["train"] |= {"steps": STEPS}
    return run


class Chain:
    """One run and the misfortunes it meets."""

    def __init__(self, seed: int, s3: FaultyS3, corpus: Path, root: Path) -> None:
        self.draw, self.s3, self.bucket = random.Random(seed), s3, f"chain-{seed:02d}"
        s3.make_bucket(self.bucket)
        self.cluster = Cluster(root, campaign_run(corpus, self.bucket), environment=s3.environment)
        self.trash = root / "trash"
        self.story: list[str] = []  # for whoever has to understand a failure

    @property
    def checkpoints(self) -> Path:
        return self.cluster.folder.checkpoints

    def newest(self) -> tuple[int, str] | None:
        client = self.s3.client()
        keys = self.s3.keys(self.bucket)
        stored = {key: client.get_object(Bucket=self.bucket, Key=key)["Body"].read() for key in keys}
        return newest_complete([self.cluster.node(0), self.cluster.node(1)], self.checkpoints, stored, 2)

    def attempt(self, number: int, begin: int) -> None:
        """Train from step `begin` until something kills it."""
        faults = [Fault(self.draw.choice(PASSING), times=self.draw.randint(1, 3), seconds=0.05) for _ in range(2)]
        faults = faults[: self.draw.randint(0, 2)]
        self.s3.inject(*faults)
        rank, ahead = self.draw.randrange(2), self.draw.randint(1, 5)
        if self.draw.random() < 0.6:
            period = self.draw.choice([1, 2, 4, 4])
            step = (begin // period + 1) * period + (period * self.draw.randint(0, 1))
            point = self.draw.choice(POINTS[period])
            self.story.append(f"attempt {number}: kill rank {rank} at {point} of step {step}")
            # Some points are rank 0's alone, and a copy to memory may be left out: then both die a little later.
            text = f"kill:rank={rank},step={step},point={point};kill:step={step + 4}"
            result = self.cluster.train(faults=text, attempt=number)
        else:
            victims = self.draw.choice([(0,), (1,), (0, 1)])
            delay = self.draw.uniform(0, 0.15)
            self.story.append(f"attempt {number}: kill ranks {victims} {delay:.3f} s after step {begin + ahead}")
            job = self.cluster.start(attempt=number, faults=f"sleep:step={begin + ahead + 3},seconds=5")
            job.wait_for(lambda: job.step() >= begin + ahead)
            time.sleep(delay)
            for victim in victims:
                job.signal(victim, signal.SIGKILL)
            result = job.result()
        self.s3.clear()
        met = [fault.kind for fault in faults if fault.met]
        self.story += [f"  the store: {kind}" for kind in met]
        happened.update(f"store: {kind}" for kind in met)
        if -signal.SIGKILL in result.codes:
            happened["killed"] += 1

    def lose_something(self) -> None:
        """Unless nothing at all would be left to go on from."""
        loss = self.draw.choice(LOSSES)
        shutil.rmtree(self.trash, ignore_errors=True)
        backups = self.trash / "nodes", self.trash / "checkpoints"
        places = self.cluster.root, self.checkpoints
        for number in (0, 1):
            if self.cluster.node(number).exists():
                shutil.copytree(self.cluster.node(number), backups[0] / f"node-{number}")
        if places[1].exists():
            shutil.copytree(places[1], backups[1])
        done = [self._do(one) for one in loss.split("+")]
        if not all(done):
            return
        if self.newest() is None:
            for number in (0, 1):
                self.cluster.lose(number)
                if (backups[0] / f"node-{number}").exists():
                    shutil.copytree(backups[0] / f"node-{number}", self.cluster.node(number))
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            if backups[1].exists():
                shutil.copytree(backups[1], self.checkpoints)
            return
        self.story.append(f"  lost: {loss}")
        happened[f"lost: {loss}"] += 1

    def _do(self, loss: str) -> bool:
        """Whether there was anything to lose."""
        what, _, where = loss.rpartition(" ")
        if loss == "checkpoints":
            there = any(self.checkpoints.glob("step-*"))
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            return there
        if what in ("node", "memory", "disk"):
            place = self.cluster.node(int(where)) / ("." if what == "node" else what)
            there = any(place.rglob("*.safetensors"))
            shutil.rmtree(place, ignore_errors=True)
            return there
        place = self.checkpoints
        if loss.startswith("damaged") and where != "checkpoints":
            place = self.cluster.node(int(where)) / what.split()[1]
        files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
        files = [one for one in files if (one.name == "manifest.json") == (loss == "manifest")]
        if not files:
            return False
        victim = self.draw.choice(files)
        content = bytearray(victim.read_bytes())
        content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        victim.write_bytes(content[: self.draw.choice([len(content), len(content) - 1])])
        return True

    def reports(self) -> list[int]:
        """The steps that were reported as saved, in any tier."""
        return [event["step"] for event in self.cluster.events("checkpoint")]


@pytest.mark.parametrize("seed", campaign(range(CHAINS), always=1))
def test_chain(seed: int, s3: FaultyS3, corpus: Path, tmp_path: Path, undisturbed: Callable[..., Result]) -> None:
    chain = Chain(seed, s3, corpus, tmp_path)
    try:
        go_through(chain, undisturbed)
    except BaseException:
        print(f"seed {seed}\n" + "\n".join(chain.story))
        raise
    finally:
        s3.clear()


def go_through(chain: Chain, undisturbed: Callable[..., Result]) -> None:
    cluster = chain.cluster
    whole = undisturbed({**cluster.run, "checkpoint": {"every": 100}})
    expected: tuple[int, str] | None = None
    for number in range(1, ATTEMPTS + 1):
        resumed_before, begin = len(cluster.events("resumed")), expected[0] if expected else 0
        reports_before = len(chain.reports())
        chain.attempt(number, begin)
        check_resume(chain, expected, resumed_before)
        newest = chain.newest()
        reported = max(chain.reports()[reports_before:], default=begin)
        assert (newest[0] if newest else 0) >= reported, "nothing reported as saved is lost by a kill"
        if chain.draw.random() < 0.85:
            chain.lose_something()
        expected = chain.newest()
    resumed_before = len(cluster.events("resumed"))
    result = cluster.train(attempt=ATTEMPTS + 1)
    assert result.codes == [0, 0], result.output
    check_resume(chain, expected, resumed_before)
    check_end(chain, result, whole)


def check_resume(chain: Chain, expected: tuple[int, str] | None, before: int) -> None:
    """The attempt that just ran began from what the files said it must; one that died early says nothing."""
    for event in chain.cluster.events("resumed")[before:]:
        found = (event["step"], event["tier"])
        chain.story.append(f"  resumed from {found}")
        assert found == expected


def check_end(chain: Chain, result: Result, whole: Result) -> None:
    for step, loss in result.losses.items():
        assert loss == whole.losses[step], f"step {step}"
        assert result.grad_norms[step] == whole.grad_norms[step], f"step {step}"
    assert max(result.losses) == STEPS
    ours = state_of(CheckpointFolder(chain.checkpoints).at(STEPS).path)
    theirs = state_of(CheckpointFolder(whole.folder.checkpoints).at(STEPS).path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "bitwise the same in the end"
    assert newest_complete([], Path("none"), stored_in(chain), 2) == (STEPS, "store")


def stored_in(chain: Chain) -> dict[str, bytes]:
    client = chain.s3.client()
    keys = chain.s3.keys(chain.bucket)
    return {key: client.get_object(Bucket=chain.bucket, Key=key)["Body"].read() for key in keys}


@pytest.mark.campaign
def test_the_count(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    ran = [
        item for item in request.session.items if item.name.startswith("test_chain") and "campaign" in str(item.path)
    ]
    total = sum(happened.values())
    with capsys.disabled():
        print(f"\n{total} faults in {len(ran)} runs of {ATTEMPTS + 1} attempts each:")
        for what, count in sorted(happened.items()):
            print(f"  {count:>4}  {what}")
    if len(ran) == CHAINS:
        assert total >= DEMANDED
