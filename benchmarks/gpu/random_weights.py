"""A folder of random weights of a point's shape, for runs that begin with a model's own."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.gpu.points import Point


def random_weights(point: Point) -> Path:
    """Written once and kept: contestants at the same shape share it. bf16, as published models are."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(tempfile.gettempdir()) / "windlass-bench-gpu" / f"weights-{point.preset}"
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    values = point.config()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator(device).manual_seed(0)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, one) in enumerate(model.named_parameters()):
        values_of = torch.ones(one.shape, dtype=torch.bfloat16)
        if one.ndim > 1:
            drawn = torch.randn(one.shape, generator=draw, device=device, dtype=torch.bfloat16)
            values_of = (drawn * config.initializer_range).cpu()
        parts.setdefault(f"model-{number // 40:05d}.safetensors", {})[name] = values_of
    for file, tensors in parts.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(folder)
    return folder
