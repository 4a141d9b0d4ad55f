"""What a folder holds: facts about targets and heads, and the memory that decoding takes.

Only headers and configurations are read, and no array of a target is made; the weights of a head
that another project wrote are read, since their shapes and values decide what it is.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eagle_jax.config import DrafterConfig, ModelConfig, TreeShape
from eagle_jax.decode.engine import slot_bucket
from eagle_jax.drafters.feature import Head
from eagle_jax.drafters.formats.read import HEADS, check_fit, read_head
from eagle_jax.drafters.formats.settings import Overrides
from eagle_jax.drafters.load import FORMAT, own_config, read_own
from eagle_jax.errors import FormatError, InputError
from eagle_jax.nn.cache import empty_cache, empty_layer
from eagle_jax.nn.modules import parameter_shapes
from eagle_jax.target.families import model_config
from eagle_jax.target.generation import generation_defaults
from eagle_jax.target.load import TensorFolder, read_json
from eagle_jax.target.transformer import Transformer
from eagle_jax.text import eos_token_ids, load_tokenizer


@dataclasses.dataclass(frozen=True)
class TargetFacts:
    """A target on disk.

    Attributes:
      folder: in Hugging Face layout.
      config: its sizes and switches.
      parameters: numbers in its weights, a tied LM head counted once.
      stored: dtype -> bytes of the tensors on disk.
      files: how many hold them.
      eos: token ids that end an answer.
      chat_template: there is one.
      generation_defaults: how its `generation_config.json` would draw tokens.
    """

    folder: Path
    config: ModelConfig
    parameters: int
    stored: dict[str, int]
    files: int
    eos: tuple[int, ...]
    chat_template: bool
    generation_defaults: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class HeadFacts:
    """A head on disk.

    Attributes:
      folder: with its `config.json` and weights.
      format: `eagle_jax/1`, or which other.
      method: `eagle` or `eagle3`.
      config: its sizes and switches.
      layers: layers of the target that it reads; None where the target's depth decides.
      parameters: numbers in its own weights.
      settings: further choices and where they come from, as text.
      target: the target's name where the head's file gives it.
      tau: measured tau by tree, if any.
    """

    folder: Path
    format: str
    method: str
    config: DrafterConfig
    layers: tuple[int, ...] | None
    parameters: int
    settings: tuple[str, ...]
    target: str | None
    tau: tuple[dict[str, Any], ...]


def is_head(folder: Path) -> bool:
    """Whether a folder with `config.json` holds a head, and no target.

    Released heads call themselves by their target's `model_type`, so the tensors decide: no target
    has an `fc`, and none comes as `pytorch_model.bin` alone.
    """
    raw = read_json(folder / "config.json")
    if raw.get("format") == FORMAT or "speculators_model_type" in raw or "medusa_num_heads" in raw:
        return True
    try:
        names = TensorFolder(folder).files
    except InputError:
        return any(folder.glob("pytorch_model.bin*"))
    return any(name.removeprefix("model.") == "fc.weight" for name in names)


def target_facts(folder: Path) -> TargetFacts:
    """Facts of a target in Hugging Face layout.

    Raises:
      InputError: the family is not supported, or there are no weights.
      FormatError: a file is missing, corrupt or inconsistent.
    """
    config = model_config(read_json(folder / "config.json"))
    tensors = TensorFolder(folder)
    if not config.tied and tensors.lacks_head:
        config = dataclasses.replace(config, tied=True)
    tokenizer = load_tokenizer(folder)
    return TargetFacts(
        folder=folder,
        config=config,
        parameters=_count(lambda: Transformer(config, rngs=nnx.Rngs(0))),
        stored=tensors.stored(),
        files=len(set(tensors.files.values())),
        eos=eos_token_ids(folder),
        chat_template=tokenizer is not None and tokenizer.has_chat_template,
        generation_defaults=generation_defaults(folder),
    )


def head_facts(folder: Path, overrides: Overrides) -> HeadFacts:
    """Facts of a head, read and checked as when it is loaded.

    Raises:
      InputError: a head of another method, or an override that it does not know.
      FormatError: the files are corrupt or inconsistent.
    """
    raw = read_json(folder / "config.json")
    if "format" in raw:
        method, config = own_config(folder, raw, overrides)
        tensors, _ = read_own(folder / "model.safetensors", config)
        expected = parameter_shapes(lambda: _head(method, config))
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != expected:
            odd = sorted(set(found.items()) ^ set(expected.items()))
            raise FormatError(f"{folder}: config.json and tensors disagree about {odd[0][0]}")
        layers, kind, settings = config.taps or None, FORMAT, ()
        target = raw.get("target") if isinstance(raw.get("target"), str) else None
        tau = tuple(raw.get("tau", ()))
    else:
        file = read_head(folder, raw, overrides)
        method, config, layers, kind = file.kind, file.config, file.layers, file.format
        settings = tuple(map(str, file.settings))
        target, tau = None, ()
    count = _count(lambda: _head(method, config))
    return HeadFacts(folder, kind, method, config, layers, count, settings, target, tau)


def misfit(head: HeadFacts, target: ModelConfig, name: str) -> str | None:
    """Why a head and a target do not belong together, or None where they do."""
    try:
        check_fit(dataclasses.replace(head.config, taps=head.layers or ()), target, name)
    except InputError as error:
        return str(error)
    return None


def memory(
    target: ModelConfig,
    head: HeadFacts | None,
    *,
    length: int,
    batch: int,
    shape: TreeShape,
    dtype: Any,
) -> dict[str, int]:
    """Bytes that decoding holds, by part.

    Weights and caches are exact. A pass over a tree is an estimate from above of what it holds
    besides: logits and noise in float32, one layer's attention scores and feed-forward rows, and
    the fresh keys and values of every layer; XLA lets some of these share memory.

    Args:
      target: sizes of the target.
      head: the drafter, or None for plain decoding.
      length: tokens of a row, prompt and answer together.
      batch: rows.
      shape: the tree.
      dtype: of weights and caches.
    """
    itemsize, slots = jnp.dtype(dtype).itemsize, slot_bucket(length + shape.depth + 1)
    cache = jax.eval_shape(lambda: empty_cache(target, batch, slots, dtype))
    weights = _count(lambda: Transformer(target, rngs=nnx.Rngs(0)))
    parts = {"target weights": weights * itemsize, "target cache": _bytes(cache)}
    if head is not None:
        config = head.config
        own = head.parameters
        if not config.own_lm_head and config.draft_vocab_size != target.vocab_size:
            own += config.draft_vocab_size * config.hidden_size  # its rows of the target's LM head
        parts["drafter weights"] = own * itemsize
        layer = jax.eval_shape(
            lambda: empty_layer(batch, config.num_kv_heads, config.head_dim, slots, dtype)
        )
        parts["drafter cache"] = _bytes(layer)
    nodes, levels = shape.nodes, shape.depth + 1
    drawn = (nodes + levels) * target.vocab_size * 4
    scores = 2 * nodes * target.num_heads * (slots + nodes) * 4
    inner = 3 * nodes * target.intermediate_size * itemsize
    rows = 2 * (nodes + levels) * target.num_layers * target.num_kv_heads * target.head_dim
    parts["tree pass"] = batch * (drawn + scores + inner + rows * itemsize)
    return parts


def _head(method: str, config: DrafterConfig) -> Head:
    return HEADS[method](config, rngs=nnx.Rngs(0))


def _count(build) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(build).values())


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
