"""Make the checks of a level, every group in its own process: a crash is then a failed check, not a lost report."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from . import checks
from .checks import NotHeldError, NotPossibleError, Order, ending, ourselves, run_in

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
CHECKS: dict[str, Callable[[Order], str]] = {
    "versions": checks.check_versions,
    "one-nccl": checks.check_one_nccl,
    "ofi": checks.check_ofi,
    "requirements": checks.check_requirements,
    "cuda": checks.check_cuda,
    "model": checks.check_model,
    "all-reduce": checks.check_all_reduce,
    "smoke": checks.check_smoke,
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
                result["detail"] = checks.check_import(order, name.partition(" ")[2])
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


def main(text: str) -> int:
    """`text`: the order, as JSON. The report is the last line of stdout."""
    order: Order = DEFAULTS | json.loads(text)
    if "rank" in order:
        return checks.be_a_rank(order["rank"], order["port"])
    if "checks" in order:
        perform(order)
        return 0
    report = prove(order)
    print(json.dumps(report))
    return 0 if report["passed"] else 1
