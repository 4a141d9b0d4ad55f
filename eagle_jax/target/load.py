"""Loads a target: weights, configuration and tokenizer from one folder."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax import hub
from eagle_jax.config import ModelConfig
from eagle_jax.errors import FormatError, InputError
from eagle_jax.nn.modules import fill
from eagle_jax.target.families import model_config, target_tensors
from eagle_jax.target.generation import generation_defaults
from eagle_jax.target.transformer import Transformer
from eagle_jax.text import Tokenizer, eos_token_ids, load_tokenizer


@dataclasses.dataclass(eq=False)
class Target:
    """A loaded target.

    Attributes:
      name: what it was loaded from.
      model: the network.
      tokenizer: its tokenizer, or None for a target that only sees token ids.
      eos: token ids that end an answer.
      generation_defaults: how the model's `generation_config.json` would draw tokens. For whoever
        asks: nothing here applies them.
    """

    name: str
    model: Transformer
    tokenizer: Tokenizer | None
    eos: tuple[int, ...]
    generation_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    engines: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def dtype(self) -> jnp.dtype:
        return self.model.embed[...].dtype


def default_dtype() -> jnp.dtype:
    """float32 on CPU, where bfloat16 products are slow, and bfloat16 on TPU and GPU."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def load_target(name: str = hub.DEFAULT_TARGET, *, dtype: Any = None) -> Target:
    """Loads a target by name.

    Args:
      name: `smollm2-135m` (fetched once into the user cache), a local folder in Hugging Face
        layout, a `.gguf` file, or a Hugging Face id such as `org/model`.
      dtype: of weights and caches; None picks `default_dtype()`.

    Raises:
      InputError: the name or the model's family is not supported.
      FormatError: a file is missing, corrupt or inconsistent.
      DownloadError: the weights could not be fetched.
    """
    folder = hub.resolve(str(name))
    # The small files first: what is wrong with them should not wait for the weights.
    tokenizer = load_tokenizer(folder)
    eos, defaults = eos_token_ids(folder), generation_defaults(folder)
    model = load_model(folder, dtype)
    return Target(str(name), model, tokenizer, eos, defaults)


def load_model(folder: Path, dtype: Any = None) -> Transformer:
    """Loads the network of a folder in Hugging Face layout, tensor by tensor.

    A tensor goes to the device before the next one is read, so that the host never holds more than
    one beside those that wait there.

    Raises:
      InputError: the family is not supported, or there are no weights.
      FormatError: a file is missing, corrupt or inconsistent.
    """
    config = model_config(read_json(folder / "config.json"))
    dtype = jnp.dtype(dtype or default_dtype())
    reader = TensorFolder(folder)
    if not config.tied and reader.lacks_head:
        config = dataclasses.replace(config, tied=True)
    arrays = {}
    for path, array in target_tensors(reader.read, config):
        arrays[path] = jax.block_until_ready(jnp.asarray(array, dtype))
    return fill(lambda: Transformer(config, rngs=nnx.Rngs(0)), arrays)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; FormatError when it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FormatError(f"{path.parent} has no {path.name}; a model folder needs one") from error
    except ValueError as error:
        raise FormatError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


class TensorFolder:
    """Reads single tensors of `model.safetensors`, or of shards listed in an index file."""

    FILES = ("model.safetensors", "model.safetensors.index.json")

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"
        self._files: dict[str, Path] = {}
        if index.is_file():
            for name, file in read_json(index).get("weight_map", {}).items():
                if Path(file).name != file:
                    raise FormatError(f"{index}: {file!r} is not a file name in this folder")
                self._files[name] = folder / file
        elif (folder / "model.safetensors").is_file():
            path = folder / "model.safetensors"
            with _open(path) as handle:
                self._files = dict.fromkeys(handle.keys(), path)
        else:
            raise InputError(
                f"{folder} holds no model.safetensors (or model.safetensors.index.json); "
                "pass a folder in Hugging Face layout, a .gguf file, or a model id"
            )

    @property
    def files(self) -> dict[str, Path]:
        """Where each tensor lies, by its name in the checkpoint."""
        return dict(self._files)

    def stored(self) -> dict[str, int]:
        """Bytes of the tensors by dtype (`F32`, `BF16`, ...), of the files' headers alone."""
        found: dict[str, int] = {}
        for path in sorted(set(self._files.values())):
            with _open(path) as handle:
                for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
                    part = handle.get_slice(name)
                    kind, size = part.get_dtype(), math.prod(part.get_shape())
                    # F32, BF16, I64, F8_E4M3: the first number is the bits of an element.
                    bits = int(re.search(r"\d+", kind)[0]) if kind != "BOOL" else 8
                    found[kind] = found.get(kind, 0) + size * bits // 8
        return found

    @property
    def lacks_head(self) -> bool:
        """There is no LM head: it must be the embedding matrix."""
        return "lm_head.weight" not in self._files

    def read(self, name: str) -> np.ndarray:
        """One tensor by its name in the checkpoint."""
        if name not in self._files:
            raise FormatError(f"the checkpoint has no tensor {name!r}")
        path = self._files[name]
        with _open(path) as handle:
            if name not in handle.keys():  # noqa: SIM118 (a handle is no mapping)
                raise FormatError(f"{path} has no tensor {name!r}, which its index promises")
            tensor = handle.get_tensor(name)
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise FormatError(
                f"{path}: {name} should hold floating-point numbers, holds {tensor.dtype} "
                "(quantised checkpoints are not supported)"
            )
        return tensor


def _open(path: Path):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except FileNotFoundError as error:
        raise FormatError(f"{path} is missing") from error
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path} is not a readable safetensors file: {error}") from error
