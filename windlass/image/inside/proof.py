"""Prove an image from inside: one file that needs the standard library alone. `testing` carries it in.

Every group of checks has its own process: a crash is then a failed check, not a lost report. It can be run by itself:

    python proof.py '{"level": "standard", "gpus": true}'
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
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Order = dict[str, Any]
MARK = "@windlass "
# Imported where they are installed: one that is there and cannot be imported will fail on the nodes.
IF_INSTALLED = (
    *("transformers", "datasets", "safetensors", "tokenizers", "numpy", "pyarrow", "triton", "torchvision"),
    *("torchaudio", "flash_attn", "xformers", "bitsandbytes", "deepspeed", "apex", "transformer_engine", "peft"),
    *("accelerate", "hyperpod_elastic_agent", "windlass"),
)
SMALL_MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
DEFAULTS: Order = {
    "level": "standard",
    "imports": [],  # modules that must be there, beside torch
    "expect": {},  # name → version that must be loaded
    "efa": False,
    "gpus": False,  # the container was given GPUs, so CUDA must work
    "smoke": "",
    "model": SMALL_MODEL,
    "seconds": 900,
}
TRAINING = re.compile(r"\b(torch\w*|nvidia-[\w-]+|triton|transformers|numpy)\b")
SMOKE_RUN = """\
model: {preset: llama-tiny}
data: {source: 'corpus:austen', sequence_length: 32}
train: {steps: 2, global_batch: 2, precision: fp32, compile: false}
checkpoint: {every: 2, background: false}
"""
ON_CPUS = "resources: {gpus_per_node: 0, processes_per_node: 2}\n"
PLACES = (
    "/opt/amazon/ofi-nccl/lib*",
    "/opt/amazon/ofi-nccl/lib/*",
    "/opt/aws-ofi-nccl/lib*",
    "/opt/amazon/efa/lib*",
    "/usr/local/lib",
    "/usr/lib",
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
)


def groups(order: Order) -> Iterator[list[str]]:
    """Which checks share a process."""
    yield [f"import {name}" for name in dict.fromkeys(["torch", *order["imports"], *IF_INSTALLED])]
    yield ["versions", "one-nccl", *(["ofi"] if order["efa"] else [])]
    yield ["requirements"]
    if order["gpus"]:
        yield ["cuda"]
    if order["level"] in ("standard", "full"):
        yield ["model"]
        yield ["all-reduce"]
    if order["level"] == "full":
        yield ["smoke"]


def perform(order: Order) -> None:
    """In the child: each check is announced before it begins, so that a crash has a name."""
    for name in order["checks"]:
        emit({"begin": name})
        order["loaded"] = {}
        begin = time.perf_counter()
        result: dict[str, Any] = {"name": name, "status": "passed", "evidence": ""}
        try:
            if name.startswith("import "):
                result["detail"] = check_import(order, name.partition(" ")[2])
            else:
                result["detail"] = CHECKS[name](order)
        except NotPossibleError as reason:
            result |= {"status": "skipped", "detail": str(reason)}
        except NotHeldError as reason:
            result |= {"status": "failed", "detail": str(reason)}
        except BaseException as error:
            detail = f"{type(error).__name__}: {error}"
            result |= {"status": "failed", "detail": detail, "evidence": traceback.format_exc()[-4000:]}
        result["seconds"] = round(time.perf_counter() - begin, 3)
        emit(result | {"loaded": order["loaded"]})


def run_group(order: Order, names: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Results of one child, and the versions it saw. Where it ends too early, the check that it was at has failed."""
    code, text = run_in(None, ourselves({**order, "checks": names}), os.environ, order["seconds"])
    results: list[dict[str, Any]] = []
    loaded: dict[str, Any] = {}
    begun = None
    for line in text.splitlines():
        if not line.startswith(MARK):
            continue
        said = json.loads(line.removeprefix(MARK))
        begun = said.get("begin")
        if begun is None:
            loaded |= said.pop("loaded")
            results.append(said)
    if begun or code != 0:
        others = "\n".join(line for line in text.splitlines() if not line.startswith(MARK))
        lost = {"name": begun or names[-1], "status": "failed", "detail": f"the process ended with {ending(code)}"}
        results.append({**lost, "evidence": others[-4000:], "seconds": None})
    return results, loaded


def prove(order: Order) -> dict[str, Any]:
    begin = time.time()
    results: list[dict[str, Any]] = []
    loaded: dict[str, Any] = {}
    for names in groups(order):
        group, versions = run_group(order, names)
        results += group
        loaded |= versions
        for check in group:
            print(f"{check['status']:<8} {check['name']}: {check['detail']}", file=sys.stderr, flush=True)
    return {
        "level": order["level"],
        "passed": not any(result["status"] == "failed" for result in results),
        "machine": platform.machine(),
        "loaded": loaded,
        "seconds": round(time.time() - begin, 1),
        "checks": results,
    }


def emit(value: dict[str, Any]) -> None:
    print("\n" + MARK + json.dumps(value), flush=True)


def main(text: str = "{}") -> int:
    """`text`: the order, as JSON. The report is the last line of stdout."""
    order: Order = DEFAULTS | json.loads(text)
    if "rank" in order:
        return be_a_rank(order["rank"], order["port"])
    if "checks" in order:
        perform(order)
        return 0
    report = prove(order)
    print(json.dumps(report))
    return 0 if report["passed"] else 1


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
    """A small model of the run's family, from its configuration: forward and backward; on the GPU, if any."""
    import torch

    torch.manual_seed(0)
    device = "cuda" if order["gpus"] else "cpu"
    tokens = torch.randint(0, 64, (2, 16), device=device)
    model: Any
    if importlib.util.find_spec("transformers") is not None:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = dict(order["model"])
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
        model = model.to(device)
        what = type(model).__name__
        loss = model(input_ids=tokens, labels=tokens).loss
    else:
        model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.TransformerEncoderLayer(32, 4, 64)).to(device)
        what = "a layer of torch's own transformer (transformers is not installed)"
        loss = model(tokens).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    if not math.isfinite(loss.item()):
        raise NotHeldError(f"{what}: the loss is {loss.item()}")
    if any(gradient is None or not bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise NotHeldError(f"{what}: some gradients are missing or not finite")
    size = sum(parameter.numel() for parameter in model.parameters())
    what += " on the GPU" if order["gpus"] else ""
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


def ourselves(order: Order) -> list[str]:
    """The command of a child that does what `order` says."""
    return [sys.executable, os.path.abspath(__file__), json.dumps(order)]


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


CHECKS: dict[str, Callable[[Order], str]] = {
    "versions": check_versions,
    "one-nccl": check_one_nccl,
    "ofi": check_ofi,
    "requirements": check_requirements,
    "cuda": check_cuda,
    "model": check_model,
    "all-reduce": check_all_reduce,
    "smoke": check_smoke,
}


def loaded_versions() -> dict[str, str | None]:
    import torch

    cuda_runtime = number_from("libcudart", "cudaRuntimeGetVersion")
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": f"{cuda_runtime // 1000}.{cuda_runtime % 1000 // 10}"
        if cuda_runtime
        else getattr(getattr(torch, "version", None), "cuda", None),
        "nccl": _dotted(number_from("libnccl.so", "ncclGetVersion")),
        "cudnn": cudnn_version(torch),
        "libfabric": libfabric_version(),
        "ofi": ofi_plugin()[1],
    }
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_available():
        found["gpu"] = f"{cuda.device_count()} × {cuda.get_device_name(0)}"
    return found


def same_version(found: str | None, asked: str) -> bool:
    """2.15 is met by 2.15.0+cu132; 2.15.0 is not met by 2.15.1; cpu is met by no CUDA at all."""
    if found is None:
        return asked in ("cpu", "none")
    have, wanted = (text.split("+")[0].split(".") for text in (found, asked))
    return have[: len(wanted)] == wanted


def number_from(library: str, function: str) -> int:
    """The version that a loaded library says of itself; 0 where it is not loaded."""
    number = ctypes.c_int()
    for path in mapped(library):
        if getattr(ctypes.CDLL(path), function)(ctypes.byref(number)) == 0:
            return number.value
    return 0


def cudnn_version(torch: Any) -> str | None:
    try:
        return _dotted(torch.backends.cudnn.version() or 0)
    except (AttributeError, RuntimeError):
        return None


def libfabric_version() -> str | None:
    for path in find_libraries("libfabric.so*"):
        try:
            value = ctypes.CDLL(path).fi_version()
        except (OSError, AttributeError):
            continue
        return f"{value >> 16}.{value & 0xFFFF}"
    return None


def ofi_plugin() -> tuple[str | None, str | None]:
    """The file of NCCL's EFA plugin, and the version that is written in it."""
    for path in find_libraries("libnccl-net*.so*"):
        with open(path, "rb") as file:
            found = re.search(rb"aws-ofi-nccl[ /_-]v?(\d+\.\d+\.\d+)", file.read())
        return path, found.group(1).decode() if found else None
    return None, None


def find_libraries(pattern: str) -> list[str]:
    folders = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part] + list(PLACES)
    found = [path for folder in folders for path in sorted(glob.glob(os.path.join(folder, pattern)))]
    return list(dict.fromkeys(map(os.path.realpath, found)))


def mapped(name: str) -> list[str]:
    """Libraries of this process whose file name begins so."""
    with open("/proc/self/maps") as file:
        paths = [line.split(None, 5)[5].strip() for line in file if "/" in line]
    return sorted({path for path in paths if os.path.basename(path).startswith(name)})


def _dotted(number: int) -> str | None:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else None


if __name__ == "__main__":
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path[0] = ""  # as for `python -m`, which starts ranks: modules in the image's working folder are found
    sys.exit(main(*sys.argv[1:]))
