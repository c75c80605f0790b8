"""Bring weights back from 4 bits in one pass: half a byte read and one number written for each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # bytes of a program, two weights each


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    packed,
    scales,
    levels,
    out,
    num_bytes,
    width,
    out_stride,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A byte holds two neighbours of a row; 64 weights that follow each other share a scale."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_bytes
    pair = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + at // 32, mask=inside, other=0.0)
    first = tl.load(levels + (pair >> 4)) * scale
    second = tl.load(levels + (pair & 15)) * scale
    weight = 2 * at
    place = (weight // width) * out_stride + weight % width
    both = tl.interleave(first, second)
    places = tl.interleave(place, place + 1)
    there = tl.interleave(inside, inside)
    tl.store(out + places, both, mask=there)


def dequantize_into(out_oi: Tensor, packed: Tensor, scales: Tensor, levels: Tensor) -> None:
    """`out_oi` may be columns of something wider."""
    count = packed.numel()
    _dequantize_kernel[(triton.cdiv(count, BLOCK),)](
        packed, scales, levels, out_oi, count, out_oi.shape[1], out_oi.stride(0), BLOCK=BLOCK, num_warps=4
    )
