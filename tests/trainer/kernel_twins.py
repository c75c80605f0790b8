"""Compare the Triton kernels with their plain twins, on the CPU. Run with TRITON_INTERPRET=1 set before it starts."""

from __future__ import annotations

import torch

from windlass.trainer.fast import lean_parts
from windlass.trainer.fast.head import cross_entropy_in_place as plain_cross_entropy
from windlass.trainer.fast.kernels import nf4 as four_bits
from windlass.trainer.fast.kernels import norm, rotary, swiglu
from windlass.trainer.fast.kernels.adamw import adamw_step
from windlass.trainer.fast.kernels.cross_entropy import cross_entropy_in_place
from windlass.trainer.model import nf4
from windlass.trainer.model.structure import IGNORED


def compare_cross_entropy(rows: int, classes: int) -> None:
    logits = torch.randn(rows, classes) * 5
    labels = torch.randint(0, classes, (rows,))
    labels[rows // 2] = IGNORED
    ours, theirs = logits.clone(), logits.clone()
    losses = cross_entropy_in_place(ours, labels, IGNORED, 0.25)
    torch.testing.assert_close(losses, plain_cross_entropy(theirs, labels, 0.25), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not ours[rows // 2].any()


def compare_adamw(size: int, healthy: float) -> None:
    master = torch.randn(size)
    twin = torch.nn.Parameter(master.clone())
    before = master.clone()
    first, second = torch.zeros(size), torch.zeros(size)
    optimizer = torch.optim.AdamW([twin], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 4):
        gradient = torch.randn(size)
        scalars = torch.tensor([0.5, 1e-2, 1 - 0.9**step, 1 - 0.95**step, healthy])
        weight = torch.zeros(size)
        adamw_step(weight, gradient, master, first, second, scalars, decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8)
        twin.grad = gradient * 0.5
        optimizer.step()
        assert torch.equal(weight, master if healthy else torch.zeros(size))
    torch.testing.assert_close(master, twin.detach() if healthy else before, rtol=1e-5, atol=1e-6)
    if not healthy:
        assert not first.any()


def compare_norms(rows: int, width: int) -> None:
    x, added = (torch.randn(rows, width) for _ in range(2))
    weight, wide = torch.randn(width), torch.full((rows, width + 3), 7.0)
    grad = torch.randn(rows, width + 3)[:, :width]
    torch.testing.assert_close(norm.norm(x, weight, 1e-5), lean_parts.norm(x, weight, 1e-5))
    norm.norm(x, weight, 1e-5, out_nd=wide[:, :width])
    torch.testing.assert_close(wide[:, :width], lean_parts.norm(x, weight, 1e-5))
    assert (wide[:, width:] == 7.0).all()
    ours = norm.norm_backward(grad, added, x, weight, 1e-5)
    theirs = lean_parts.norm_backward(grad, added, x, weight, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def compare_rotations(heads: int, groups: int, size: int, *, restarting: bool) -> None:
    """Angles for each token of each sequence, where places restart, or for the places of any sequence."""
    grads = [torch.randn(2, 5, count, size) for count in (heads, groups, groups)]
    cos, sin = torch.randn(2, 2 if restarting else 1, 5, size)
    torch.testing.assert_close(rotary.rotate_backward(*grads, cos, sin), lean_parts.rotate_backward(*grads, cos, sin))


def compare_swiglu(rows: int, width: int) -> None:
    grad, gate_up = torch.randn(rows, width + 3)[:, :width], torch.randn(rows, 2 * width)
    torch.testing.assert_close(swiglu.swiglu_backward(grad, gate_up), lean_parts.swiglu_backward(grad, gate_up))
    out = torch.full((rows, width + 3), 7.0)
    swiglu.swiglu(gate_up, out[:, :width])
    gate, up = gate_up.chunk(2, dim=1)
    torch.testing.assert_close(out[:, :width], torch.nn.functional.silu(gate) * up)
    assert (out[:, width:] == 7.0).all()


def compare_four_bits(outputs: int, inputs: int) -> None:
    packed, scales = nf4.quantize(torch.randn(outputs, inputs))
    wide = torch.full((outputs, inputs + 5), 7.0)
    four_bits.dequantize_into(wide[:, :inputs], packed, scales, torch.tensor(nf4.LEVELS))
    assert torch.equal(wide[:, :inputs], nf4.dequantize(packed, scales, outputs, inputs, torch.float32))
    assert (wide[:, inputs:] == 7.0).all()


if __name__ == "__main__":
    torch.manual_seed(0)
    for rows, classes in ((5, 1000), (3, 2048), (4, 5001)):
        compare_cross_entropy(rows, classes)
    for size in (7, 1024, 3000):
        compare_adamw(size, 1.0)
    compare_adamw(1500, 0.0)
    for rows, width in ((1, 64), (9, 48), (700, 33)):
        compare_norms(rows, width)
        compare_swiglu(min(rows, 9), width * 23)
    compare_four_bits(6, 64)
    compare_four_bits(40, 192)
    compare_rotations(4, 2, 8, restarting=True)
    compare_rotations(3, 3, 12, restarting=False)
    print("kernels agree")
