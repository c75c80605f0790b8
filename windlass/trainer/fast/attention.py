"""Which attention a model computes with, and which kernel that really was.

transformers looks attention up by name in a table; ours is one more name in it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from windlass.plan.layout import Layout, not_hopper
from windlass.runfolder import RunFolder
from windlass.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)

PACKAGE = "flash-attn-4"
INSTALL = "pip install 'windlass[flash]'"
TOLERANCE = 0.02  # of the norm, against torch's own attention on the same bf16 numbers: both round a few times


def use_attention(model: Any, layout: Layout) -> None:
    """Set the attention that was chosen. Names of transformers' own were given when the model was made."""
    if layout.attention == "flash4":
        model.set_attn_implementation(registered(flash=True, documents=layout.packed))
    elif layout.attention in ("sdpa", "sdpa_causal"):
        model.set_attn_implementation(registered(flash=False, masked=layout.attention == "sdpa"))


DOCUMENTS = "windlass_fa4_documents"  # the name under which attention wants to know where documents begin


def wants_documents(model: Any) -> bool:
    return bool(model.config.get_text_config()._attn_implementation == DOCUMENTS)


def registered(*, flash: bool, masked: bool = False, documents: bool = False) -> str:
    """The attention's name in transformers' tables.

    Under a name for which no way to make a mask is known, transformers makes none. Otherwise it looks into the
    positions of every batch to see whether documents are packed there, and the host waits for the GPU once a step.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    # No "flash" in the name: transformers would look for a package that is called so.
    name = DOCUMENTS if documents else f"windlass_{'fa4' if flash else 'sdpa'}_{'masked' if masked else 'causal'}"
    ours = attend_within_documents if documents else attend
    AttentionInterface.register(name, ours if flash else sdpa_attention_forward)
    if masked:
        AttentionMaskInterface.register(name, sdpa_mask)
    return name


def obstacle_to_flash4(config: Any, ranks: Ranks, *, asked_by_name: bool, documents: bool) -> str:
    """Why flash-attn-4, which suits the model, does not run on this rank's device; empty where it does."""
    if ranks.device.type != "cuda":  # by name the plain twin computes the same, slowly
        return "" if asked_by_name else "there is no GPU"
    if torch.cuda.get_device_capability(ranks.device)[0] != 9:
        return not_hopper(torch.cuda.get_device_name(ranks.device))
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed and would be faster here: {INSTALL}"
    return broken(config, ranks, documents=documents)


def broken(config: Any, ranks: Ranks, *, documents: bool) -> str:
    """Compile its kernels now, and hold output and gradients against torch's own on a few random tokens."""
    try:
        difference = largest_difference(config, ranks.device, documents=documents)
    except Exception as error:  # a young package that compiles at run time: whatever is wrong, training goes on
        return f"{PACKAGE} does not work here: {type(error).__name__}: {str(error)[:300]}"
    if not difference < TOLERANCE:
        return f"{PACKAGE} differs from torch's own attention by {difference:.3g} of its norm"
    return ""


def largest_difference(config: Any, device: torch.device, *, documents: bool) -> float:
    """The largest relative difference of output and gradients; with `documents` over some of unequal length."""
    length, heads, groups = 384, config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    drawn = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn((1, count, length, head_size(config)), generator=drawn, device=device).bfloat16()
        for count in (heads, groups, groups, heads)
    )
    starts = [0, 1, length // 3, length // 2 + 1] if documents else [0]
    bounds = torch.tensor([*starts, length], dtype=torch.int32, device=device)

    def computed(attention: Any) -> list[Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = attention(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash4_bhtd(q, k, v, q.shape[-1] ** -0.5, bounds if documents else None)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], is_causal=True, enable_gqa=True
            )
            for begin, end in zip(starts, [*starts[1:], length], strict=True)
        ]
        return torch.cat(parts, dim=2)

    with torch.enable_grad():
        pairs = zip(computed(ours), computed(theirs), strict=True)
        return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def flash4_bhtd(query: Tensor, key: Tensor, value: Tensor, scale: float, bounds: Tensor | None = None) -> Tensor:
    """The operator for tensors whose heads come before their tokens, as transformers and torch have them.

    `bounds` are those of documents in the tokens of all sequences together.
    """
    from windlass.trainer.fast.kernels.flash4 import flash4, flash4_documents

    q_bthd, k_btgd, v_btgd = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if bounds is None:
        out_bthd: Tensor = flash4(q_bthd, k_btgd, v_btgd, scale)[0]
    else:
        flat = (tensor.flatten(0, 1) for tensor in (q_bthd, k_btgd, v_btgd))
        out_bthd = flash4_documents(*flat, bounds, q_bthd.shape[1], scale)[0].view(q_bthd.shape)
    return out_bthd.transpose(1, 2)


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def attend(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    documents: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """transformers' calling convention: [B, H, T, D] in, [B, T, H, D] out. `documents` are bounds, as above."""
    if attention_mask is not None or dropout:
        raise RuntimeError("this attention takes no mask and no dropout; use_attention should not have chosen it")
    if torch.is_autocast_enabled(query.device.type):  # rotated in fp32 there; torch's own attention casts by itself
        query, key, value = (tensor.to(torch.get_autocast_dtype(tensor.device.type)) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return flash4_bhtd(query, key, value, scale, documents).transpose(1, 2).contiguous(), None


def attend_within_documents(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    if others.get("documents") is None:
        raise RuntimeError("the bounds of documents did not reach attention: one document would see another")
    return attend(module, query, key, value, attention_mask, **others)


KERNELS = (  # what attention kernels are called by whom, told by their names on the device
    ("flash-attn-4", re.compile(r"flash_attncute|FlashAttention(For|Back)ward", re.IGNORECASE)),
    ("cuDNN", re.compile(r"cudnn.*(sdpa|fmha|flash)", re.IGNORECASE)),
    ("torch's flash", re.compile(r"pytorch_flash|flash_(fwd|bwd)", re.IGNORECASE)),
    ("torch's memory-efficient", re.compile(r"fmha_cutlass|efficient_attention", re.IGNORECASE)),
    ("flex attention", re.compile(r"flex_attention|triton_tem", re.IGNORECASE)),
)


@contextlib.contextmanager
def naming_attention(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Log which attention kernels ran inside, as the GPU's own trace has them."""
    if not ranks.is_first or ranks.device.type != "cuda":
        yield
        return
    trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
    try:
        trace.start()
    except RuntimeError as error:  # a trace is worth a line in the log, not a run
        log.warning("which attention kernels run is not known, the GPU cannot be traced: %s", error)
        yield
        return
    try:
        yield
        torch.cuda.synchronize(ranks.device)
    finally:
        trace.stop()
    events = trace.events() or ()  # type: ignore[no-untyped-call]
    by_maker = attention_kernels({event.name for event in events})
    for maker, names in by_maker.items():
        log.info("attention by %s: %s", maker, ", ".join(name[:100] for name in names))
    if not by_maker:
        log.warning("no attention kernel in the GPU's trace of the first step: plain products, or nothing was traced")
    folder.record("attention", kernels=by_maker)


def attention_kernels(names: Iterable[str]) -> dict[str, list[str]]:
    by_maker: dict[str, list[str]] = {}
    for name in sorted(names):
        maker = next((maker for maker, pattern in KERNELS if pattern.search(name)), None)
        if maker:
            by_maker.setdefault(maker, []).append(name)
    return by_maker
