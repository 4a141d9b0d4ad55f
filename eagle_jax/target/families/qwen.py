"""Qwen2, Qwen2.5, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

import dataclasses

from eagle_jax.config import ExpertsConfig, LayerSwitches, ModelConfig
from eagle_jax.errors import InputError
from eagle_jax.target.families.fields import Fields, config, layer_types, window


def qwen2(fields: Fields) -> ModelConfig:
    """Qwen2 and 2.5: queries, keys and values have a bias."""
    return _dense(fields, "qwen2", LayerSwitches(qkv_bias=True))


def qwen3(fields: Fields) -> ModelConfig:
    """Qwen3: queries and keys are normed head by head."""
    bias = bool(fields.get("attention_bias"))
    switches = LayerSwitches(qk_norm="head", qkv_bias=bias, out_bias=bias)
    fields.number("head_dim", 128)
    return _dense(fields, "qwen3", switches)


def qwen3_moe(fields: Fields) -> ModelConfig:
    """Qwen3-MoE: feed-forward blocks of routed experts, in all layers or in some."""
    fields.only("hidden_act", "silu")
    bias, size = bool(fields.get("attention_bias")), _window_size(fields)
    fields.get("max_window_layers")  # all layers slide, whatever older files say here
    layer = LayerSwitches(window=window(fields, size), qk_norm="head", qkv_bias=bias, out_bias=bias)
    experts = ExpertsConfig(
        count=fields.number("num_experts", fields.get("num_local_experts")),
        active=fields.number("num_experts_per_tok", 8),
        size=fields.number("moe_intermediate_size", 768),
        normalised=bool(fields.get("norm_topk_prob", False)),
    )
    dense, step = fields.get("mlp_only_layers") or [], fields.number("decoder_sparse_step", 1)
    layers = [
        layer
        if index in dense or (index + 1) % step
        else dataclasses.replace(layer, experts=experts)
        for index in range(fields.number("num_hidden_layers"))
    ]
    return config(fields, "qwen3_moe", layers)


def _dense(fields: Fields, family: str, switches: LayerSwitches) -> ModelConfig:
    fields.only("hidden_act", "silu")
    number, size = fields.number("num_hidden_layers"), _window_size(fields)
    first = fields.number("max_window_layers", 28)
    slides = layer_types(fields, [size is not None and at >= first for at in range(number)])
    if size is None and any(slides):
        raise InputError("layer_types has sliding layers, but use_sliding_window is not true")
    sliding = dataclasses.replace(switches, window=window(fields, size))
    return config(fields, family, [sliding if slide else switches for slide in slides])


def _window_size(fields: Fields) -> int | None:
    """`sliding_window` counts where `use_sliding_window` is true only."""
    size = fields.get("sliding_window", 4096)
    return size if fields.get("use_sliding_window") else None
