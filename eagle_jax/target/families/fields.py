"""The fields of a `config.json`, read so that none is left out unnoticed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_jax.config import LayerSwitches, ModelConfig, RopeScaling
from eagle_jax.errors import FormatError, InputError

# Fields that say nothing about what the network computes.
_INERT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "auto_map",
        "attention_dropout",
        "attn_implementation",
        "bos_token_id",
        "cache_implementation",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "hidden_dropout",
        "initializer_range",
        "is_llama_config",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
# Switches that some checkpoint of these families may set and that no reader here implements.
_REFUSED = ("mlp_bias", "quantization_config", "rope_interleaved", "use_bidirectional_attention")


class Fields:
    """A mapping that remembers what was asked for.

    Values come from the file, then from `defaults`, which are those of transformers' configuration
    class: a file may leave out what equals them.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None):
        self._raw, self._defaults = raw, defaults or {}
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value, `default` where neither the file nor the defaults have it."""
        self._asked.add(name)
        return self._raw.get(name, self._defaults.get(name, default))

    def number(self, name: str, default: float | None = None) -> Any:
        """A field that is one number; FormatError where it is missing or something else."""
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise FormatError(f"config.json lacks the field {name!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FormatError(f"config.json: {name} should be a number, found {value!r}")
        return value

    def only(self, name: str, *supported: Any) -> None:
        """Refuses a switch that is set to anything but `supported` (null is always fine).

        Raises:
          InputError: it is.
        """
        value = self.get(name)
        if value is not None and value not in supported:
            listed = ", ".join(map(repr, supported))
            raise InputError(f"{name}={value!r} is not supported (only {listed})")

    def finish(self) -> None:
        """Refuses switches that are known and were not asked for; warns of unknown fields."""
        for name in _REFUSED:
            self.only(name, False)
        unknown = {name for name, value in self._raw.items() if value not in (None, False, [], {})}
        unknown -= self._asked | _INERT
        if unknown:
            warnings.warn(
                f"config.json has fields that are not known here and left out: {sorted(unknown)}",
                stacklevel=3,
            )


def rope(fields: Fields, theta: float = 10_000.0) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary positions; `theta` is the family's default.

    transformers 5 writes one dictionary, `rope_parameters`; earlier versions wrote `rope_theta` and
    `rope_scaling`.
    """
    written, scaling = fields.get("rope_parameters"), fields.get("rope_scaling")
    settings = scaling or written or {}
    theta = fields.number("rope_theta", theta)
    return settings.get("rope_theta") or theta, rope_scaling(settings, fields)


def rope_scaling(settings: Mapping[str, Any], fields: Fields) -> RopeScaling | None:
    """The scaling of one dictionary of rotary settings.

    Raises:
      InputError: a kind of scaling that is not supported.
      FormatError: a setting is missing.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            raise InputError(f"rotary settings of their own for {name!r} are not supported")
    partial = settings.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise InputError(f"partial_rotary_factor={partial} is not supported (only 1.0)")
    kind = settings.get("rope_type", settings.get("type", "default"))
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling(float(settings["factor"]))
        if kind == "llama3":
            context = settings.get("original_max_position_embeddings")
            low, high = settings["low_freq_factor"], settings["high_freq_factor"]
            context = context or fields.number("max_position_embeddings")
            return RopeScaling(float(settings["factor"]), (float(low), float(high), int(context)))
    except KeyError as error:
        raise FormatError(f"config.json: rotary scaling {kind!r} lacks {error}") from error
    raise InputError(
        f"rotary scaling {kind!r} is not supported (only 'default', 'linear' and 'llama3')"
    )


def window(fields: Fields, size: int | None) -> int | None:
    """A sliding window, or None where the context is no longer than it."""
    if size is None or size >= fields.number("max_position_embeddings"):
        return None
    return int(size)


def layer_types(fields: Fields, sliding: Sequence[bool]) -> list[bool]:
    """Which layers slide: what `layer_types` says, else the family's rule `sliding`.

    Raises:
      InputError: a layer of another type, or not one type a layer.
    """
    types = fields.get("layer_types")
    if types is None:
        return list(sliding)
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise InputError(f"layer_types: {kind!r} is not supported")
    if len(types) != len(sliding):
        raise InputError(f"layer_types names {len(types)} layers of {len(sliding)}")
    return [kind == "sliding_attention" for kind in types]


def config(
    fields: Fields, family: str, layers: Sequence[LayerSwitches], tied: bool = False, **switches
) -> ModelConfig:
    """The `ModelConfig` of sizes that all families name alike.

    Args:
      tied: the family's default of `tie_word_embeddings`.
      switches: further arguments of `ModelConfig`; rotary settings are read unless given.
    """
    if "rope_theta" not in switches:
        switches["rope_theta"], switches["rope_scaling"] = rope(fields)
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    read = ModelConfig(
        vocab_size=fields.number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.number("intermediate_size"),
        num_layers=fields.number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.number("num_key_value_heads", heads),
        head_dim=fields.number("head_dim", hidden // heads),
        norm_eps=fields.number("rms_norm_eps"),
        context=fields.number("max_position_embeddings"),
        tied=bool(fields.get("tie_word_embeddings", tied)),
        layers=() if all(layer == LayerSwitches() for layer in layers) else tuple(layers),
        family=family,
        **switches,
    )
    fields.finish()
    return read
