"""How a model is spread: groups of ranks, micro-batches that all ranks share, experts under torch.compile."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import free_port, train
from windlass.plan import resolve
from windlass.plan.layout import Facts, Layout
from windlass.spec.loading import parse_run
from windlass.trainer.distributed.meshes import Meshes
from windlass.trainer.distributed.ranks import Ranks, join_ranks
from windlass.trainer.fast.fp8 import Float8Product
from windlass.trainer.model.structure import model_config
from windlass.trainer.parallelize import parallelize
from windlass.trainer.preparation import model_facts

MOE = {
    "preset": "mixtral-tiny",
    "config": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16},
}
FP32 = {"precision": "fp32"}


def test_every_group_of_a_mesh_keeps_the_runs_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives a new group its own default, and a hang there would last half an hour."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    sections = {"parallel": {"sharding": "hybrid", "timeout_minutes": 3}, "resources": {"gpus_per_node": 0}}
    run = resolve(parse_run({"name": "x", "model": {"preset": "llama3.2-tiny"}, "data": {"source": "x"}, **sections}))
    ranks = join_ranks(run)
    try:
        made = Meshes(run, Layout.resolve(run, 1, 1, Facts.of({}), local_world_size=1), ranks).model
        for dimension in ("replicate", "shard"):
            backend: Any = made.get_group(dimension)._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(minutes=3), dimension
    finally:
        dist.destroy_process_group()


def test_fp8_holds_no_copy_of_the_weight_until_the_backward_pass() -> None:
    weight = torch.randn(64, 32, requires_grad=True)
    x = torch.randn(8, 32, requires_grad=True)
    out = Float8Product.apply(x, weight)
    saved = out.grad_fn.saved_tensors  # type: ignore[union-attr]
    own = {x.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr()}
    held = sum(
        tensor.numel() * tensor.element_size() for tensor in saved if tensor.untyped_storage().data_ptr() not in own
    )
    assert held <= x.numel() + 16, f"{held} bytes beside the weight: more than the inputs in fp8 and two scales"
    out.sum().backward()
    assert weight.grad is not None
    assert (weight.grad - x.detach().sum(0)).abs().max() < 0.1 * weight.grad.abs().max()


def small_gpu_on_rank_1(rank: int) -> None:
    """Two kinds of GPU in one run: by itself, each rank would choose another micro-batch."""
    from dataclasses import replace

    from windlass.catalog.gpus import gpu
    from windlass.trainer.distributed.ranks import Ranks

    smaller = replace(gpu("H100"), memory_gib=0.0001)
    Ranks.gpu = property(lambda ranks: smaller if ranks.rank == 1 else gpu("H200"))  # type: ignore[assignment,method-assign]


@pytest.mark.train
def test_the_smallest_gpu_decides_for_all(corpus: Path, tmp_path: Path) -> None:
    result = train(tmp_path, tiny_run(corpus, train__steps=3), ranks=2, prelude=small_gpu_on_rank_1, timeout=90)
    assert result.codes == [0, 0], result.output
    assert [result.folder.rank_log(rank).read_text().count("takes 4 × 1 sequences") for rank in (0, 1)] == [1, 1]


@pytest.mark.train
def test_hybrid_groups_follow_the_launcher(corpus: Path, tmp_path: Path) -> None:
    """Four ranks on two nodes of a run that asked for four: two groups of two, as one rank computes it."""
    run = tiny_run(corpus, train__steps=3, parallel={"sharding": "hybrid"}, resources={"nodes": 4})
    result = train(tmp_path / "four", run, ranks=4, nodes=2, prelude=two_on_each_node)
    assert result.codes == [0] * 4, result.output
    assert "2 copies, each over 2 ranks" in result.folder.rank_log(0).read_text()
    whole = train(tmp_path / "one", tiny_run(corpus, train__steps=3))
    assert result.losses == pytest.approx(whole.losses, rel=1e-6)


def two_on_each_node(_rank: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"


@pytest.mark.slow
@pytest.mark.parametrize("autocast", campaign([True, False], always=1), ids=["autocast", "fp32"])
def test_experts_under_compile(autocast: bool) -> None:
    """Their weights are fp32 until they are multiplied: under DDP, and where fp32 is asked for."""
    run = resolve(parse_run({"name": "x", "model": MOE, "data": {"source": "x"}, "train": {"compile": True, **FP32}}))
    alone = Ranks(0, 1, 0, torch.device("cpu"), None, None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(run), attn_implementation="sdpa")
    tokens = torch.randint(0, 100, (2, 16))

    def measured() -> tuple[float, float]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return float(loss), float(sum(parameter.grad.norm() for parameter in model.parameters()))

    eager = measured()
    layout = Layout.resolve(run, 1, 2, model_facts(run, model, model.config, cuda=False))
    parallelize(model, run, layout, alone)
    assert measured() == pytest.approx(eager, rel=2e-2 if autocast else 1e-5)
    torch._dynamo.reset()
