"""A tensor in fp8 by rows and by columns: read once, written twice.

What torch.compile makes of it reads the numbers once more to turn them round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128


@triton.jit  # type: ignore[untyped-decorator]
def _both_layouts_kernel(  # type: ignore[no-untyped-def]
    x,
    scale,
    by_rows,
    by_columns,
    rows,
    width,
    LARGEST: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    here = row[:, None] * width + column[None, :]
    value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) * (1.0 / tl.load(scale))
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST).to(by_rows.dtype.element_ty)
    tl.store(by_rows + here, value, mask=inside)
    turned = column[:, None] * rows + row[None, :]
    tl.store(by_columns + turned, tl.trans(value), mask=(column < width)[:, None] & (row < rows)[None, :])


def in_both_layouts(x_nd: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, width = x_nd.shape
    by_rows = torch.empty(rows, width, dtype=dtype, device=x_nd.device)
    by_columns = torch.empty(width, rows, dtype=dtype, device=x_nd.device)
    grid = triton.cdiv(rows, TILE), triton.cdiv(width, TILE)
    largest = torch.finfo(dtype).max
    _both_layouts_kernel[grid](x_nd, scale, by_rows, by_columns, rows, width, LARGEST=largest, TILE=TILE, num_warps=8)
    return by_rows, by_columns
