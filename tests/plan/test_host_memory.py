"""Memory of runs on CPUs: refused before it costs anything where the state alone cannot fit."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.errors import UserError
from windlass.plan import resolve
from windlass.plan.fitting import check_host_memory
from windlass.plan.memory import PROCESS_BYTES, host_memory
from windlass.spec import Run, parse_run

GIB = 2**30


def run_of(preset: str = "llama3.2-1b", **sections: Any) -> Run:
    return resolve(parse_run({"model": {"preset": preset, **sections.pop("model", {})}, "data": {}, **sections}))


@pytest.mark.parametrize(
    ("run", "ranks", "copies"),
    [
        (run_of(), 1, 1),
        (run_of(), 4, 1),
        (run_of(parallel={"sharding": "ddp"}), 4, 4),
        (run_of(parallel={"sharding": "hybrid", "shard_group": 2}), 4, 2),
    ],
)
def test_every_copy_of_the_model_counts(run: Run, ranks: int, copies: int) -> None:
    needed = host_memory(run, ranks)
    assert needed is not None
    assert needed.bytes == copies * 1_235_814_400 * 16 + ranks * PROCESS_BYTES


def test_frozen_weights_have_no_moments() -> None:
    adapters = run_of(model={"init": "pretrained", "lora": {"rank": 8}})
    whole, frozen = host_memory(run_of(), 1), host_memory(adapters, 1)
    assert whole is not None
    assert frozen is not None
    assert frozen.bytes < 0.2 * whole.bytes


def test_what_cannot_fit_is_refused_with_what_does() -> None:
    assert check_host_memory(run_of(), 1, 24 * GIB) is not None
    with pytest.raises(UserError, match=r"needs at least 18\.7 GiB of memory, and this machine has 8\.0 GiB"):
        check_host_memory(run_of(), 1, 8 * GIB)
    with pytest.raises(UserError) as refused:
        check_host_memory(run_of(parallel={"sharding": "ddp"}), 4, 24 * GIB)
    assert "parallel.sharding=full" in str(refused.value.fix)
    with pytest.raises(UserError) as refused:
        check_host_memory(run_of(model={"init": "pretrained"}), 1, 8 * GIB)
    assert "model.lora.rank=16" in str(refused.value.fix)


def test_a_model_of_unknown_size_is_let_through(tmp_path: Any) -> None:
    run = parse_run({"model": {"path": "some/hub-model"}, "data": {}})
    assert check_host_memory(run, 1, 1) is None
