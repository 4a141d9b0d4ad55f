"""Gemma 2 (arXiv 2408.00118) and the text part of Gemma 3 (arXiv 2503.19786)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle_jax.config import LayerSwitches, ModelConfig
from eagle_jax.errors import InputError
from eagle_jax.target.families.fields import Fields, config, layer_types, rope, rope_scaling

# Files of models that also see images leave out of `text_config` what equals these.
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA2_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def gemma2(fields: Fields) -> ModelConfig:
    """Gemma 2: every other layer slides, scores and logits are capped."""
    theta, scaling = rope(fields)
    return _gemma(fields, "gemma2", 2, rope_theta=theta, rope_scaling=scaling)


def gemma3(fields: Fields, family: str = "gemma3_text") -> ModelConfig:
    """Gemma 3: five of six layers slide, with rotary positions of their own."""
    fields.get("_sliding_window_pattern")  # what transformers keeps beside `layer_types`
    pattern = fields.number("sliding_window_pattern", 6)
    written = fields.get("rope_parameters") or {}
    if unknown := written.keys() - {"full_attention", "sliding_attention"}:
        raise InputError(
            "rope_parameters should hold full_attention and sliding_attention, found "
            f"{sorted(unknown)}"
        )
    whole = {**written.get("full_attention", {}), **(fields.get("rope_scaling") or {})}
    local = written.get("sliding_attention", {})
    if rope_scaling(local, fields) is not None:
        raise InputError("rotary scaling of sliding_attention layers is not supported")
    return _gemma(
        fields,
        family,
        pattern,
        rope_theta=float(whole.get("rope_theta") or fields.number("rope_theta", 1e6)),
        rope_scaling=rope_scaling(whole, fields),
        window_rope_theta=float(
            local.get("rope_theta") or fields.number("rope_local_base_freq", 1e4)
        ),
    )


def _gemma(fields: Fields, family: str, pattern: int, **rotary: Any) -> ModelConfig:
    """What both share; every `pattern`-th layer sees everything."""
    for name in ("hidden_activation", "hidden_act"):  # checkpoints name both, and mean the tanh one
        fields.only(name, "gelu_pytorch_tanh")
    number, bias = fields.number("num_hidden_layers"), bool(fields.get("attention_bias"))
    slides = layer_types(fields, [(index + 1) % pattern != 0 for index in range(number)])
    layer = LayerSwitches(
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head" if family.startswith("gemma3") else None,
        score_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        score_cap=fields.get("attn_logit_softcapping"),
        norms="around",
        shifted_norms=True,
        gelu=True,
    )
    # Kept even where the context is shorter: it also decides on the rotary positions.
    sliding = dataclasses.replace(layer, window=fields.get("sliding_window"))
    return config(
        fields,
        family,
        [sliding if slide else layer for slide in slides],
        True,
        scaled_embedding=True,
        logit_cap=fields.get("final_logit_softcapping"),
        **rotary,
    )
