"""The checks, one function each: a sentence about what was seen, or an error that says what did not hold.

Below them, the processes that they start.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from .loaded import loaded_versions, mapped, ofi_plugin, same_version

Order = dict[str, Any]
TRAINING = re.compile(r"\b(torch\w*|nvidia-[\w-]+|triton|transformers|numpy)\b")
SMOKE_RUN = """\
model: {preset: llama-tiny}
data: {source: 'corpus:austen', sequence_length: 32}
train: {steps: 2, global_batch: 2, precision: fp32, compile: false}
checkpoint: {every: 2, background: false}
"""
START = (
    "import sys, importlib; sys.path.insert(0, sys.argv[1]); "
    "sys.exit(importlib.import_module(sys.argv[2]).main(sys.argv[3]))"
)
ON_CPUS = "resources: {gpus_per_node: 0, processes_per_node: 2}\n"


class NotHeldError(Exception):
    """A check that did not hold; the text is for the user."""


class NotPossibleError(Exception):
    """A check that cannot be made here; the text says why."""


def check_import(order: Order, name: str) -> str:
    if name != "torch" and name not in order["imports"] and importlib.util.find_spec(name) is None:
        raise NotPossibleError("not installed")
    module = importlib.import_module(name)
    return f"{name} {getattr(module, '__version__', '')}".strip()


def check_versions(order: Order) -> str:
    found = loaded_versions()
    order["loaded"].update(found)
    wrong = [
        f"{name} {found.get(name) or 'none'} is loaded, {asked} was asked for"
        for name, asked in sorted(order["expect"].items())
        if not same_version(found.get(name), asked)
    ]
    if wrong:
        raise NotHeldError("; ".join(wrong))
    return ", ".join(f"{name} {value}" for name, value in found.items() if value)


def check_one_nccl(order: Order) -> str:
    names = {str(distribution.metadata["Name"]).lower() for distribution in importlib.metadata.distributions()}
    wheels = sorted(name for name in names if re.fullmatch(r"nvidia[-_]nccl[-_]cu\d+", name))
    importlib.import_module("torch")
    libraries = mapped("libnccl.so")
    if len(wheels) > 1:
        raise NotHeldError(
            f"{len(wheels)} NCCL wheels write to the same folder, and the last one wins: {', '.join(wheels)}"
        )
    if len(libraries) > 1:
        raise NotHeldError(f"{len(libraries)} NCCL libraries are loaded at once: {', '.join(libraries)}")
    return libraries[0] if libraries else "none is loaded: torch is built without it"


def check_requirements(order: Order) -> str:
    """Only what training stands on: other packages may disagree with each other for years."""
    if importlib.util.find_spec("pip") is None:
        raise NotPossibleError("pip is not installed in the image")
    _, text = run_in(None, [sys.executable, "-m", "pip", "check"], os.environ, order["seconds"])
    lines = [line for line in text.splitlines() if "requirement" in line or "requires" in line]
    broken = [line for line in lines if not line.startswith("No broken")]
    serious = [line for line in broken if TRAINING.search(line)]
    if serious:
        raise NotHeldError("; ".join(serious[:5]))
    return f"pip check: {len(broken)} complaints, none about torch" if broken else "pip check: no broken requirements"


def check_ofi(order: Order) -> str:
    plugin, version = ofi_plugin()
    if plugin is None:
        raise NotHeldError("NCCL's plugin for EFA (libnccl-net*.so, aws-ofi-nccl) is nowhere: NCCL would use TCP")
    try:
        ctypes.CDLL(plugin)
    except OSError as error:
        raise NotHeldError(f"{plugin} cannot be loaded: {error}") from None
    return f"{plugin} {version or ''}".strip()


def check_cuda(order: Order) -> str:
    """One training step on the GPU; that torch sees none is a failure, for the container was given some."""
    import torch

    if not torch.cuda.is_available():
        raise NotHeldError(f"torch {torch.__version__} sees no GPU (built with CUDA {torch.version.cuda})")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    values = torch.randn(32, 64, device="cuda")
    losses = []
    for _ in range(2):
        loss = (model(values) - values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not losses[1] < losses[0]:
        raise NotHeldError(f"a step on the GPU does not lower the loss: {losses[0]:.4f} → {losses[1]:.4f}")
    return f"{torch.cuda.get_device_name()}: one step, loss {losses[0]:.4f} → {losses[1]:.4f}"


def check_model(order: Order) -> str:
    """A small model of the run's family, from its configuration: forward and backward."""
    import torch

    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 16))
    model: Any
    if importlib.util.find_spec("transformers") is not None:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = dict(order["model"])
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
        what = type(model).__name__
        loss = model(input_ids=tokens, labels=tokens).loss
    else:
        model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.TransformerEncoderLayer(32, 4, 64))
        what = "a layer of torch's own transformer (transformers is not installed)"
        loss = model(tokens).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    if not math.isfinite(loss.item()):
        raise NotHeldError(f"{what}: the loss is {loss.item()}")
    if any(gradient is None or not bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise NotHeldError(f"{what}: some gradients are missing or not finite")
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{what}, {size:,} parameters, loss {loss.item():.4f}, {len(gradients)} gradients finite"


def check_all_reduce(order: Order) -> str:
    """Two processes; over NCCL where there are two GPUs, over gloo otherwise."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            ourselves({"rank": rank, "port": port}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=order["seconds"])[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        raise NotHeldError(f"no answer after {order['seconds']} s: the processes do not find each other") from None
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    for rank, text in zip(ranks, texts, strict=True):
        if rank.returncode != 0:
            raise NotHeldError(f"a rank ended with {ending(rank.returncode)}: {last_lines(text)}")
    return texts[0].strip().splitlines()[-1]


def be_a_rank(rank: int, port: int) -> int:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= 2
    backend = "nccl" if on_gpus and dist.is_nccl_available() else "gloo"
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    value = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(value)
    right = bool((value == 3.0).all())
    dist.destroy_process_group()
    print(f"{backend}: 1 + 2 = {value[0].item():.0f} on both ranks")
    return 0 if right else 1


def check_smoke(order: Order) -> str:
    """The trainer of the image for two steps; or the command that the user named."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "WINDLASS_CACHE": folder, "WINDLASS_RUNS": os.path.join(folder, "runs")}
        if order["smoke"]:
            code, text = run_in(None, shlex.split(order["smoke"]), environment, order["seconds"])
            if code != 0:
                raise NotHeldError(f"{order['smoke']} ended with {ending(code)}: {last_lines(text)}")
            return f"{order['smoke']}: exit code 0"
        if importlib.util.find_spec("windlass") is None:
            raise NotHeldError("the image holds no windlass trainer, and no command was named with --smoke")
        with open(os.path.join(folder, "smoke.yaml"), "w") as file:
            file.write(SMOKE_RUN if glob.glob("/dev/nvidia[0-9]*") else SMOKE_RUN + ON_CPUS)
        command = [sys.executable, "-m", "windlass.cli.main", "run", "smoke.yaml", "--json"]
        code, text = run_in(folder, command, environment, order["seconds"])
        if code != 0:
            raise NotHeldError(f"windlass run ended with {ending(code)}: {last_lines(text)}")
        with open(os.path.join(folder, "runs", "smoke", "metrics.jsonl")) as file:
            steps = [record for record in map(json.loads, file) if "loss" in record]
    if not steps or steps[-1]["step"] != 2 or not math.isfinite(steps[-1]["loss"]):
        raise NotHeldError(f"windlass run left no finite loss of step 2: {steps[-1:]}")
    return f"windlass trained 2 steps, loss {steps[0]['loss']:.4f} → {steps[-1]['loss']:.4f}"


def ourselves(order: dict[str, Any]) -> list[str]:
    """The command of a child that does what `order` says, wherever this package has been put."""
    package = __package__ or ""
    root = os.path.abspath(__file__)
    for _ in range(package.count(".") + 2):
        root = os.path.dirname(root)
    return [sys.executable, "-c", START, root, f"{package}.proof", json.dumps(order)]


def run_in(
    folder: str | None, command: Sequence[str], environment: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    """Exit code and output; after `seconds`, the command and all its children are ended."""
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return 124, process.communicate()[0] + f"\nended after {seconds} s"
    return process.returncode, text


def ending(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}" if code != 124 else "no answer in time"


def last_lines(text: str, count: int = 4) -> str:
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-count:])
