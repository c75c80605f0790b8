"""Build a causal language model on the meta device: its structure, no memory."""

from __future__ import annotations

import copy
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.catalog.models import known_config
from windlass.catalog.models import preset as find_preset
from windlass.errors import UserError
from windlass.plan.checks import check_config_keys, check_divisible, check_model
from windlass.plan.shape import ModelShape
from windlass.spec import Run
from windlass.spec.training import ModelSection
from windlass.trainer.model.own import own_config, own_model

IGNORED = -100  # a label that counts for nothing


@dataclass(frozen=True)
class ModelFacts:
    """What the rest of the trainer needs to know about a model's structure."""

    num_parameters: int
    num_trained: int
    fingerprint: str  # of parameter names and shapes: two models that can share a checkpoint agree on it
    vocab_size: int
    tied: bool

    def as_dict(self, config: Any) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "num_parameters": self.num_parameters,
            "config": config.to_diff_dict(),
        }


def model_config(run: Run, *, folder: Path | None = None, vocab_size: int = 0) -> Any:
    """The transformers configuration that a resolved run asks for, with room for `vocab_size` tokens.

    `folder` is where the files of a hub id are on this machine.
    """
    from transformers import AutoConfig

    if run.model.own_class:
        return own_config(run.model)
    values = known_config(run.model)
    if values is not None and run.model.preset:
        values = copy.deepcopy(values)  # transformers writes into nested ones, rope_scaling for example
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        config.architectures = None
    else:
        try:
            config = AutoConfig.from_pretrained(
                folder or run.model.path,
                revision=run.model.revision or "main",
                trust_remote_code=run.model.trust_remote_code,
                **copy.deepcopy(run.model.config),
            )
        except (OSError, ValueError) as error:
            if "trust_remote_code" in str(error):
                raise UserError(
                    f"the model {run.model.path} brings code of its own, which is not run unless you say so",
                    evidence=str(error).splitlines()[0],
                    cause="whoever wrote that code could do on every rank what you can",
                    fix="read the .py files of the model, then model.trust_remote_code=true",
                ) from None
            raise UserError(
                f"the model {run.model.path} cannot be read",
                evidence=str(error).splitlines()[0],
                fix="model.path must be a folder with config.json or a hub id; HF_TOKEN opens gated ones",
            ) from None
    if not run.model.preset and not run.model.trust_remote_code:
        check_config_keys(run, config_keys(config))
    check_model(config.to_dict(), run)
    check_causal(config)
    text = config.get_text_config()
    if vocab_size > (getattr(text, "vocab_size", None) or vocab_size):
        text.vocab_size = vocab_size
        check_divisible(text.to_dict(), run)
    return config


# Families registered as causal whose tokens see later ones: prefix and permuted models.
NOT_CAUSAL = {"cpmant", "xlnet", "xlm", "git"}
# And encoders, causal only where is_decoder says so; others (gpt_neox) have that field and always are.
ENCODERS = {
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
OTHER_SENSES = re.compile(r"(^|\.)(vision|audio|image|speech|sound)_?")


def check_causal(config: Any) -> None:
    """Refuse, in words, families that transformers registers as causal and that do not train as such."""
    kind = config.model_type
    if kind in ENCODERS and not getattr(config, "is_decoder", False):
        raise UserError(
            f"{kind} is an encoder: its tokens see those after them, and a loss on the next token means nothing",
            evidence="is_decoder is false",
            fix="model.config.is_decoder=true    masks what comes after",
        )
    if kind in NOT_CAUSAL:
        raise UserError(f"{kind} is not trained here: its tokens see those after them", cause="no causal family")


def check_text_only(model: nn.Module) -> None:
    other = next((name for name, _ in model.named_parameters() if OTHER_SENSES.search(name)), None)
    if other:
        raise UserError(
            f"{type(model).__name__} also reads images or sound, and text alone does not train that part",
            evidence=f"it holds {other}",
            fix="model.path of the text model, where the family has one of its own",
        )


def config_keys(config: Any) -> set[str]:
    """Every name that a model's configuration understands."""
    plain = type(config)()
    return {*plain.to_dict(), *vars(plain), *getattr(config, "attribute_map", {}), *vars(config)}


def meta_model(config: Any, run: Run) -> nn.Module:
    """The model's structure; UserError in words for one that cannot be built, or not trained as a causal model."""
    from transformers import AutoModelForCausalLM

    if run.model.own_class:
        return own_model(run.model, config)
    requested = run.model.attention
    by_name = requested not in ("auto", "flash4")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                # our own names become torch's attention, or eager where a family has no other (its sinks, its biases);
                # attention.py takes it from there
                attn_implementation=requested if by_name else None,
                dtype=torch.float32,  # master weights
                trust_remote_code=run.model.trust_remote_code,
            )
    except (ValueError, ImportError, NotImplementedError) as error:
        attention = f" with model.attention={requested}" if by_name else ""
        raise UserError(
            f"transformers cannot build {config.model_type}{attention}",
            evidence=str(error).strip().splitlines()[0],
            fix="model.attention=auto" if by_name else None,
        ) from None
    check_text_only(model)
    model.config.use_cache = False
    return model.train()  # type: ignore[no-any-return]


def attention_name(model: nn.Module) -> str:
    """What transformers computes attention with: sdpa, eager, flex_attention, or a name of ours."""
    name = str(getattr(model.config, "_attn_implementation", None))
    if name == "eager":
        return "eager: transformers has nothing faster for this family"
    return name


def named_seed(seed: int, name: str) -> int:
    """For a generator of torch: what is drawn depends on the run's seed and on a name alone."""
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little") >> 1


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated decoder blocks by name: the largest list of equal modules, outermost first.

    Hybrids, whose blocks are of two kinds, have no list of equal ones but short ones inside blocks.
    """
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    lists = [(name, module) for name, module in modules if len(module)]
    equal = [(name, module) for name, module in lists if len({type(child) for child in module}) == 1]
    best: dict[str, nn.Module] = {}
    best_size = 0
    for candidates in (equal, lists):
        for name, module in candidates:
            size = sum(parameter.numel() for parameter in module.parameters())
            if size > best_size * (1 if candidates is equal else 2):
                best, best_size = {f"{name}.{key}": child for key, child in module.named_children()}, size
    if not best:
        raise UserError(f"{type(model).__name__} has no repeated blocks to shard or recompute")
    return best


def projections(block: Any) -> tuple[tuple[Any, ...], ...]:
    """The linear layers of a llama block, those that read the same input together: q, k, v; o; gate, up; down."""
    attention, mlp = block.self_attn, block.mlp
    return (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )


def after_blocks(model: nn.Module) -> list[nn.Module]:
    """The last norm: outside the blocks, and in plain torch a dozen passes over all tokens."""
    backbone: nn.Module = model.get_decoder()  # type: ignore[operator]
    others = [module for module in backbone.children() if not isinstance(module, nn.ModuleList | nn.Embedding)]
    return [module for module in others if any(parameter.ndim == 1 for parameter in module.parameters())]


def is_mixture(part: nn.Module) -> bool:
    """Whether a part of a block sends each token to some of its experts."""
    return any(name == "experts" for name, _ in part.named_children())


def facts(model: nn.Module) -> ModelFacts:
    parameters = dict(model.named_parameters())  # a tied tensor counts once
    shapes = "\n".join(f"{name} {tuple(parameter.shape)}" for name, parameter in sorted(parameters.items()))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    return ModelFacts(
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        num_trained=sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad),
        fingerprint=hashlib.sha256(shapes.encode()).hexdigest()[:16],
        vocab_size=int(embedding.weight.shape[0]),
        tied=head is not None and head.weight is embedding.weight,
    )


def shape_of(model: nn.Module, config: Any) -> ModelShape | None:
    """The sizes that memory follows from, of any family: counted where the family's layout is not in the catalogue."""
    text = config.get_text_config()
    known = ModelShape.of(text.to_dict())
    if known is not None:
        return known
    width, heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    if not isinstance(width, int) or not isinstance(heads, int) or not heads:
        return None
    parts = blocks(model)
    inside = sum(parameter.numel() for block in parts.values() for parameter in block.parameters())
    counted = facts(model)
    met = getattr(text, "num_experts_per_tok", None) or 1
    ffn_width = _first_int(text, "moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner") or 4 * width
    experts = _first_int(text, "num_local_experts", "num_experts", "n_routed_experts") or 0
    head_dim = _first_int(text, "head_dim") or width // heads
    block = inside // len(parts)
    idle = 3 * width * ffn_width * (experts - met) if experts else 0
    return ModelShape(
        family=str(text.model_type),
        layers=len(parts),
        width=width,
        ffn_width=ffn_width * (met if experts else 1),
        query_width=heads * head_dim,
        kv_width=(_first_int(text, "num_key_value_heads") or heads) * head_dim,
        heads=heads,
        head_dim=head_dim,
        vocabulary=counted.vocab_size,
        tied=counted.tied,
        parameters=counted.num_parameters,
        block_parameters=block,
        active_block_parameters=max(block - idle, block // max(experts, 1)),
        expert_parameters=min(block, 3 * width * ffn_width * experts),
        experts_met=met,
    )


def _first_int(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the weights, under the names they are saved by. Few families have any."""
    buffers = dict(model.named_buffers())
    return {f"model.{name}": buffers[name] for name in model.state_dict() if name in buffers}


def weights_path(spec: ModelSection) -> str:
    """Where pretrained weights come from: a folder or a hub id."""
    if spec.preset:
        hub_id = find_preset(spec.preset).hub_id
        assert hub_id  # plan.check refused presets without published weights
        return hub_id
    return str(spec.path)
