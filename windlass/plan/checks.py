"""What cannot work, said before it costs anything: the model, the sequence and the ranks against each other."""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from windlass.catalog.models import known_config
from windlass.common import own_code
from windlass.common.hub import is_hub_id
from windlass.errors import UserError
from windlass.plan.layout import (
    OWN_ATTENTION,
    PLAIN_HEADS,
    data_ranks,
    effective_sharding,
    is_split,
    shard_group,
)
from windlass.plan.shape import ModelShape, layer_names, matches, num_experts, projections
from windlass.spec import Run

# Fields of a configuration that change what is computed and no weight's shape or meaning.
KEEPS_WEIGHTS = re.compile(r"^rope_|^max_position_embeddings$|^is_decoder$|dropout|_pdrop$|^router_aux_loss_coef$")
FOLLOWS_LENGTH = ("longrope", "dynamic")  # kinds of RoPE whose frequencies depend on the last position of a batch
FP8_SMALLEST = 1024  # narrower products (keys, values) gain less than their quantisation costs
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


class TooFewSequencesError(UserError):
    """A step has fewer sequences than the ranks that share them."""


def check(run: Run, world_size: int, local_world_size: int | None = None) -> None:
    """Raise UserError for a resolved run that cannot train on `world_size` ranks, so many of them on this node."""
    check_own_code(run)
    check_objective(run)
    config = known_config(run.model)
    if config is not None:
        check_config_keys(run, known_keys(run, config))
        check_model(config, run)
    check_fp8(run, config)
    check_weights(run)
    check_split(run, world_size, local_world_size)
    check_ranks(run, world_size, local_world_size)
    check_lora(run, world_size)
    check_validation(run)


def check_own_code(run: Run) -> None:
    """What the run file names by import path is there, as far as that can be seen without running it."""
    for key, path in run.own_code():
        own_code.check(path, key, run.code)
    if run.train.loss and run.train.fused_head:
        raise UserError("train.fused_head computes its own loss, and not train.loss", fix="train.fused_head=null")
    if run.train.optimizer and run.train.bf16_weights:
        raise UserError(
            "train.bf16_weights keeps fp32 masters in windlass' own optimizer, and the run has another",
            fix="train.bf16_weights=null",
        )


def check_objective(run: Run) -> None:
    is_dpo, has_pairs = run.train.objective == "dpo", run.data.format == "preference"
    if is_dpo != has_pairs:
        raise UserError(
            f"train.objective is {run.train.objective}, and data.format is {run.data.format}",
            cause="dpo learns from chosen and rejected answers, and nothing else does",
            fix="data.format=preference" if is_dpo else "train.objective=dpo",
        )
    if is_dpo and run.model.init != "pretrained":
        raise UserError(
            "train.objective dpo begins with a trained model, which is its reference too", fix="model.init=pretrained"
        )
    if is_dpo and run.checkpoint.branch_from and run.model.lora is None:
        name = run.checkpoint.branch_from.rpartition("@")[0]
        raise UserError(
            "train.objective dpo cannot branch from another run: its reference would be the model before that run",
            evidence=f"checkpoint.branch_from is {run.checkpoint.branch_from}",
            fix=f"windlass ckpt export {name}    and then model.path=runs/{name}/export without --from",
        )
    if is_dpo and run.train.balance_experts:
        raise UserError(
            "train.balance_experts balances tokens, and train.objective dpo divides by pairs of answers",
            fix="train.balance_experts=null",
        )
    if is_dpo and not run.data.document_mask:
        raise UserError("train.objective dpo keeps answers apart by data.document_mask", fix="data.document_mask=null")


def check_model(config: dict[str, Any], run: Run) -> None:
    """A transformers configuration against itself and the run; the trainer calls it again for models from a hub."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if hidden and heads and not config.get("head_dim") and hidden % heads:
        raise UserError(
            f"the model cannot be built: hidden_size {hidden} is not divisible by num_attention_heads {heads}",
            fix=f"model.config.num_attention_heads={_nearest_divisor(hidden, heads)}",
        )
    if heads and kv_heads and heads % kv_heads:
        raise UserError(
            f"the model cannot be built: num_attention_heads {heads} is not divisible by "
            f"num_key_value_heads {kv_heads}",
            fix=f"model.config.num_key_value_heads={_nearest_divisor(heads, kv_heads)}",
        )
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{config.get('model_type')} is an encoder-decoder model, and causal models are trained here",
            evidence="is_encoder_decoder is true",
            fix="model.preset=llama3.2-1b    or model.path of a causal model",
        )
    longest, length = config.get("max_position_embeddings"), run.data.sequence_length
    if longest and length and length > longest:
        raise UserError(
            f"sequences of {length} tokens are longer than the model's maximum of {longest}",
            evidence=f"max_position_embeddings is {longest}",
            fix=f"data.sequence_length={longest}",
        )
    check_divisible(config, run)
    changed = [name for name in run.model.config if not KEEPS_WEIGHTS.search(name)]
    if run.model.init == "pretrained" and changed:
        raise UserError(
            "model.config changes a model whose weights are to be loaded",
            evidence=f"model.init is pretrained and model.config sets {', '.join(changed)}",
            cause="what leaves the weights as they are may be set: RoPE, max_position_embeddings, dropout",
            fix="model.init=random, or drop " + ", ".join(f"model.config.{name}" for name in changed),
        )
    if run.model.init == "pretrained" and run.model.preset and run.model.preset.endswith("-tiny"):
        raise UserError(
            f"the preset {run.model.preset} has no published weights", fix="model.init=random, or model.path=FOLDER"
        )


def known_keys(run: Run, config: dict[str, Any]) -> set[str] | None:
    """Every field of the model's configuration; None where only transformers knows, and it is not installed here."""
    here = set(known_config(run.model.model_copy(update={"config": {}})) or ())
    if set(run.model.config) <= here or run.model.trust_remote_code:
        return None  # nothing to ask
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    try:
        plain = CONFIG_MAPPING[config["model_type"]]()
    except (KeyError, ValueError, TypeError):
        return None  # the trainer says what is wrong with such a model
    return here | {*plain.to_dict(), *vars(plain), *plain.attribute_map}


def check_config_keys(run: Run, keys: set[str] | None) -> None:
    """transformers takes any field without a word, and trains the model as if a misspelt one were not there."""
    if keys is None:
        return
    for name in run.model.config:
        if name in keys:
            continue
        near = difflib.get_close_matches(name, keys, 3, cutoff=0.6)
        raise UserError(
            f"the model's configuration has no field {name!r} (model.config.{name})",
            evidence=f"nearest: {', '.join(near)}" if near else "no field has a name like it",
            fix=f"model.config.{near[0]}=…" if near else f"drop model.config.{name}",
        )


def check_fp8(run: Run, config: dict[str, Any] | None) -> None:
    if not run.train.fp8:
        return
    if run.train.precision != "bf16":
        raise UserError("train.fp8 needs train.precision=bf16", fix="train.precision=bf16")
    if run.resources.gpus_per_node == 0:
        raise UserError("train.fp8 needs GPUs with fp8 units, and resources.gpus_per_node is 0", fix="train.fp8=false")
    widths = [config.get(name) for name in ("hidden_size", "intermediate_size")] if config else []
    sizes = [size for size in widths if isinstance(size, int)]
    if len(sizes) == 2 and min(sizes) < FP8_SMALLEST:
        raise UserError(
            "train.fp8 has nothing to do: no linear layer of the blocks is large enough",
            evidence=f"both sides must be at least {FP8_SMALLEST}; the model has {sizes[0]} and {sizes[1]}",
            fix="train.fp8=false",
        )


def check_weights(run: Run) -> None:
    """The files of a local model's weights are there; what is in them the trainer sees when it reads them."""
    model = run.model
    if model.init != "pretrained" or not model.path or is_hub_id(model.path):
        return
    folder = Path(model.path)
    missing = [WEIGHT_FILES[0]]
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return
        index = folder / f"{name}.index.json"
        if index.is_file():
            missing = sorted(name for name in _parts(index) if not (folder / name).is_file())
            break
    if missing:
        raise UserError(
            f"the weights of {folder} are not all there",
            evidence=f"missing: {', '.join(missing[:5])}",
            cause="model.init is pretrained",
            fix="model.init=random, or a folder with config.json and its safetensors",
        )


def _parts(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} is not an index of weights",
            evidence=f"{type(error).__name__}: {error}",
            fix="model.path=FOLDER    whose files are whole",
        ) from None


def check_lora(run: Run, world_size: int) -> None:
    lora = run.model.lora
    if lora is None:
        if run.checkpoint.export == "merged":
            raise UserError("checkpoint.export is merged, but the run has no model.lora", fix="checkpoint.export=true")
        return
    if run.train.fp8:
        raise UserError("train.fp8 computes weights that train, and model.lora freezes them", fix="train.fp8=false")
    if run.train.bf16_weights:
        raise UserError(
            "train.bf16_weights is for weights that train: model.lora holds frozen ones in bf16 anyway",
            fix="train.bf16_weights=null",
        )
    sharding = effective_sharding(run, world_size)
    check_targets(run)
    if lora.quantize and sharding not in ("none", "ddp"):
        raise UserError(
            f"model.lora.quantize holds the whole model on every rank, but parallel.sharding is {sharding}",
            fix="parallel.sharding=ddp, or model.lora.quantize=null",
        )


def check_targets(run: Run) -> None:
    """Patterns of layers against a decoder whose layers are known; of other families the trainer knows them."""
    shape = ModelShape.of(known_config(run.model))
    if shape is None or run.model.lora is None:
        return
    within, layers = projections(shape), layer_names(shape)
    for pattern in run.model.lora.targets or ():
        known = [*layers, "lm_head", *(f"model.layers.{n}.mlp.gate" for n in range(shape.layers))]
        if any(matches(name, pattern) for name in known):
            continue
        near = difflib.get_close_matches(pattern, [*within, *layers], 1, cutoff=0.5)
        raise UserError(
            f"model.lora.targets: no linear layer matches {pattern!r}",
            evidence=f"linear layers of the blocks: {', '.join(within)}",
            fix=f"model.lora.targets=[{near[0]}]" if near else "drop model.lora.targets: all projections",
        )


def check_validation(run: Run) -> None:
    asking = "train.early_stopping" if run.train.early_stopping else "checkpoint.keep_best"
    wanted = run.train.early_stopping or run.checkpoint.keep_best
    if wanted and not (run.data.validation_source or run.data.holdout):
        raise UserError(
            f"{asking} looks at validations, and the run has no validation data",
            fix="data.holdout=0.05, or data.validation_source=…",
        )


def check_split(run: Run, world_size: int, local_world_size: int | None = None) -> None:
    """Whether ranks can share sequences and experts as `parallel.tensor`, `context` and `expert` say."""
    parallel = run.parallel
    if not is_split(run):
        return
    sharding = effective_sharding(run, world_size)
    group = shard_group(run, world_size, local_world_size) if sharding == "hybrid" else world_size
    for name, size in (("tensor × context", parallel.tensor * parallel.context), ("expert", parallel.expert)):
        if group % size:
            raise UserError(
                f"{group} ranks cannot be divided into groups of {size} (parallel.{name})",
                evidence=f"{world_size} ranks, parallel.sharding is {sharding}",
                fix=f"a divisor of {group}",
            )
    whole = "parallel.tensor=1 parallel.context=1 parallel.expert=1"
    excluded = (
        (sharding not in ("full", "hybrid"), f"parallel.sharding={sharding}", "parallel.sharding=full"),
        (run.model.lora is not None, "model.lora", whole),
        (run.train.fp8, "train.fp8", "train.fp8=false"),
        (parallel.cpu_offload, "parallel.cpu_offload", "parallel.cpu_offload=false"),
        (run.train.objective == "dpo", "train.objective=dpo", whole),
        (run.train.loss is not None, "train.loss", whole),
        (run.model.own_class is not None, "model.class", whole),
    )
    for is_set, what, fix in excluded:
        if is_set:
            raise UserError(f"parallel.tensor, context and expert do not go with {what}", fix=fix)
    if parallel.tensor > 1 and run.train.fused_head is False:
        raise UserError("parallel.tensor needs the fused head", fix="train.fused_head=null")
    if parallel.context > 1 and run.data.document_mask:
        raise UserError(
            "parallel.context does not keep documents apart",
            evidence="data.document_mask is true",
            fix="data.document_mask=false, or parallel.context=1",
        )
    if parallel.context > 1 and run.model.attention not in OWN_ATTENTION:
        raise UserError(
            f"parallel.context does not go with model.attention={run.model.attention}", fix="model.attention=auto"
        )


def check_divisible(config: dict[str, Any], run: Run) -> None:
    """Whether a model and its sequences can be cut into as many parts as the run asks for."""
    parallel, family = run.parallel, config.get("model_type")
    tensor, context, expert = parallel.tensor, parallel.context, parallel.expert
    heads, experts = config.get("num_attention_heads"), num_experts(config)
    if tensor * context > 1 and family not in PLAIN_HEADS:
        raise UserError(
            f"parallel.tensor and context are not known to be right for {family} models",
            evidence=f"they are for {', '.join(sorted(PLAIN_HEADS))}",
            fix="parallel.tensor=1 parallel.context=1",
        )
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if context > 1 and window and window < (run.data.sequence_length or 0):
        raise UserError(
            f"parallel.context does not know attention that goes {window} tokens back", fix="parallel.context=1"
        )
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope_type = rope.get("rope_type") or rope.get("type")
    if context > 1 and rope_type in FOLLOWS_LENGTH:
        raise UserError(
            f"parallel.context does not know positions of the type {rope_type}",
            cause="they follow the length of a sequence, of which each rank has a part",
            fix="parallel.context=1",
        )
    if expert > 1 and not experts:
        raise UserError(f"{family} models have no experts to share", fix="parallel.expert=1")
    halves = 2 * context if context > 1 else 1
    for name, number, key, size, times in (
        ("data.sequence_length", run.data.sequence_length, "tensor", tensor, halves),
        ("num_attention_heads", heads, "tensor", tensor, 1),
        ("num_key_value_heads", config.get("num_key_value_heads") or heads, "tensor", tensor, 1),
        ("intermediate_size", config.get("intermediate_size"), "tensor", tensor, 1),
        ("vocab_size", config.get("vocab_size"), "tensor", tensor, 1),
        ("the number of experts", experts, "expert", expert, 1),
    ):
        parts = size * times
        if number and number % parts:
            smaller = next((less for less in range(size - 1, 0, -1) if number % (less * times) == 0), None)
            raise UserError(
                f"{name} is {number} and cannot be cut into {parts} equal parts",
                evidence=f"parallel.tensor is {tensor}, context {context}, expert {expert}",
                fix=f"parallel.{key}={smaller}" if smaller else "parallel.context=1",
            )


def check_ranks(run: Run, world_size: int, local_world_size: int | None = None) -> None:
    parallel = run.parallel
    sharding = effective_sharding(run, world_size)
    if sharding == "none" and world_size > 1:
        raise UserError(
            f"parallel.sharding is none but the run has {world_size} ranks",
            cause="without sharding or copies every rank would train a model of its own",
            fix="parallel.sharding=full   (or ddp)",
        )
    if parallel.cpu_offload and sharding not in ("full", "hybrid"):
        raise UserError(
            f"parallel.cpu_offload needs FSDP2, but parallel.sharding is {sharding}", fix="parallel.sharding=full"
        )
    if sharding == "hybrid":
        group = shard_group(run, world_size, local_world_size)
        if world_size % group:
            raise UserError(
                f"{world_size} ranks cannot be divided into groups of {group}",
                fix=f"parallel.shard_group={_nearest_divisor(world_size, group)}",
            )
    shares = data_ranks(run, world_size)
    if run.train.global_batch < shares:
        raise TooFewSequencesError(
            f"a global batch of {run.train.global_batch} sequences leaves some of {shares} ranks without any",
            fix=f"train.global_batch={shares}",
        )


def _nearest_divisor(number: int, near: int) -> int:
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return min(divisors, key=lambda divisor: abs(divisor - near))
