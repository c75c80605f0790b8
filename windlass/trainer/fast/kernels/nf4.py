"""Bring weights back from 4 bits in one pass: half a byte read and one number written for each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # bytes of a program, two weights each
SHARED = 32  # bytes whose weights share a scale


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    packed,
    scales,
    levels,
    out,
    row_bytes,
    out_stride,
    BLOCK: tl.constexpr,  # noqa: N803
    SHARED: tl.constexpr,  # noqa: N803
):
    """A byte holds two neighbours of a row, and a row whole blocks. Places are plain ranges: wide loads and stores."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(packed + row * row_bytes + at, mask=at < row_bytes, other=0).to(tl.int32)
    block = part * (BLOCK // SHARED) + tl.arange(0, BLOCK // SHARED)
    scale = tl.load(scales + row * (row_bytes // SHARED) + block, mask=block < row_bytes // SHARED, other=0.0)
    spread = tl.reshape(tl.broadcast_to(scale[:, None], (BLOCK // SHARED, SHARED)), (BLOCK,))
    first = tl.load(levels + (pair >> 4)) * spread
    second = tl.load(levels + (pair & 15)) * spread
    columns = part * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(out + row * out_stride + columns, tl.interleave(first, second), mask=columns < 2 * row_bytes)


def dequantize_into(out_oi: Tensor, packed: Tensor, scales: Tensor, levels: Tensor) -> None:
    """`out_oi` may be columns of something wider."""
    rows, row_bytes = out_oi.shape[0], out_oi.shape[1] // 2
    _dequantize_kernel[(rows, triton.cdiv(row_bytes, BLOCK))](
        packed, scales, levels, out_oi, row_bytes, out_oi.stride(0), BLOCK=BLOCK, SHARED=SHARED, num_warps=4
    )
