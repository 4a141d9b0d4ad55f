"""What `generation_config.json` suggests for sampling, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_jax.config import Sampling
from eagle_jax.errors import FormatError
from eagle_jax.text import read_optional_json

# Fields that do not say how a token is drawn.
_OTHER = frozenset(
    {
        "_from_model_config",
        "bos_token_id",
        "cache_implementation",
        "eos_token_id",
        "max_length",
        "max_new_tokens",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "transformers_version",
        "trust_remote_code",
        "use_cache",
    }
)
_SUPPORTED = ("temperature", "top_k", "top_p")
# Values that change nothing; null, false, 0 and empty ones never do.
_NEUTRAL = {
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "typical_p": 1.0,
}


def generation_defaults(folder: Path) -> dict[str, Any]:
    """The fields of a folder's `generation_config.json` that say how tokens are drawn.

    Raises:
      FormatError: temperature, top_k or top_p is no number, or the file is broken.
    """
    path = folder / "generation_config.json"
    found = {
        name: value
        for name, value in read_optional_json(path).items()
        if name not in _OTHER and value is not None
    }
    for name in _SUPPORTED:
        value = found.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FormatError(f"{path}: {name} should be a number, found {value!r}")
    return found


def differences(defaults: Mapping[str, Any], sampling: Sampling) -> str | None:
    """Says where a run draws otherwise than the model's own defaults; None where it does not.

    Temperature, top_k and top_p count where `do_sample` is true; without it transformers is greedy.
    """
    wanted = {}
    if defaults.get("do_sample"):
        wanted = {"temperature": 1.0}
        wanted |= {name: defaults[name] for name in _SUPPORTED if name in defaults}
    others = {
        name: value
        for name, value in defaults.items()
        if value and name not in (*_SUPPORTED, "do_sample") and value != _NEUTRAL.get(name)
    }
    parts = []
    ours = {name: getattr(sampling, name) for name in wanted}
    if ours != wanted:
        parts.append(f"it suggests {_listed(wanted)}, this run uses {_listed(ours)}")
    if others:
        parts.append(f"{_listed(others)} is not supported and left out")
    return f"generation_config.json of this model: {'; '.join(parts)}" if parts else None


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
