"""HyperPod's Managed Tiered Checkpointing behind the interface of the tiers, against a stand-in of its service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.campaign import campaign
from tests.trainer.harness import Result, free_port
from tests.trainer.managed_service import ManagedStandIn, running_service
from tests.trainer.test_tiers import assert_same_curve, resumed_from
from tests.trainer.tier_runs import Cluster, tiered_run

pytestmark = pytest.mark.train

Undisturbed = Callable[..., Result]


@pytest.fixture
def service() -> Iterator[ManagedStandIn]:
    pytest.importorskip("amzn_sagemaker_checkpointing")
    with running_service() as state:
        yield state


def managed_run(corpus: Path, service: ManagedStandIn, **changes: Any) -> dict[str, Any]:
    settings = {
        "memory_every": None,
        "local_every": None,
        "local_path": None,
        "managed_every": 1,
        "managed_endpoint": service.endpoint,
        "background": False,
        **changes,
    }
    return tiered_run(corpus, **settings)


def test_the_newest_step_comes_from_the_service(
    service: ManagedStandIn, corpus: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    cluster = Cluster(tmp_path, managed_run(corpus, service))
    cluster.train(faults="kill:step=8")
    assert {rank: sorted(steps) for rank, steps in service.only().shards.items()} == {
        rank: [5, 6, 7] for rank in (0, 1, 2)
    }
    cluster.lose(0)
    cluster.lose(1)
    resumed = cluster.resume(most=1)
    assert resumed_from(cluster) == (7, "managed")
    assert_same_curve(cluster, resumed, undisturbed)
    assert service.namespaces == {}, "a finished run gives the memory back"


@pytest.mark.parametrize("point", campaign(["managed.written", "managed.published"], always=1))
def test_kill_in_a_save(
    point: str, service: ManagedStandIn, corpus: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Written by all ranks, but not published: the step before counts."""
    cluster = Cluster(tmp_path, managed_run(corpus, service, every=100))
    cluster.train(faults=f"kill:rank=0,step=6,point={point}")
    resumed = cluster.resume(most=1)
    step = 5 if point == "managed.written" else 6
    assert resumed_from(cluster) == (step, "managed")
    whole = undisturbed({**cluster.run, "checkpoint": {"every": 100}}, 2)
    assert {number: loss for number, loss in resumed.losses.items() if number > step} == {
        number: loss for number, loss in whole.losses.items() if number > step
    }


def test_a_damaged_and_a_missing_shard(
    service: ManagedStandIn, corpus: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    cluster = Cluster(tmp_path, managed_run(corpus, service, every=100))
    cluster.train(faults="kill:step=8")
    shards = service.only().shards
    content, meta = shards[1][7]
    shards[1][7] = (content[:-1] + bytes([content[-1] ^ 1]), meta)
    del shards[0][6]
    resumed = cluster.resume(most=1)
    assert resumed_from(cluster) == (5, "managed")
    assert [event["checkpoint"] for event in cluster.events("checkpoint-damaged")] == ["step-00000007", "step-00000006"]
    assert_same_curve(cluster, resumed, undisturbed)


def test_a_busy_service_is_asked_again_and_a_dead_one_stops_nothing(
    service: ManagedStandIn, corpus: Path, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    cluster = Cluster(tmp_path, managed_run(corpus, service, managed_every=3))
    service.failing = 3
    result = cluster.train()
    assert result.codes == [0, 0], result.output
    assert cluster.events("checkpoint-failed") == []
    assert_same_curve(cluster, result, undisturbed)


def test_no_service_is_said_before_the_first_step(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("amzn_sagemaker_checkpointing")
    nobody = ManagedStandIn(endpoint=f"http://127.0.0.1:{free_port()}")
    result = Cluster(tmp_path, managed_run(corpus, nobody)).train()
    assert result.codes == [2, 2], result.output
    assert "the Managed Tiered Checkpointing service cannot be used" in result.output


def test_another_number_of_ranks(service: ManagedStandIn, corpus: Path, tmp_path: Path) -> None:
    """The service fixes the number of ranks of a namespace: another number is another namespace, and starts empty."""
    cluster = Cluster(tmp_path, managed_run(corpus, service))
    cluster.train(faults="kill:step=8")
    alone = Cluster(tmp_path, cluster.run, ranks=1, nodes=1)
    assert alone.resume(most=1).codes == [0]
    assert resumed_from(alone) == (4, "shared")
