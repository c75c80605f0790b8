"""Softmax cross-entropy of a block of logits that leaves the gradient where the logits were: two reads, one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES, WIDE = 256, 8  # a thread's eight numbers share one running maximum: an exponential less for most of them


@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(  # type: ignore[no-untyped-def]
    logits,
    labels,
    losses,
    row_stride,
    num_classes,
    ignored,
    scale,
    LANES: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
):
    """One program per row. Pass one finds maximum and sum; pass two writes softmax minus one-hot."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    base = logits + row * row_stride
    BLOCK: tl.constexpr = LANES * WIDE  # noqa: N806
    offsets = tl.arange(0, LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    if label == ignored:
        tl.store(losses + row, 0.0)
        for start in range(0, num_classes, BLOCK):
            inside = start + offsets < num_classes
            tl.store(base + start + offsets, tl.zeros([LANES, WIDE], dtype=tl.float32), mask=inside)
        return
    high = tl.full([LANES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([LANES], dtype=tl.float32)
    for start in range(0, num_classes, BLOCK):
        inside = start + offsets < num_classes
        x = tl.load(base + start + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(x, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # of a lane that has seen nothing yet
        total = total * tl.exp(high - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
        high = higher
    top = tl.max(high, axis=0)
    whole = tl.sum(total * tl.where(high == float("-inf"), 0.0, tl.exp(high - top)), axis=0)
    log_sum = top + tl.log(whole)
    at_label = tl.load(base + label).to(tl.float32)
    tl.store(losses + row, (log_sum - at_label) * scale)
    for start in range(0, num_classes, BLOCK):
        inside = start + offsets < num_classes
        x = tl.load(base + start + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(start + offsets == label, 1.0, 0.0)
        tl.store(base + start + offsets, gradient * scale, mask=inside)


def cross_entropy_in_place(logits_nv: Tensor, labels_n: Tensor, ignored: int, scale: float) -> Tensor:
    """The scaled loss of each row; `logits_nv` becomes its gradient."""
    losses_n = torch.empty(logits_nv.shape[0], dtype=torch.float32, device=logits_nv.device)
    _row_kernel[(logits_nv.shape[0],)](
        logits_nv,
        labels_n,
        losses_n,
        logits_nv.stride(0),
        logits_nv.shape[1],
        ignored,
        scale,
        LANES=LANES,
        WIDE=WIDE,
        num_warps=8,
    )
    return losses_n
