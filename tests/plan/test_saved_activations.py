"""What a block keeps for its backward pass, counted on a real one: the memory model's formula is not a fit."""

from dataclasses import replace

import pytest

from tests.campaign import campaign
from tests.plan.runs import SMALL_LLAMA, a_run, estimates
from windlass.plan.memory import saved_per_layer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

LENGTH = 128


def kept_bytes(layers, *, dtype, autocast, compiled, recompute):
    """Bytes that a Llama of `layers` blocks keeps between its passes; weights and their casts are not counted."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from windlass.trainer.model.structure import blocks
    from windlass.trainer.parallelize import kept_products
    from windlass.trainer.parallelize import recompute as recompute_block

    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=layers, **SMALL_LLAMA)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).train()
    layout = replace(estimates(a_run(global_batch=1)).layout, recompute=recompute)
    for block in blocks(model).values():
        if recompute != "none":
            recompute_block(block, keep=None if recompute == "full" else kept_products(config, layout))
        if compiled:  # the partitioner that inductor uses, without its code generation
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager_decomp_partition")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {
        shape
        for parameter in model.parameters()
        for shape in (tuple(parameter.shape), tuple(reversed(parameter.shape)))
    }
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.get_decoder()(input_ids=tokens, use_cache=False)
    return sum(size for size, _ in kept.values())


# Every kind of weights and of recomputation; then every pair of them.
CASES = [("bf16 weights", recompute) for recompute in ("none", "selective", "attention", "full")]
# not compiled, a checkpoint keeps its tensors out of the hooks' sight: only without one can they be counted
CASES += [("bf16 weights, not compiled", "none"), ("autocast", "selective"), ("fp32", "none")]
OTHERS = [("autocast", recompute) for recompute in ("none", "attention", "full")]
OTHERS += [("fp32", recompute) for recompute in ("selective", "attention", "full")]


@pytest.mark.parametrize(("kind", "recompute"), campaign([*CASES, *OTHERS], always=len(CASES)))
def test_a_block_keeps_what_the_formula_says(kind, recompute):
    compiled = "not compiled" not in kind
    torch._dynamo.reset()
    options = {"autocast": kind == "autocast", "compiled": compiled, "recompute": recompute}
    dtype = torch.bfloat16 if kind.startswith("bf16") else torch.float32
    two, three = (kept_bytes(layers, dtype=dtype, **options) for layers in (2, 3))
    changes = [f"model.config.{key}={value}" for key, value in SMALL_LLAMA.items()]
    found = estimates(a_run(*changes, f"data.sequence_length={LENGTH}", global_batch=1))
    arranged = replace(
        found.layout,
        precision="fp32" if kind == "fp32" else "bf16",
        bf16_weights=kind.startswith("bf16"),
        compiled=compiled,
        recompute=recompute,
    )
    assert (three - two) / LENGTH == pytest.approx(saved_per_layer(found.shape, arranged), rel=0.02)
