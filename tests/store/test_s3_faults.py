"""S3 on a bad day: what passes is waited for, what does not is said in words, and nothing arrives half."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaign import campaign
from tests.store.s3_server import Fault, FaultyS3
from tests.store.test_store import QUICK, MiB, file_of
from windlass.common.retrying import retried, within
from windlass.errors import UserError
from windlass.store import Sink, open_store

IMPATIENT = replace(QUICK, patience_s=0.3)
PASSING = ["500", "503", "SlowDown", "dropped", "dropped-after", "truncated", "latency"]


@pytest.mark.parametrize("kind", PASSING)
def test_a_read_survives(kind: str, s3: FaultyS3, tmp_path: Path) -> None:
    path = file_of(tmp_path, 250_000)
    s3.client().put_object(Bucket="bucket", Key="file", Body=path.read_bytes())
    fault = Fault(kind, method="GET", times=4)
    s3.inject(fault)
    open_store("s3://bucket", replace(QUICK, part_bytes=100_000)).get("file", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert fault.met >= 3


IN_PARTS = [(kind, 5 * MiB + 1000) for kind in ("503", "dropped-after", "truncated")]
IN_PARTS += [(kind, 5 * MiB + 1000) for kind in ("500", "SlowDown", "dropped", "latency")]


@pytest.mark.parametrize(("kind", "size"), [*((kind, 1000) for kind in PASSING), *campaign(IN_PARTS, always=3)])
def test_a_write_survives(kind: str, size: int, s3: FaultyS3, tmp_path: Path) -> None:
    path = file_of(tmp_path, size)
    fault = Fault(kind, times=4)
    s3.inject(fault)
    store = open_store("s3://bucket", QUICK)
    store.put(path, "file", sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert fault.met == 4 or kind in ("truncated", "latency")
    s3.clear()
    entry = store.stat("file")
    assert entry is not None
    assert entry.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert store.read("file") == path.read_bytes()


def test_the_answer_to_a_completion_is_lost(s3: FaultyS3, tmp_path: Path) -> None:
    """The upload is complete, but nobody heard it; asking again is refused: no such upload."""
    path = file_of(tmp_path, 5 * MiB + 1000)
    faults = [Fault(kind, method="POST", path="uploadId=") for kind in ("dropped-after", "NoSuchUpload")]
    s3.inject(*faults)
    store = open_store("s3://bucket", QUICK)
    store.put(path, "file")
    assert [fault.met for fault in faults] == [1, 1]
    assert store.read("file") == path.read_bytes()


def test_an_upload_that_is_gone_is_not_taken_for_the_file_of_before(s3: FaultyS3, tmp_path: Path) -> None:
    """Somebody gave it up. What lies there has as many parts, but a manifest would vouch for what it is not."""
    store, path = open_store("s3://bucket", QUICK), file_of(tmp_path, 5 * MiB + 1000)
    store.put(path, "file")
    path.write_bytes(bytes(path.stat().st_size))
    s3.inject(Fault("NoSuchUpload", method="POST", path="uploadId="))
    with pytest.raises(FileNotFoundError, match="NoSuchUpload"):
        store.put(path, "file")


def write_and_fail(file: Sink) -> None:
    file.write(b"x" * 12 * MiB)
    raise TypeError


@pytest.mark.slow
def test_a_file_that_is_written_while_it_is_made(s3: FaultyS3) -> None:
    """With the memory of a few parts; there whole, or not at all and nothing left behind."""
    past_the_proxy = open_store("s3://bucket", replace(QUICK, part_bytes=5 * MiB, endpoint=s3.server))
    piece = random.Random(0).randbytes(MiB + 1)
    tracemalloc.start()
    with past_the_proxy.create("large", size=60 * MiB) as file:
        for _ in range(60):
            file.write(memoryview(piece))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 5 * MiB
    assert past_the_proxy.read("large") == piece * 60
    store = open_store("s3://bucket", replace(QUICK, part_bytes=5 * MiB))
    s3.inject(Fault("latency", method="PUT", times=2), Fault("dropped", method="PUT", times=3), Fault("503", times=2))
    for size in (0, 5 * MiB, 12 * MiB):
        with store.create("small", size=size) as file:
            file.write(b"x" * size)
        assert store.read("small") == b"x" * size
    assert len([path for method, path in s3.requests if method == "POST" and path.endswith("?uploads")]) == 1
    with pytest.raises(TypeError), store.create("half", size=20 * MiB) as file:
        write_and_fail(file)
    assert store.stat("half") is None
    assert store.unfinished() == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", campaign(range(12), always=4))
def test_any_mixture(seed: int, s3: FaultyS3, tmp_path: Path) -> None:
    draw = random.Random(seed)
    path = file_of(tmp_path, draw.randrange(14 * MiB))
    s3.inject(*(Fault(draw.choice(PASSING), times=draw.randint(1, 3), seconds=0.02) for _ in range(4)))
    store = open_store("s3://bucket", QUICK)
    store.put(path, "file")
    store.get("file", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_an_upload_that_fails_leaves_nothing(s3: FaultyS3, tmp_path: Path) -> None:
    s3.inject(Fault("503", method="PUT", path="partNumber=2", times=10_000))
    store = open_store("s3://bucket", IMPATIENT)
    with pytest.raises(UserError, match="does not answer properly"):
        store.put(file_of(tmp_path, 5 * MiB + 1000), "file")
    assert s3.keys("bucket") == []
    assert store.unfinished() == []


def test_an_upload_cut_off_is_found_and_given_up(s3: FaultyS3) -> None:
    client = s3.client()
    client.create_multipart_upload(Bucket="bucket", Key="run/file")
    store = open_store("s3://bucket/run", QUICK)
    (upload,) = store.unfinished()
    assert upload.name == "file"
    store.abort(upload)
    store.abort(upload)
    assert store.unfinished() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["500", "SlowDown", "dropped"])
def test_patience_ends(kind: str, s3: FaultyS3) -> None:
    fault = Fault(kind, times=10_000)
    s3.inject(fault)
    with pytest.raises(UserError) as caught:
        open_store("s3://bucket", replace(QUICK, patience_s=3.0)).stat("file")
    assert fault.met > 1
    assert s3.endpoint in (caught.value.evidence or "")


def test_no_bucket(s3: FaultyS3) -> None:
    with pytest.raises(UserError, match="there is no bucket nowhere") as caught:
        list(open_store("s3://nowhere/x", IMPATIENT).entries())
    assert "aws s3 mb s3://nowhere" in (caught.value.fix or "")


def test_access_denied(s3: FaultyS3) -> None:
    fault = Fault("403", times=10_000)
    s3.inject(fault)
    store = open_store("s3://bucket", IMPATIENT)
    for ask in (lambda: store.read("x"), lambda: store.stat("x"), lambda: store.write("x", b"")):
        with pytest.raises(UserError, match="access to s3://bucket is denied"):
            ask()
    assert fault.met == 3, "it is not tried again"


def test_no_credentials(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no credentials for s3://bucket") as caught:
        open_store("s3://bucket", IMPATIENT).stat("x")
    assert "aws configure" in (caught.value.fix or "")


def test_nobody_at_the_endpoint(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as bound:  # bound and not listening: nobody else gets the port, and it refuses
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(UserError, match="s3://bucket cannot be reached") as caught:
            open_store("s3://bucket", IMPATIENT).stat("x")
    assert "AWS_ENDPOINT_URL" in (caught.value.fix or "")


def test_pauses_grow_within_the_patience() -> None:
    now, pauses = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    def fail() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        retried(
            fail,
            pause_after=within(
                100,
                first_s=1,
                longest_s=20,
                worth_retrying=lambda error: True,
                clock=lambda: now[0],
                draw=lambda: 1.0,
            ),
            sleep=sleep,
        )
    assert pauses == [1, 2, 4, 8, 16, 20, 20, 20]
    assert now[0] <= 100
