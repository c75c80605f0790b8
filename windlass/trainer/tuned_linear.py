"""Linear layers whose three matrix products run by the fastest algorithm that gives the same bits as torch's choice.

cuBLAS picks an algorithm by rules; on an H200 the tenth best of its own offers is sometimes a tenth faster. The first
time a shape is met, all are timed on the tensors at hand. One whose result differs in a single bit is not taken, so a
run's numbers do not depend on what was chosen, nor on which rank or attempt chose it.
"""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.spec import Run
from windlass.trainer.kernels.cublas import Algorithm, CublasError, Problem, Shape, aligned
from windlass.trainer.model import blocks
from windlass.trainer.ranks import Ranks

log = logging.getLogger(__name__)

ROUNDS, REPEATS = 5, 2  # contenders take turns: the clock of a warm GPU drifts
WORTHWHILE = 0.985  # of the first choice's time; less is noise
MOST_SHAPES = 64  # a run whose shapes change all the time tunes no further


@dataclass(frozen=True)
class Choice:
    algorithm: Algorithm | None  # None: as torch does it
    seconds: float = 0.0
    first_choice_seconds: float = 0.0


_choices: dict[tuple[int, Shape], Choice] = {}


@torch.library.custom_op("windlass::product", mutates_args=(), device_types="cuda")
def product(a: Tensor, b: Tensor, a_transposed: bool, b_transposed: bool) -> Tensor:
    """`a @ b`, where either is stored transposed if it says so."""
    a, b = a.contiguous(), b.contiguous()
    shape = Shape.of(a, b, a_transposed, b_transposed)
    key = (a.device.index, shape)
    if key not in _choices and len(_choices) < MOST_SHAPES:
        _choices[key] = choose(a, b, shape)
    chosen = _choices.get(key)
    if chosen is None or chosen.algorithm is None or not aligned(a, b):
        return (a.T if a_transposed else a) @ (b.T if b_transposed else b)
    out = torch.empty((shape.m, shape.n), dtype=a.dtype, device=a.device)
    chosen.algorithm.run(a, b, out)
    return out


@product.register_kernel("cpu")
def plain(a: Tensor, b: Tensor, a_transposed: bool, b_transposed: bool) -> Tensor:
    return (a.T if a_transposed else a) @ (b.T if b_transposed else b)


@product.register_fake
def _(a: Tensor, b: Tensor, a_transposed: bool, b_transposed: bool) -> Tensor:
    return a.new_empty((a.shape[int(a_transposed)], b.shape[int(not b_transposed)]))


def choose(a: Tensor, b: Tensor, shape: Shape) -> Choice:
    """Time every algorithm that is offered and right to the last bit."""
    expected = plain(a, b, shape.a_transposed, shape.b_transposed)
    out = torch.empty_like(expected)
    if not aligned(a, b, out):
        return Choice(None)
    contenders: list[Algorithm] = []
    try:
        for algorithm in Problem(shape, a.device).algorithms():
            out.zero_()
            if succeeds(algorithm, a, b, out) and torch.equal(out, expected):
                contenders.append(algorithm)
    except CublasError as error:
        log.warning("matrix products run as torch chooses: %s", error)
    times: dict[Algorithm | None, list[float]] = {one: [] for one in (None, *contenders)}
    for _ in range(ROUNDS if contenders else 0):
        for contender, measured in times.items():
            measured.append(time_once(contender, a, b, out, shape))
    medians = {contender: statistics.median(measured) for contender, measured in times.items() if measured}
    fastest = min(medians, key=medians.__getitem__, default=None)
    if fastest is None or medians[fastest] > WORTHWHILE * medians[None]:
        return Choice(None, medians.get(None, 0.0), medians.get(None, 0.0))
    return Choice(fastest, medians[fastest], medians[None])


def succeeds(algorithm: Algorithm, a: Tensor, b: Tensor, out: Tensor) -> bool:
    try:
        algorithm.run(a, b, out)
    except CublasError:
        return False
    return True


def time_once(algorithm: Algorithm | None, a: Tensor, b: Tensor, out: Tensor, shape: Shape) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(REPEATS):
        if algorithm is None:
            torch.mm(a.T if shape.a_transposed else a, b.T if shape.b_transposed else b, out=out)
        else:
            algorithm.run(a, b, out)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / REPEATS


class LinearProducts(torch.autograd.Function):
    """Shapes: N tokens, I inputs, O outputs."""

    @staticmethod
    def forward(ctx: Any, x_ni: Tensor, weight_oi: Tensor) -> Tensor:
        ctx.save_for_backward(x_ni, weight_oi)
        out: Tensor = product(x_ni, weight_oi, False, True)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad_no,) = grad_outputs
        x_ni, weight_oi = ctx.saved_tensors
        grad_x_ni = product(grad_no, weight_oi, False, False) if ctx.needs_input_grad[0] else None
        grad_w_oi = product(grad_no, x_ni, True, False) if ctx.needs_input_grad[1] else None
        return grad_x_ni, grad_w_oi


class TunedLinear(nn.Linear):
    """A linear layer whose class says how it computes: one compiled block then serves all layers."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16 or self.weight.dtype != torch.bfloat16:
            return F.linear(x, self.weight)
        out: Tensor = LinearProducts.apply(x.reshape(-1, x.shape[-1]), self.weight)
        return out.reshape(*x.shape[:-1], -1)


def should_tune(run: Run, ranks: Ranks) -> bool:
    if run.train.tune_products is None:
        return ranks.device.type == "cuda" and run.train.precision == "bf16" and torch.version.hip is None
    return run.train.tune_products


def tune_products(model: nn.Module) -> None:
    """Let the blocks' plain linear layers choose; those that are anything else already are left alone."""
    for block in blocks(model).values():
        for module in block.modules():
            if type(module) is nn.Linear and module.bias is None:
                module.__class__ = TunedLinear


def say_what_was_chosen() -> None:
    """After the first step."""
    timed = [choice for choice in _choices.values() if choice.seconds]
    if not timed:
        return
    before, after = (sum(getattr(one, name) for one in timed) for name in ("first_choice_seconds", "seconds"))
    faster = sum(one.algorithm is not None for one in timed)
    log.info(
        "matrix products: another algorithm than cuBLAS's first for %d of %d shapes, %.1f %% less time, the same bits",
        faster,
        len(timed),
        100 * (1 - after / before),
    )
