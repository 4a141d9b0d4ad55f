"""Model families: how a Hugging Face configuration and its tensor names map onto `Transformer`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from eagle_jax.config import ModelConfig
from eagle_jax.errors import FormatError, InputError
from eagle_jax.target.families.fields import Fields
from eagle_jax.target.families.gemma import GEMMA2_DEFAULTS, GEMMA3_DEFAULTS, gemma2, gemma3
from eagle_jax.target.families.llama import llama, mistral, olmo2, phi3, smollm3
from eagle_jax.target.families.mixtral import mixtral
from eagle_jax.target.families.names import layer_tensors, target_tensors
from eagle_jax.target.families.qwen import qwen2, qwen3, qwen3_moe

__all__ = ["FAMILIES", "layer_tensors", "model_config", "target_tensors"]

FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3": functools.partial(gemma3, family="gemma3"),
    "phi3": phi3,
    "smollm3": smollm3,
    "olmo2": olmo2,
}
_DEFAULTS = {
    "gemma2": GEMMA2_DEFAULTS,
    "gemma3_text": GEMMA3_DEFAULTS,
    "gemma3": GEMMA3_DEFAULTS,
    "qwen3": {"head_dim": 128},
}


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads the content of a `config.json`, as transformers 4 or 5 writes it.

    Of a Gemma 3 that also sees images the part for text is read.

    Raises:
      InputError: the family, or a switch of it, is not supported.
      FormatError: a field is missing or no number.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise InputError(
            f"supported model families: {', '.join(FAMILIES)}; this model's model_type is "
            f"{family!r}"
        )
    if family == "gemma3":
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise FormatError("config.json of a gemma3 model lacks the object 'text_config'")
        tied = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
        raw = {**tied, **text}
    return FAMILIES[family](Fields(raw, _DEFAULTS.get(family)))
