"""Model families: how a Hugging Face configuration and its tensor names map onto `Transformer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eagle_jax.config import ModelConfig
from eagle_jax.errors import FormatError, InputError

Read = Callable[[str], np.ndarray]


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads the content of a `config.json`.

    Raises:
      InputError: the family, or a switch of it, is not supported.
      FormatError: a field is missing.
    """
    family = raw.get("model_type")
    if family != "llama":
        raise InputError(f"supported model families: llama; this model's model_type is {family!r}")
    # transformers 5 writes rotary settings as one dictionary, earlier versions as two fields.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise InputError(f"rotary scaling {kind!r} is not supported (only 'default')")
    for switch in ("attention_bias", "mlp_bias"):
        if raw.get(switch):
            raise InputError(f"{switch}=true is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise InputError(f"activation {raw['hidden_act']!r} is not supported (only 'silu')")
    try:
        heads = raw["num_attention_heads"]
        return ModelConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            norm_eps=raw["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            context=raw["max_position_embeddings"],
            tied=bool(raw.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise FormatError(f"config.json lacks the field {error}") from error


def layer_tensors(read: Read, prefix: str) -> dict[str, np.ndarray]:
    """The parameters of one decoder layer, fused as `DecoderLayer` holds them.

    Args:
      read: returns a checkpoint's tensor by name.
      prefix: e.g. `model.layers.3.`.
    """
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = [read(f"{attention}{part}_proj.weight") for part in "qkv"]
    gate_up = [read(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
    return {
        "attention.qkv.weight": np.concatenate(qkv),
        "attention.out.weight": read(attention + "o_proj.weight"),
        "mlp_norm.weight": read(prefix + "post_attention_layernorm.weight"),
        "mlp.gate_up.weight": np.concatenate(gate_up),
        "mlp.down.weight": read(mlp + "down_proj.weight"),
    }


def target_tensors(read: Read, config: ModelConfig):
    """Yields (parameter path, array) for a whole target, tensor by tensor."""
    yield "embed", read("model.embed_tokens.weight")
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for name, array in layer_tensors(read, prefix).items():
            yield f"layers.{index}.{name}", array
        yield f"layers.{index}.input_norm.weight", read(prefix + "input_layernorm.weight")
    yield "norm.weight", read("model.norm.weight")
    if not config.tied:
        yield "lm_head", read("lm_head.weight")
