"""Drafters on disk: our safetensors format, loaded and bound to a target."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.config import DrafterConfig
from eagle_jax.drafters.base import Drafter
from eagle_jax.drafters.eagle import EagleHead
from eagle_jax.drafters.eagle3 import Eagle3Head
from eagle_jax.drafters.feature import FeatureDrafter, Head
from eagle_jax.errors import FormatError, InputError
from eagle_jax.nn.modules import fill, parameters
from eagle_jax.target.load import Target, read_json

FORMAT = "eagle_jax/1"
HEADS = {kind.method: kind for kind in (EagleHead, Eagle3Head)}
SHIPPED = {"smollm2-135m": "smollm2-135m-eagle3"}


@dataclasses.dataclass(eq=False)
class LoadedDrafter:
    """A drafter bound to its target.

    Attributes:
      name: what it was loaded from.
      module: the drafter.
      tau: measured tau by tree, rows as `tau_by_tree` gives them, from which the fastest tree for
        a machine is worked out. Empty when nobody measured.
    """

    name: str
    module: Drafter
    tau: Sequence[Mapping[str, Any]] = ()

    @property
    def method(self) -> str:
        return self.module.method


def load_drafter(name: str | None, target: Target) -> LoadedDrafter | None:
    """Loads a drafter for a target.

    Args:
      name: `auto` takes the head that ships for the target, `none` or None gives None, otherwise
        the folder of a head.

    Raises:
      InputError: nothing is there, or the head belongs to another target.
      FormatError: the files are corrupt or inconsistent.
    """
    if name in (None, "none"):
        return None
    if name == "auto":
        if target.name not in SHIPPED:
            raise InputError(
                f"no head ships for the target {target.name!r}; pass the folder of one, "
                "or 'none' to decode plainly"
            )
        folder = shipped_folder(target.name)
    else:
        folder = Path(name)
    if not folder.is_dir():
        raise InputError(
            f"no drafter at {name!r}: expected 'auto', 'none' or a folder with config.json and "
            "model.safetensors"
        )
    raw = read_json(folder / "config.json")
    method = raw.get("method")
    if raw.get("format") != FORMAT or method not in HEADS:
        raise FormatError(
            f"{folder / 'config.json'}: expected format {FORMAT!r} and a method of "
            f"{sorted(HEADS)}, found {raw.get('format')!r} and {method!r}"
        )
    try:
        fields = raw["head"]
        config = DrafterConfig(**{**fields, "taps": tuple(fields.get("taps", ()))})
    except (KeyError, TypeError) as error:
        raise FormatError(f"{folder / 'config.json'}: bad field {error}") from error
    head, draft_ids = _read_head(folder / "model.safetensors", HEADS[method], config, target.dtype)
    return LoadedDrafter(str(name), bind(head, draft_ids, target), tuple(raw.get("tau", ())))


def shipped_folder(target_name: str) -> Path:
    """Where the package keeps the head of a target by name."""
    return Path(str(importlib.resources.files("eagle_jax"))) / "heads" / SHIPPED[target_name]


def bind(head: Head, draft_ids: np.ndarray | None, target: Target) -> FeatureDrafter:
    """Joins a head with the embedding and the LM head of its target.

    Raises:
      InputError: hidden size or vocabulary differ, or the target lacks a layer that the head taps.
    """
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(head.config, field), getattr(target.config, field)
        if ours != theirs:
            raise InputError(
                f"this head was made for a target with {field}={ours}, but {target.name!r} has "
                f"{theirs}; load the head that belongs to the target"
            )
    if not all(0 <= tap <= target.config.num_layers for tap in head.config.taps):
        raise InputError(
            f"this head reads the layers {head.config.taps}, but {target.name!r} has "
            f"{target.config.num_layers}; load the head that belongs to the target"
        )
    rows = None if head.lm_head is not None else target.model.head_weight
    if draft_ids is not None:
        draft_ids = jnp.asarray(draft_ids, jnp.int32)
        rows = None if rows is None else rows[draft_ids]
    return FeatureDrafter(head, target.model.embed, rows, draft_ids)


def save_head(
    folder: Path, head: Head, draft_ids: np.ndarray | None, facts: Mapping[str, Any]
) -> None:
    """Writes a head as `config.json` and bfloat16 `model.safetensors`.

    Args:
      draft_ids: `[draft_vocab]` ascending target ids, None for the full vocabulary.
      facts: further fields of the configuration, such as `tau`, `target` and `training`.
    """
    from safetensors.flax import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: array.astype(jnp.bfloat16) for name, array in parameters(head).items()}
    if draft_ids is not None:
        tensors["draft_ids"] = jnp.asarray(draft_ids, jnp.int32)
    temporary = folder / "model.safetensors.part"
    save_file(tensors, temporary)
    temporary.replace(folder / "model.safetensors")
    fields = dataclasses.asdict(head.config)
    config = {"format": FORMAT, "method": head.method, "head": fields, **facts}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _read_head(
    path: Path, kind: type[Head], config: DrafterConfig, dtype
) -> tuple[Head, np.ndarray | None]:
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise FormatError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path} is not a readable safetensors file: {error}") from error
    draft_ids = tensors.pop("draft_ids", None)
    if draft_ids is not None:
        draft_ids = np.asarray(draft_ids)
        ascending = draft_ids.ndim == 1 and (np.diff(draft_ids) > 0).all()
        if not ascending or draft_ids[0] < 0 or draft_ids[-1] >= config.vocab_size:
            raise FormatError(f"{path}: draft_ids must rise and lie in [0, {config.vocab_size})")
    found = config.vocab_size if draft_ids is None else len(draft_ids)
    if found != config.draft_vocab_size:
        raise FormatError(
            f"{path}: draft_vocab_size is {config.draft_vocab_size}, found {found} draft ids"
        )
    for name, tensor in tensors.items():
        if not bool(jnp.isfinite(tensor).all()):
            raise FormatError(f"{path}: {name} holds values that are not finite")
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    return fill(lambda: kind(config, rngs=nnx.Rngs(0)), tensors), draft_ids
