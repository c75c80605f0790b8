"""Tiny configurations of any causal architecture that transformers registers, made from its own default one."""

from __future__ import annotations

from typing import Any

WIDTH, HEADS, LAYERS, VOCABULARY = 32, 4, 2, 128
# By the names that families use for the same thing. What a family does not have is left alone.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size", "dim"), WIDTH),
    **dict.fromkeys(("emb_dim", "dim_model", "lru_width", "attention_hidden_size", "embedding_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "d_inner"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size", "dim_ff"), 32),
    **dict.fromkeys(("intermediate_size_mlp", "expert_ffn_hidden_size", "shared_intermediate_size", "dff"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "mlp_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "linear_num_value_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "attention_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_words", "n_tokens"), VOCABULARY),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_kv_shared_layers", "num_nextn_predict_layers", "num_mtp_layers"), 0),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_length"), 64),
    **dict.fromkeys(("sliding_window", "index_topk", "local_attention", "window_size"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_conv", "conv_kernel", "d_conv"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "hidden_size_per_layer"), 8),
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    "laurel_rank": 8,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
}
UNSET: dict[str, Any] = {  # where a default configuration leaves open what its model needs
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_theta": 10000.0,
    "head_dim": 8,
    "num_key_value_heads": HEADS,
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "mask_token_id", "decoder_start_token_id")
# Where sizes depend on each other in a way that only the family has.
FAMILIES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "lfm2_moe": {"num_dense_layers": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "xlnet": {"d_head": 8},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False, "is_decoder": True},
}


def tiny_config(model_type: str) -> Any:
    """Of a text model; what is not about text in a configuration is made small too, by the same names."""
    from transformers import CONFIG_MAPPING

    plain = CONFIG_MAPPING[model_type]()
    own = FAMILIES.get(model_type, {})
    if getattr(plain, "kv_lora_rank", None):  # one latent for all heads: there are no groups of them
        own = {"num_key_value_heads": HEADS, **own}
    values = small(plain.to_dict(), own)
    for name in ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype"):
        values.pop(name, None)
    return CONFIG_MAPPING[model_type](**values)


def small(values: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name in own:
            made[name] = own[name]
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool) and value > SIZES[name]:
            made[name] = SIZES[name]
        elif name in TOKENS and isinstance(value, int) and value >= VOCABULARY:
            made[name] = 1
        elif value is None and name in UNSET:
            made[name] = UNSET[name]
        elif name == "per_layer_config" and isinstance(value, dict):
            made[name] = {}
        elif name in SIZES and isinstance(value, list) and all(isinstance(one, int) for one in value):
            made[name] = [SIZES[name]] * LAYERS
        elif name == "activation_sparsity_pattern" and value:
            made[name] = [0.0] * LAYERS
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            kinds = list(dict.fromkeys(value))  # every kind of layer once, if there is room
            made[name] = [kinds[index % len(kinds)] for index in range(LAYERS)]
        elif name.endswith("_config") and isinstance(value, dict):
            made[name] = small(value, {})
        else:
            made[name] = value
    return {**made, **{name: value for name, value in own.items() if name not in made}}
