"""What the configuration of a released head says, and what was chosen where it says nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle_jax.errors import FormatError, InputError

ROPE_THETA = 10_000.0  # what the EAGLE repository trains with, whatever its target uses


@dataclasses.dataclass(frozen=True)
class Setting:
    """One choice that a head leaves open, with where its value comes from."""

    name: str
    value: Any
    source: str

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, (tuple, list)):
            value = ",".join(map(str, value))
        return f"{self.name} {value} ({self.source})"


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Choices that win over a head's own configuration; None leaves them to it.

    Attributes:
      rope_theta: base of the drafter's rotary positions.
      layers: layers of the target whose input an EAGLE-3 head fuses, the lowest first.
      norm_before_residual: see `DrafterConfig`.
    """

    rope_theta: float | None = None
    layers: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None


class Raw:
    """A `config.json` whose fields are read with the type that they should have.

    A speculators configuration nests the layer's fields; they are read as if they lay side by side,
    and so are those of `eagle_config`.
    """

    def __init__(self, fields: Mapping[str, Any], where: object):
        self.where, self.speculators = where, "speculators_model_type" in fields
        layer = self._part(fields, "transformer_layer_config") if self.speculators else {}
        if self.speculators and fields["speculators_model_type"] != "eagle3":
            raise InputError(
                f"{where}: speculators of type 'eagle3' are supported, found "
                f"{fields['speculators_model_type']!r:.60}"
            )
        eagle = self._part(fields, "eagle_config")
        own = {name: value for name, value in fields.items() if value is not None}
        self.fields = {**layer, **eagle, **own}
        if eagle.get("use_aux_hidden_state", True) is not True:
            raise InputError(f"{where}: a head that fuses no layers of the target is not supported")

    def _part(self, fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        part = fields.get(name)
        if part is None:
            part = {}
        if not isinstance(part, dict):
            raise FormatError(f"{self.where}: {name} should be an object, found {part!r:.60}")
        return {key: value for key, value in part.items() if value is not None}

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of type `kind`, or the default where it is absent or null."""
        value = self.fields.get(name)
        if value is None:
            return default
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise FormatError(
                f"{self.where}: {name} should be of type {kind.__name__}, found {value!r:.60}"
            )
        return value

    def need(self, name: str, kind: type) -> Any:
        value = self.get(name, kind)
        if value is None:
            raise FormatError(f"{self.where} lacks the field {name!r}")
        return value

    def layers(self) -> tuple[int, ...] | None:
        """Layers that the head fuses; EAGLE's own files do not name them."""
        ids = self.get("eagle_aux_hidden_state_layer_ids", list)
        if ids is not None and (not ids or any(type(layer) is not int for layer in ids)):
            raise FormatError(f"{self.where}: expected layer numbers, found {ids!r:.80}")
        return None if ids is None else tuple(ids)

    def rope(self, chosen: float | None) -> Setting:
        """The base of the rotary positions.

        Raises:
          InputError: the head scales its positions, and no base was chosen instead.
        """
        if chosen is not None:
            return Setting("rope base", float(chosen), "option")
        # transformers 5 writes one dictionary, earlier versions two fields.
        rope = self.get("rope_parameters", dict) or self.get("rope_scaling", dict, {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", None):
            raise InputError(
                f"{self.where}: rotary scaling {kind!r:.40} of a head is not supported; choose a "
                "base with rope_theta (--drafter-rope-theta) to load it without the scaling"
            )
        inner = rope.get("rope_theta")
        if inner is not None and (isinstance(inner, bool) or not isinstance(inner, (int, float))):
            raise FormatError(f"{self.where}: rope_theta should be a number, found {inner!r:.60}")
        theta = inner or self.get("rope_theta", float)
        if theta is None:
            return Setting("rope base", ROPE_THETA, "default, config.json names none")
        return Setting("rope base", float(theta), "config.json")

    def residual(self, chosen: bool | None) -> Setting:
        """Whether the residual is taken after the norm."""
        if chosen is not None:
            return Setting("norm before residual", chosen, "option")
        stated = self.get("norm_before_residual", bool)
        if stated is None:
            # vLLM's reading of a speculators file that does not say.
            return Setting("norm before residual", self.speculators, "default of the format")
        return Setting("norm before residual", stated, "config.json")

    def refuse_variants(self) -> None:
        """Refuses what changes the forward pass in ways that are not built here."""
        if (act := self.get("hidden_act", str, "silu")) != "silu":
            raise InputError(f"{self.where}: activation {act!r:.40} is not supported (only 'silu')")
        kinds = self.get("layer_types", list, [])
        if self.get("use_sliding_window", bool, False) or "sliding_attention" in kinds:
            raise InputError(f"{self.where}: sliding-window attention in a head is not supported")
        for switch in ("eh_proj_before_attn", "use_mla", "parallel_drafting"):
            if self.get(switch, bool, False):
                raise InputError(f"{self.where}: {switch}=true is not supported")
