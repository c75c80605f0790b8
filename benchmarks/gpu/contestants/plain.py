"""transformers: a plain loop, fp32 weights under autocast; `transformers-compiled` compiles the whole model."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.contestants import Job
from benchmarks.gpu.flops import flops_per_token, peak_flops
from benchmarks.gpu.rows import Row, measured
from benchmarks.gpu.timing import device, peak_gib, time_steps


def run(job: Job) -> Row:
    from transformers import AutoConfig, AutoModelForCausalLM

    flops = flops_per_token(job.point)
    torch.manual_seed(0)
    values = job.point.config()
    config = AutoConfig.for_model(values.pop("model_type"), **values, use_cache=False)
    with device():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()
    if job.contestant == "transformers-compiled":
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(tokens: Tensor) -> Tensor:
        inputs = tokens[:, :-1].contiguous()
        with torch.autocast(device().type, torch.bfloat16):
            loss: Tensor = model(input_ids=inputs, labels=inputs).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    timed = time_steps(step, job.point, vocabulary=config.vocab_size, steps=job.steps, warmup=job.warmup)
    return measured(
        job.contestant,
        job.point.name,
        timed.step_s,
        tokens=job.point.tokens,
        flops_per_token=flops,
        peak_flops=peak_flops(),
        peak_gib=peak_gib(),
        loss=timed.loss,
        first_step_s=timed.first_step_s,
    )
