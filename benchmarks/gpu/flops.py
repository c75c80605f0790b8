"""FLOPs of a point by windlass's own convention, the same for every contestant."""

from __future__ import annotations

import torch

from benchmarks.gpu.points import Point


def flops_per_token(point: Point) -> float:
    """Forward and backward of one token with causal attention: 9.025 GFLOP for Llama-3.2-1B at T=8192."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from windlass.trainer.callbacks import metrics

    values = point.config()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return metrics.flops_per_token(model, config, point.length)


def peak_flops() -> float | None:
    """Dense bf16 peak of this GPU, for fp8 contestants too; None on a CPU."""
    from windlass.catalog.gpus import gpu_of_device
    from windlass.trainer.callbacks import metrics

    return metrics.peak_flops(gpu_of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None)
