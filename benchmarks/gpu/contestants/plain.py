"""transformers' own model in a plain loop under autocast; `peft` puts LoRA beside every projection of it in bf16.

`transformers-compiled` compiles the whole model, `peft-compiled` each block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.contestants import Job
from benchmarks.gpu.flops import flops_per_token, peak_flops
from benchmarks.gpu.rows import Row, measured
from benchmarks.gpu.timing import Step, device, peak_gib, time_steps

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def run(job: Job) -> Row:
    flops = flops_per_token(job.point)
    model = build_model(job)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(tokens: Tensor) -> Tensor:
        inputs = tokens[:, :-1].contiguous()
        with torch.autocast(device().type, torch.bfloat16):
            loss: Tensor = model(input_ids=inputs, labels=inputs).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return timed_row(job, step, flops_per_token=flops)


def build_model(job: Job) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    adapters = job.contestant.startswith("peft")
    torch.manual_seed(0)
    values = job.point.config()
    config = AutoConfig.for_model(values.pop("model_type"), **values, use_cache=False)
    dtype = torch.bfloat16 if adapters else torch.float32
    with device():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).train()
    if adapters:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=job.point.lora, lora_alpha=16, target_modules=PROJECTIONS))
    if job.contestant == "transformers-compiled":
        model.compile()
    elif job.contestant == "peft-compiled":
        for block in model.get_base_model().model.layers:
            block.compile()
    return model


def timed_row(job: Job, step: Step, *, flops_per_token: float) -> Row:
    """Time a contestant's step on random tokens."""
    vocabulary = job.point.config()["vocab_size"]
    timed = time_steps(step, job.point, vocabulary=vocabulary, steps=job.steps, warmup=job.warmup)
    return measured(
        job.contestant,
        job.point.name,
        timed.step_s,
        tokens=job.point.tokens,
        flops_per_token=flops_per_token,
        peak_flops=peak_flops(),
        peak_gib=peak_gib(),
        loss=timed.loss,
        first_step_s=timed.first_step_s,
    )
