"""Model FLOPs and the GPU's peak, of which they are a share. Convention: causal attention, dense bf16 peak."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from windlass.catalog.gpus import Gpu


def peak_flops(gpu: Gpu | None) -> float | None:
    """Dense bf16 peak; None where it is not known."""
    return gpu.bf16_tflops * 1e12 if gpu and gpu.bf16_tflops else None


def flops_per_token(model: nn.Module, config: Any, sequence_length: int) -> float:
    """Forward and backward of one token: 6 per matrix weight it meets, 6·L·T·d for causal attention.

    A frozen weight counts 4: there is no gradient of its own to compute.
    """
    text = config.get_text_config()
    experts = getattr(text, "num_local_experts", 0) or 0
    per_token = getattr(text, "num_experts_per_tok", experts) or experts
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    total = head.numel() * _per_weight(head)  # looked up on the way in, multiplied on the way out
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or parameter is embedding or parameter is head:
            continue
        share = per_token / experts if experts and ".experts." in f".{name}" else 1.0
        total += parameter.numel() * share * _per_weight(parameter)
    heads = getattr(text, "num_attention_heads", None)
    if not heads:  # of a model whose attention is not known
        return float(total)
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    return float(total + 6 * text.num_hidden_layers * sequence_length * width)


def _per_weight(parameter: Tensor) -> float:
    return 6.0 if parameter.requires_grad else 4.0
