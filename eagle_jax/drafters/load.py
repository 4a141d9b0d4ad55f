"""Drafters on disk, loaded and bound to a target: our own format, and those of `formats`."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.config import DrafterConfig, TreeShape
from eagle_jax.drafters.base import Drafter
from eagle_jax.drafters.draft_model import find_draft_model
from eagle_jax.drafters.feature import FeatureDrafter, Head
from eagle_jax.drafters.formats.read import HEADS, build, check_fit, read_head
from eagle_jax.drafters.formats.settings import Overrides, Setting
from eagle_jax.drafters.merged import MergedDrafter
from eagle_jax.drafters.ngram import NgramDrafter
from eagle_jax.errors import FormatError, InputError
from eagle_jax.nn.modules import fill, parameters
from eagle_jax.target.load import Target, read_json

FORMAT = "eagle_jax/1"
NO_OVERRIDES = Overrides()
NGRAM_TREE = TreeShape(4, 3, 1, gate=0.5)  # nothing is checked where no match is long
SHIPPED = {"smollm2-135m": "smollm2-135m-eagle3"}


@dataclasses.dataclass(eq=False)
class LoadedDrafter:
    """A drafter bound to its target.

    Attributes:
      name: what it was loaded from.
      module: the drafter.
      tau: measured tau by tree, rows as `tau_by_tree` gives them, from which the fastest tree for
        a machine is worked out. Empty when nobody measured.
      format: `eagle_jax/1`, or what kind of file it came from.
      settings: what was chosen where the file or the caller had a choice, and why.
      tree: the tree to use unless another is asked for, where measuring cannot tell: what n-grams
        are worth hangs on the text. None leaves the choice to the tuner.
    """

    name: str
    module: Drafter
    tau: Sequence[Mapping[str, Any]] = ()
    format: str = FORMAT
    settings: tuple[Setting, ...] = ()
    tree: TreeShape | None = None

    @property
    def method(self) -> str:
        return self.module.method


def load_drafter(
    name: str | None,
    target: Target,
    *,
    rope_theta: float | None = None,
    layers: Sequence[int] | None = None,
    norm_before_residual: bool | None = None,
) -> LoadedDrafter | None:
    """Loads a drafter for a target.

    Args:
      name: `auto` takes the head that ships for the target, `none` or None gives None, `ngram`
        looks the text's last tokens up in the text, `layers:N` drafts with the target's own first N
        layers. Otherwise a model with the target's vocabulary (a folder in Hugging Face layout or a
        `.gguf` file), or the folder of a head: of this project, EAGLE-1/2 or EAGLE-3 as released or
        as others write it (safetensors or `pytorch_model.bin`), or of the speculators format. With
        `+ngram` after it, n-grams are merged into a drafter's tree.
      rope_theta: base of the drafter's rotary positions instead of the head's own; 10,000 where a
        released head names none, whatever the target uses.
      layers: layers of the target whose input an EAGLE-3 head fuses, instead of the head's own.
      norm_before_residual: residual variant of an EAGLE-3 head, instead of the head's own.

    Raises:
      InputError: nothing is there, the head belongs to another target or is of another method, or
        a draft model has another vocabulary.
      FormatError: the files are corrupt or inconsistent.
    """
    if name in (None, "none"):
        return None
    overrides = Overrides(
        rope_theta, None if layers is None else tuple(layers), norm_before_residual
    )
    if (other := _no_head(str(name), target, overrides)) is not None:
        return other
    folder = head_folder(name, target.name)
    raw = read_json(folder / "config.json")
    if "format" not in raw:
        file = read_head(folder, raw, overrides)
        head, settings = build(file, target)
        module = bind(head, file.draft_ids, target)
        return LoadedDrafter(str(name), module, (), file.format, settings)
    method, config = own_config(folder, raw, overrides)
    tensors, draft_ids = read_own(folder / "model.safetensors", config)
    tensors = {name: tensor.astype(target.dtype) for name, tensor in tensors.items()}
    kind = HEADS[method]
    head = fill(lambda: kind(config, rngs=nnx.Rngs(0)), tensors)
    settings = tuple(
        Setting(field.replace("_", " "), value, "option")
        for field, value in dataclasses.asdict(overrides).items()
        if value is not None
    )
    return LoadedDrafter(
        str(name), bind(head, draft_ids, target), _measured(folder, raw), FORMAT, settings
    )


def _no_head(name: str, target: Target, overrides: Overrides) -> LoadedDrafter | None:
    """A drafter that is no head, or None where the name is not one's."""
    base, plus, added = name.rpartition("+")
    if plus and not Path(name).exists():
        if added != "ngram" or base in ("", "none", "ngram"):
            raise InputError(
                "expected '+ngram' after a head or a draft model, such as 'auto+ngram', got "
                f"{name!r}"
            )
        found = load_drafter(base, target, **dataclasses.asdict(overrides))
        module = MergedDrafter(found.module, target.config.vocab_size)
        return dataclasses.replace(found, name=name, module=module)
    if name == "ngram":
        module = NgramDrafter(target.config.vocab_size)
        found = LoadedDrafter(name, module, format="no weights", tree=NGRAM_TREE)
    else:
        module = find_draft_model(name, target)
        if module is None:
            return None
        found = LoadedDrafter(name, module, format="a whole model")
    if overrides != NO_OVERRIDES:
        raise InputError(f"{name!r} is no head: it has no rope_theta, layers or residual to choose")
    return found


def head_folder(name: str, target_name: str | None) -> Path:
    """The folder of a head by name; `auto` is the one that ships for the target.

    Raises:
      InputError: there is none.
    """
    if name == "auto":
        if target_name not in SHIPPED:
            raise InputError(
                f"no head ships for the target {target_name!r}; pass the folder of one, "
                "or 'none' to decode plainly"
            )
        return shipped_folder(target_name)
    folder = Path(name)
    if not folder.is_dir():
        raise InputError(
            f"no drafter at {name!r}: expected 'auto', 'none', 'ngram', 'layers:N', a .gguf file, "
            "or the folder of a model or head: config.json and model.safetensors or "
            "pytorch_model.bin"
        )
    return folder


def own_config(
    folder: Path, raw: Mapping[str, Any], overrides: Overrides = NO_OVERRIDES
) -> tuple[str, DrafterConfig]:
    """Method and sizes of a head in our format, of the content of its `config.json`.

    Raises:
      FormatError: another format or method, or a field that is missing, unknown or of a wrong type.
      InputError: an override that the method does not know.
    """
    where, method = folder / "config.json", raw.get("method")
    if raw.get("format") != FORMAT or not isinstance(method, str) or method not in HEADS:
        raise FormatError(
            f"{where}: expected format {FORMAT!r} and a method of "
            f"{sorted(HEADS)}, found {raw.get('format')!r:.60} and {method!r:.60}"
        )
    try:
        fields = dict(raw["head"])
        fields["taps"] = tuple(fields.get("taps", ()))
        config = DrafterConfig(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: bad field {error}") from error
    if bool(config.taps) != (method == "eagle3"):
        raise FormatError(f"{where}: taps {config.taps} do not belong to the method {method!r}")
    changed = {}
    if overrides.rope_theta is not None:
        changed["rope_theta"] = float(overrides.rope_theta)
    if method == "eagle" and (overrides.layers or overrides.norm_before_residual is not None):
        raise InputError(f"{folder} is an EAGLE-1/2 head: it has no layers or residual to choose")
    if overrides.layers is not None:
        if len(overrides.layers) != len(config.taps):
            raise InputError(
                f"{folder} reads {len(config.taps)} layers, but {len(overrides.layers)} were named"
            )
        changed["taps"] = overrides.layers
    if overrides.norm_before_residual is not None:
        changed["norm_before_residual"] = overrides.norm_before_residual
    return method, dataclasses.replace(config, **changed)


def _measured(folder: Path, raw: Mapping[str, Any]) -> tuple:
    """The rows of `tau` in a configuration."""
    rows = raw.get("tau", ())
    known = ("nodes", "depth", "top_k", "tau")
    if not isinstance(rows, (list, tuple)) or any(
        not isinstance(row, dict) or not isinstance(row.get(name, 1), (int, float))
        for row in rows
        for name in known
    ):
        raise FormatError(f"{folder / 'config.json'}: tau should be a list of objects with numbers")
    return tuple(rows)


def shipped_folder(target_name: str) -> Path:
    """Where the package keeps the head of a target by name."""
    return Path(str(importlib.resources.files("eagle_jax"))) / "heads" / SHIPPED[target_name]


def bind(head: Head, draft_ids: np.ndarray | None, target: Target) -> FeatureDrafter:
    """Joins a head with the embedding and the LM head of its target.

    Raises:
      InputError: hidden size or vocabulary differ, or the target lacks a layer that the head taps.
    """
    check_fit(head.config, target.config, target.name)
    rows = None if head.lm_head is not None else target.model.head_weight
    if draft_ids is not None:
        draft_ids = jnp.asarray(draft_ids, jnp.int32)
        rows = None if rows is None else rows[draft_ids]
    embed = None if head.embed is not None else target.model.embed
    return FeatureDrafter(head, embed, rows, draft_ids)


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


def read_own(path: Path, config: DrafterConfig) -> tuple[dict[str, jax.Array], np.ndarray | None]:
    """The parameters of a head in our format by dotted path, and its draft ids.

    Raises:
      FormatError: the file is missing, corrupt, or does not hold what `config` says.
    """
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise FormatError(f"{path} is missing") from error
    except (SafetensorError, OSError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise FormatError(f"{path} is not a readable safetensors file: {error}") from error
    draft_ids = tensors.pop("draft_ids", None)
    if draft_ids is not None:
        draft_ids = np.asarray(draft_ids)
        whole = draft_ids.ndim == 1 and draft_ids.dtype.kind in "iu" and len(draft_ids) > 0
        ascending = whole and (np.diff(draft_ids.astype(np.int64)) > 0).all()
        if not ascending or draft_ids[0] < 0 or draft_ids[-1] >= config.vocab_size:
            raise FormatError(f"{path}: draft_ids must rise and lie in [0, {config.vocab_size})")
    found = config.vocab_size if draft_ids is None else len(draft_ids)
    if found != config.draft_vocab_size:
        raise FormatError(
            f"{path}: draft_vocab_size is {config.draft_vocab_size}, found {found} draft ids"
        )
    for name, tensor in tensors.items():
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise FormatError(f"{path}: {name} should hold floats, found {tensor.dtype}")
        if not bool(jnp.isfinite(tensor).all()):
            raise FormatError(f"{path}: {name} holds values that are not finite")
    return tensors, draft_ids
