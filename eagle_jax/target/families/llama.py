"""Llama and its closest relatives: Llama 2 and 3, Mistral, Phi-3, SmolLM3, OLMo 2."""

from __future__ import annotations

from eagle_jax.config import LayerSwitches, ModelConfig
from eagle_jax.errors import InputError
from eagle_jax.target.families.fields import Fields, config, layer_types, rope, window


def llama(fields: Fields) -> ModelConfig:
    """Llama 2, 3, 3.1 and 3.2, and whatever shares their class (SmolLM2, TinyLlama, ...)."""
    fields.only("hidden_act", "silu")
    bias = bool(fields.get("attention_bias"))
    layer = LayerSwitches(qkv_bias=bias, out_bias=bias)
    return config(fields, "llama", [layer] * fields.number("num_hidden_layers"))


def mistral(fields: Fields) -> ModelConfig:
    """Mistral: every layer slides, where the configuration sets a window."""
    return _all_sliding(fields, "mistral", fields.get("sliding_window", 4096))


def phi3(fields: Fields) -> ModelConfig:
    """Phi-3 and Phi-4-mini without longrope; their q, k, v and gate, up tensors come fused."""
    fields.get("original_max_position_embeddings")  # counts for longrope only, which is refused
    return _all_sliding(fields, "phi3", fields.get("sliding_window"))


def _all_sliding(fields: Fields, family: str, size: int | None) -> ModelConfig:
    fields.only("hidden_act", "silu")
    number = fields.number("num_hidden_layers")
    if layer_types(fields, [size is not None] * number) != [size is not None] * number:
        raise InputError(f"layer_types of a {family} model should agree with sliding_window={size}")
    return config(fields, family, [LayerSwitches(window=window(fields, size))] * number)


def smollm3(fields: Fields) -> ModelConfig:
    """SmolLM3: some layers, every fourth by default, have no rotary positions."""
    fields.only("hidden_act", "silu")
    fields.get("max_window_layers")  # in files of SmolLM3, and without a meaning there
    number, step = fields.number("num_hidden_layers"), fields.get("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers")
    rotated = [(index + 1) % step != 0 for index in range(number)] if rotated is None else rotated
    if len(rotated) < number:
        raise InputError(f"no_rope_layers names {len(rotated)} layers of {number}")
    size = fields.get("sliding_window") if fields.get("use_sliding_window") else None
    slides = layer_types(fields, [size is not None and not turn for turn in rotated[:number]])
    bias = bool(fields.get("attention_bias"))
    layers = [
        LayerSwitches(
            window=window(fields, size) if slide else None,
            rope=bool(turn),
            qkv_bias=bias,
            out_bias=bias,
        )
        for turn, slide in zip(rotated[:number], slides, strict=True)
    ]
    theta, scaling = rope(fields, 2_000_000.0)
    return config(fields, "smollm3", layers, True, rope_theta=theta, rope_scaling=scaling)


def olmo2(fields: Fields) -> ModelConfig:
    """OLMo 2 (arXiv 2501.00656): norms after the blocks, and over all queries and all keys."""
    fields.only("hidden_act", "silu")
    bias = bool(fields.get("attention_bias"))
    layer = LayerSwitches(norms="after", qk_norm="whole", qkv_bias=bias, out_bias=bias)
    return config(fields, "olmo2", [layer] * fields.number("num_hidden_layers"))
