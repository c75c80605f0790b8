"""An S3 of their own for the tests of stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store.s3_server import FaultyS3, running_s3


@pytest.fixture(scope="session")
def s3_process() -> Iterator[FaultyS3]:
    pytest.importorskip("moto")
    with running_s3() as s3:
        s3.make_bucket("bucket")
        yield s3


@pytest.fixture
def s3(s3_process: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """The S3 at work, named in the environment, without faults and without files."""
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    yield s3_process
    s3_process.empty("bucket")
