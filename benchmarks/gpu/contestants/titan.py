"""torchtitan 0.2.2: its own model, compile, FSDP, loss, clipping and optimizer, in the order of its own trainer.

`torchtitan` shards over a mesh of one rank, as its users' configurations do on many. `torchtitan-autocast` is what its
trainer does when it is started on a single GPU: no FSDP, autocast. `torchtitan-fp8` adds torchao's tensorwise float8.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.contestants import Job
from benchmarks.gpu.contestants.plain import timed_row
from benchmarks.gpu.flops import flops_per_token
from benchmarks.gpu.points import Point
from benchmarks.gpu.rows import Row
from benchmarks.gpu.standins import stand_in_for_missing
from benchmarks.gpu.timing import device, join_world_of_one


def run(job: Job) -> Row:
    flops = flops_per_token(job.point)  # before any stand-in: it asks transformers
    stand_in_for_missing()
    join_world_of_one()
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.tools.utils import GarbageCollection

    torch.manual_seed(0)
    sharded = job.contestant != "torchtitan-autocast"
    config = job_config(fp8=job.contestant == "torchtitan-fp8")
    collector = GarbageCollection(gc_freq=config.training.gc_freq)
    converter = float8_converter(config) if job.contestant == "torchtitan-fp8" else None
    model = build_model(job.point, config, converter, sharded=sharded)
    dims = SimpleNamespace(ep_enabled=False, pp_enabled=False)  # all that build_optimizers asks of ParallelDims
    optimizers = build_optimizers([model], config.optimizer, dims)
    if converter is not None:
        optimizers.register_step_post_hook(lambda *_, **__: converter.post_optimizer_hook([model]))
    loss_function = build_cross_entropy_loss(config)
    precision: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext() if sharded else torch.autocast(device().type, torch.bfloat16)
    )
    count = 0

    def step(tokens: Tensor) -> Tensor:
        nonlocal count
        count += 1
        collector.run(count)
        optimizers.zero_grad()
        with precision:
            logits = model(tokens[:, :-1].contiguous())
            loss: Tensor = loss_function(logits, tokens[:, 1:].contiguous()) / job.point.tokens
        del logits  # as its trainer does, to lower the peak
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(list(model.parameters()), config.training.max_norm, foreach=True)
        optimizers.step()
        return loss.detach()

    return timed_row(job, step, flops_per_token=flops)


def job_config(*, fp8: bool) -> Any:
    """Its configuration, as far as it differs from its defaults."""
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.compile.enable = device().type == "cuda"
    config.optimizer.name, config.optimizer.implementation = "AdamW", "fused"
    config.optimizer.lr, config.optimizer.weight_decay = 3e-4, 0.1
    config.optimizer.beta1, config.optimizer.beta2 = 0.9, 0.95
    config.training.max_norm = 1.0
    if fp8:
        float8 = config.quantize.linear.float8
        float8.enable_fsdp_float8_all_gather = True
        float8.precompute_float8_dynamic_scale_for_fsdp = True
        float8.filter_fqns = ["output"]  # the head stays in bf16
        float8.emulate = device().type == "cpu"
        config.model.converters = ["quantize.linear.float8"]
    return config


def float8_converter(config: Any) -> Any:
    from torchtitan.components.quantization.float8 import Float8LinearConverter

    # It gathers in float8 only where it believes there is more than one shard; here the mesh has one rank.
    return Float8LinearConverter(config, SimpleNamespace(dp_shard_enabled=True))


def build_model(point: Point, config: Any, converter: Any | None, *, sharded: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.llama3.infra.parallelize import apply_compile, apply_fsdp
    from torchtitan.models.llama3.model.model import Transformer

    arguments = model_arguments(point)
    with torch.device("meta"):
        model: nn.Module = Transformer(arguments)
    check_shape(model, point)
    if converter is not None:
        converter.convert(model)
    if config.compile.enable:
        apply_compile(model, config.compile)
    if sharded:
        mesh = init_device_mesh(device().type, (1,), mesh_dim_names=("fsdp",))
        apply_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
    model.to_empty(device=device())
    with torch.no_grad():
        model.init_weights(buffer_device=None)  # type: ignore[operator]
    return model.train()


def model_arguments(point: Point) -> Any:
    """The point's shape in its words. It ties no embeddings: where the point does, it holds a second matrix."""
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    shape = point.config()
    rope = shape["rope_scaling"]
    return TransformerModelArgs(
        dim=shape["hidden_size"],
        n_layers=shape["num_hidden_layers"],
        n_heads=shape["num_attention_heads"],
        n_kv_heads=shape["num_key_value_heads"],
        vocab_size=shape["vocab_size"],
        multiple_of=shape["intermediate_size"],  # it rounds 8/3 of the width up to this
        norm_eps=shape["rms_norm_eps"],
        rope_theta=shape["rope_theta"],
        rope_scaling_args=RoPEScalingArgs(
            scaling_factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position_embeddings=rope["original_max_position_embeddings"],
        ),
        max_seq_len=point.length,
    )


def check_shape(model: Any, point: Point) -> None:
    shape = point.config()
    found = tuple(next(iter(model.layers.values())).feed_forward.w1.weight.shape)
    if found != (shape["intermediate_size"], shape["hidden_size"]):
        raise ValueError(f"torchtitan's feed-forward would be {found}, not the shape of {point.name}")
