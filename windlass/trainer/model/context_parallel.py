"""Context parallelism: ranks share every sequence, and gather each other's keys and values.

A sequence is cut into twice as many pieces as there are ranks. A rank has one from the front and one from the back, so
that all have as much to attend to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh


def own_places(length: int, ranks: int, rank: int) -> np.ndarray[Any, Any]:
    """Which tokens of a sequence a rank has."""
    pieces = np.arange(length).reshape(2 * ranks, -1)
    return np.concatenate([pieces[rank], pieces[2 * ranks - 1 - rank]])


def share_sequences(model: Any, mesh: DeviceMesh) -> None:
    """Let attention see the tokens of all ranks of `mesh`."""
    from transformers.modeling_utils import AttentionInterface

    ranks, rank = mesh.size(), mesh.get_local_rank()

    def attend(
        _module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **_others: Any,
    ) -> tuple[Tensor, None]:
        """transformers' calling convention: [B, H, T, D] in, [B, T, H, D] out."""
        size = query.shape[2] // 2  # of a piece
        gathered = all_gather_tensor_autograd(torch.stack([key, value]), 3, mesh.get_group())
        pieces = torch.split(gathered, size, dim=3)
        in_order = [*pieces[::2], *reversed(pieces[1::2])]
        outputs = []
        for half, place in zip(torch.split(query, size, dim=2), (rank, 2 * ranks - 1 - rank), strict=True):
            keys, values = torch.cat(in_order[: place + 1], dim=3)
            outputs.append(attend_to_all_before(half, keys, values, dropout=dropout, scale=scaling))
        return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None

    AttentionInterface.register("windlass_context", attend)
    model.set_attn_implementation("windlass_context")


def attend_to_all_before(query: Tensor, key: Tensor, value: Tensor, *, dropout: float, scale: float | None) -> Tensor:
    """Causal attention of the last tokens of a sequence: the last query is that of the last key."""
    groups, behind = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    if query.device.type == "cuda" and query.dtype != torch.float32:
        # Its causal mask is that of the lower right corner, and it takes grouped heads as they are.
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout, True, scale=scale)[0]
        return out
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(behind)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=groups > 1
    )
