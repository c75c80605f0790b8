"""peft: LoRA beside every projection of transformers' own model in bf16; `peft-compiled` compiles each block."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.contestants import Job
from benchmarks.gpu.flops import flops_per_token, peak_flops
from benchmarks.gpu.rows import Row, measured
from benchmarks.gpu.timing import device, peak_gib, time_steps

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def run(job: Job) -> Row:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    flops = flops_per_token(job.point)
    torch.manual_seed(0)
    values = job.point.config()
    config = AutoConfig.for_model(values.pop("model_type"), **values, use_cache=False)
    with device():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).train()
    model = get_peft_model(model, LoraConfig(r=job.point.lora, lora_alpha=16, target_modules=PROJECTIONS))
    if job.contestant == "peft-compiled":
        for block in model.get_base_model().model.layers:
            block.compile()
    trained = [one for one in model.parameters() if one.requires_grad]
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
