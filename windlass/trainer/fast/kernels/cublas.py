"""A matrix product that adds its result to another matrix, in one pass and out of place, through cuBLASLt.

torch's own `addmm` copies that matrix first. The sum is taken in fp32, before anything is rounded.
Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

WORKSPACE = 32 << 20
ALIGNMENT = 256  # bytes: what the library's algorithms may rely on unless they are told otherwise
TOLERANCE = 0.01  # of the norm, against torch's own; both round once to bf16

# Numbers of cublasLt.h, cublas_api.h and library_types.h.
COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF = 68, 0, 14
TRANSPOSE_A, MAX_WORKSPACE_BYTES = 3, 1


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


class Product:
    """`a_ni @ weight_oi.T + added_no` of one size, with the algorithm that the library advises.

    Its matrices are column-major: to it, `weight_oi` is [I, O] and transposed, `a_ni` is [I, N], the result [O, N].
    """

    def __init__(self, tokens: int, inputs: int, outputs: int) -> None:
        self._one = ctypes.c_float(1.0)
        self._operation, transposed = ctypes.c_void_p(), ctypes.c_int32(1)
        _call("cublasLtMatmulDescCreate", ctypes.byref(self._operation), COMPUTE_32F, CUDA_R_32F)
        _call("cublasLtMatmulDescSetAttribute", self._operation, TRANSPOSE_A, ctypes.byref(transposed), 4)
        self._weight, self._a = _layout(inputs, outputs), _layout(inputs, tokens)
        self._out = _layout(outputs, tokens)
        self._algorithm: _Algorithm | None = None

    def advised(self, device: torch.device) -> _Algorithm:
        if self._algorithm is None:
            preference, room = ctypes.c_void_p(), ctypes.c_uint64(WORKSPACE)
            _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
            _call("cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE_BYTES, ctypes.byref(room), 8)
            offer, count = _Offer(), ctypes.c_int()
            layouts = self._weight, self._a, self._out, self._out
            results = ctypes.byref(offer), ctypes.byref(count)
            arguments = _handle(device), self._operation, *layouts, preference, 1, *results
            try:
                _call("cublasLtMatmulAlgoGetHeuristic", *arguments)
            finally:
                _call("cublasLtMatmulPreferenceDestroy", preference)
            if count.value < 1 or offer.state:
                raise CublasError("the library knows no algorithm")
            self._algorithm = offer.algorithm
        return self._algorithm

    def run(self, a_ni: Tensor, weight_oi: Tensor, added_no: Tensor) -> Tensor:
        out_no = torch.empty_like(added_no)
        stream = torch.cuda.current_stream(out_no.device).cuda_stream
        _call(
            "cublasLtMatmul",
            _handle(out_no.device),
            self._operation,
            ctypes.byref(self._one),
            _pointer(weight_oi),
            self._weight,
            _pointer(a_ni),
            self._a,
            ctypes.byref(self._one),
            _pointer(added_no),
            self._out,
            _pointer(out_no),
            self._out,
            ctypes.byref(self.advised(out_no.device)),
            _pointer(_workspace(out_no.device, stream)),
            ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(stream),
        )
        return out_no


@torch.library.custom_op("windlass::product_plus", mutates_args=(), device_types="cuda")
def product_plus(a_ni: Tensor, weight_oi: Tensor, added_no: Tensor) -> Tensor:
    """`a_ni @ weight_oi.T + added_no`."""
    a_ni, weight_oi, added_no = a_ni.contiguous(), weight_oi.contiguous(), added_no.contiguous()
    fits = all(
        tensor.dtype == torch.bfloat16 and tensor.data_ptr() % ALIGNMENT == 0 for tensor in (a_ni, weight_oi, added_no)
    )
    product = checked_product(a_ni, weight_oi, added_no) if fits else None
    if product is None:
        return torch.addmm(added_no, a_ni, weight_oi.T)
    return product.run(a_ni, weight_oi, added_no)


@product_plus.register_kernel("cpu")
def _(a_ni: Tensor, weight_oi: Tensor, added_no: Tensor) -> Tensor:
    return torch.addmm(added_no, a_ni, weight_oi.T)


@product_plus.register_fake
def _(a_ni: Tensor, weight_oi: Tensor, added_no: Tensor) -> Tensor:
    return torch.empty(added_no.shape, dtype=added_no.dtype, device=added_no.device)


_products: dict[tuple[int, ...], Product | None] = {}


def checked_product(a_ni: Tensor, weight_oi: Tensor, added_no: Tensor) -> Product | None:
    """The product of this size; None where it does not do what torch's own does, seen when a size is met first."""
    key = (a_ni.device.index, *a_ni.shape, *weight_oi.shape)
    if key not in _products:
        theirs = torch.addmm(added_no, a_ni, weight_oi.T)
        if not bool(theirs.isfinite().all()):
            return None  # nothing to compare with; the next batch decides
        product = None
        try:
            product = Product(a_ni.shape[0], *reversed(weight_oi.shape))
            check_equal(product.run(a_ni, weight_oi, added_no), theirs)
        except CublasError as error:
            log.warning("sums are not folded into products of %s: %s", key[1:], error)
            product = None
        _products[key] = product
    return _products[key]


def check_equal(ours: Tensor, theirs: Tensor) -> None:
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-30))
    if not difference <= TOLERANCE:  # not a number is not within it
        raise CublasError(f"its result differs by {difference:.3g} of the norm")


@functools.cache
def _library() -> Any:
    """The copy that torch has loaded already."""
    major = str(torch.version.cuda).partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as error:
        raise CublasError(str(error)) from None


@functools.cache
def _handle(_device: torch.device) -> ctypes.c_void_p:
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
