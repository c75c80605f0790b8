"""Matrix products through cuBLASLt, with the algorithm chosen by us: torch always takes the first that it is offered.

Row-major [M, K] times [K, N]; either side may be stored transposed. bf16 in and out, fp32 sums.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORKSPACE = 32 << 20
OFFERS = 16  # algorithms to ask for; on Hopper it names 8
ALIGNMENT = 256  # bytes: what the algorithms may rely on unless they are told otherwise

# Numbers of cublasLt.h, cublas_api.h and library_types.h.
COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF = 68, 0, 14
TRANSPOSE_A, TRANSPOSE_B, MAX_WORKSPACE_BYTES = 3, 4, 1


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Offer(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class CublasError(RuntimeError):
    pass


@dataclass(frozen=True)
class Shape:
    """Of the product; `a` lies in memory as [M, K], or as [K, M] if it is transposed, `b` as [K, N] or [N, K]."""

    m: int
    n: int
    k: int
    a_transposed: bool
    b_transposed: bool

    @classmethod
    def of(cls, a: Tensor, b: Tensor, a_transposed: bool, b_transposed: bool) -> Shape:
        m, k = reversed(a.shape) if a_transposed else a.shape
        return cls(m, b.shape[0] if b_transposed else b.shape[1], k, a_transposed, b_transposed)


class Algorithm:
    """One of the library's algorithms for one shape."""

    def __init__(self, problem: Problem, offer: _Offer) -> None:
        self._problem, self._offer = problem, offer

    def run(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        problem = self._problem
        stream = torch.cuda.current_stream(out.device).cuda_stream
        _call(
            "cublasLtMatmul",
            _handle(out.device.index),
            problem.operation,
            ctypes.byref(problem.one),
            _pointer(b),  # the library's matrices are column-major: it computes the transpose from the two transposes
            problem.b,
            _pointer(a),
            problem.a,
            ctypes.byref(problem.zero),
            _pointer(out),
            problem.out,
            _pointer(out),
            problem.out,
            ctypes.byref(self._offer.algorithm),
            _pointer(_workspace(out.device, stream)),
            ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(stream),
        )


class Problem:
    """The library's descriptions of one shape. They are small and live as long as the process."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self.operation = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.operation), COMPUTE_32F, CUDA_R_32F)
        for attribute, transposed in ((TRANSPOSE_A, shape.b_transposed), (TRANSPOSE_B, shape.a_transposed)):
            value = ctypes.c_int32(transposed)
            _call(
                "cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.byref(value), ctypes.sizeof(value)
            )
        self.b = _layout(*((shape.k, shape.n) if shape.b_transposed else (shape.n, shape.k)))
        self.a = _layout(*((shape.m, shape.k) if shape.a_transposed else (shape.k, shape.m)))
        self.out = _layout(shape.n, shape.m)
        self.device = device

    def algorithms(self) -> Iterator[Algorithm]:
        preference, room = ctypes.c_void_p(), ctypes.c_uint64(WORKSPACE)
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            _call("cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE_BYTES, ctypes.byref(room), 8)
            offers, count = (_Offer * OFFERS)(), ctypes.c_int()
            _call(
                "cublasLtMatmulAlgoGetHeuristic",
                _handle(self.device.index),
                self.operation,
                self.b,
                self.a,
                self.out,
                self.out,
                preference,
                OFFERS,
                offers,
                ctypes.byref(count),
            )
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        for offer in offers[: count.value]:
            if offer.state == 0 and offer.workspace <= WORKSPACE:
                yield Algorithm(self, offer)


def aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


@functools.cache
def _library() -> Any:
    """The copy that torch has loaded already."""
    major = str(torch.version.cuda).partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as error:
        raise CublasError(str(error)) from None


@functools.cache
def _handle(_device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@functools.cache
def _workspace(device: torch.device, _stream: int) -> Tensor:
    """One for each stream: two products at once must not share it."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def _layout(rows: int, columns: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), CUDA_R_16BF, *sizes)
    return layout


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise CublasError(f"{name} answers with status {status}")
