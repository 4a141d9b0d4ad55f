"""Mixtral (arXiv 2401.04088)."""

from __future__ import annotations

from eagle_jax.config import ExpertsConfig, LayerSwitches, ModelConfig
from eagle_jax.target.families.fields import Fields, config, rope, window


def mixtral(fields: Fields) -> ModelConfig:
    """Mixtral: Mistral's layers with a feed-forward block of routed experts."""
    fields.only("hidden_act", "silu")
    experts = ExpertsConfig(
        count=fields.number("num_local_experts", 8),
        active=fields.number("num_experts_per_tok", 2),
        size=fields.number("intermediate_size"),
    )
    layer = LayerSwitches(window=window(fields, fields.get("sliding_window")), experts=experts)
    theta, scaling = rope(fields, 1e6)
    layers = [layer] * fields.number("num_hidden_layers")
    return config(fields, "mixtral", layers, rope_theta=theta, rope_scaling=scaling)
