"""A smaller model as a drafter (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318), which here grows a tree, or a chain where `top_k` is 1.

It may be the target's own first layers (as in LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710).
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx, struct

from eagle_jax import hub
from eagle_jax.config import TreeShape
from eagle_jax.drafters.base import expand
from eagle_jax.errors import InputError
from eagle_jax.nn.attention import LayerCache, Visible, causal
from eagle_jax.nn.cache import commit_rows, empty_cache
from eagle_jax.sampling import Draw
from eagle_jax.target.families import FAMILIES, model_config
from eagle_jax.target.load import Target, TensorFolder, load_model, read_json
from eagle_jax.target.transformer import Earlier, Transformer
from eagle_jax.tree import DraftTree, grow

LAYERS = "layers:"
_ALIGNED = 16  # slots of a cache come in multiples of this


@struct.dataclass
class TextState:
    """What the model has read: every token up to the pending root.

    Attributes:
      caches: one a layer; row t holds token x_t, so that there is one row more than in the target's
        cache, which lacks the root.
      logits: `[B, V]` float32 the scores of the tokens after the root.
    """

    caches: tuple[LayerCache, ...]
    logits: jax.Array


class DraftModel(nnx.Module):
    """A transformer with the target's vocabulary that guesses what the target draws.

    Attributes:
      coupled: candidates are ranked with the noise that the target draws with; see
        `FeatureDrafter`. A draft model that equals the target then always guesses right.
    """

    method, taps = "draft_model", ()

    def __init__(self, model: Transformer):
        self.model, self.coupled = model, True

    def init(self, batch: int, length: int) -> TextState:
        """The state before any token, for `length` committed tokens and the root."""
        slots = -(-(length + 1) // _ALIGNED) * _ALIGNED
        dtype = self.model.embed[...].dtype
        return TextState(
            caches=empty_cache(self.model.config, batch, slots, dtype),
            logits=jnp.zeros((batch, self.model.config.vocab_size), jnp.float32),
        )

    def begin(self, state: TextState, first: jax.Array, fresh: jax.Array) -> TextState:
        """Reads the first token `[B]` of the rows that are `fresh` `[B]`."""
        start = jnp.zeros(len(first), jnp.int32)
        features, _, rows = self.model(
            first[:, None], start[:, None], Visible(start, causal((len(first), 1))), None
        )
        chosen = fresh[:, None, None, None]

        def commit(cache: LayerCache, new: LayerCache) -> LayerCache:
            keys = jnp.where(chosen, new.keys, cache.keys[..., :1])
            values = jnp.where(chosen, new.values, cache.values[:, :, :1])
            return commit_rows(cache, LayerCache(keys, values), start)

        return TextState(
            caches=tuple(map(commit, state.caches, rows)),
            logits=jnp.where(fresh[:, None], self.model.head(features)[:, 0], state.logits),
        )

    def observe(
        self,
        state: TextState,
        tokens: jax.Array,
        features: jax.Array,
        length: jax.Array,
        count: jax.Array,
    ) -> TextState:
        """Reads new tokens; see `FeatureDrafter`. The target's features are not used."""
        at = length + 1  # the root of the cycle before has been read
        predicted, _, fresh = self.model(
            tokens,
            at[:, None] + jnp.arange(tokens.shape[1]),
            Visible(at, causal(tokens.shape)),
            state.caches,
        )
        last = jnp.take_along_axis(predicted, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        return TextState(
            caches=tuple(
                commit_rows(cache, rows, at)
                for cache, rows in zip(state.caches, fresh, strict=True)
            ),
            logits=jnp.where(count[:, None] > 0, self.model.head(last)[:, 0], state.logits),
        )

    def promise(self, state: TextState, draw: Draw) -> jax.Array:
        """The probability `[B]` of the best of the root's children, noise included."""
        first = expand(state.logits[:, None], draw, 0, coupled=self.coupled)
        return jnp.exp(first.log_probs.max(axis=(1, 2)))

    def propose(
        self, state: TextState, root: jax.Array, length: jax.Array, draw: Draw, shape: TreeShape
    ) -> DraftTree:
        """Grows a draft tree under `root` `[B]`; `length` `[B]` counts the committed tokens."""
        first = expand(state.logits[:, None], draw, 0, coupled=self.coupled)

        def deepen(level, frontier, earlier):
            positions = jnp.broadcast_to((length + level)[:, None], frontier.tokens.shape)
            features, _, rows = self.model(
                frontier.tokens,
                positions,
                Visible(length + 1, frontier.visible),
                state.caches,
                earlier=earlier,
            )
            if earlier is not None:
                positions = jnp.concatenate([earlier.positions, positions], axis=1)
            children = expand(self.model.head(features), draw, level, coupled=self.coupled)
            return children, Earlier(rows, positions)

        return grow(root, first, deepen, shape)


def find_draft_model(name: str, target: Target) -> DraftModel | None:
    """The draft model of that name, or None where the name is none of a draft model.

    Args:
      name: `layers:N` for the target's own first N layers, a `.gguf` file, the default target's
        name, or the folder of a model in Hugging Face layout.

    Raises:
      InputError: layers that the target lacks, or another vocabulary.
      FormatError: a file is missing, corrupt or inconsistent.
    """
    if name.startswith(LAYERS):
        return DraftModel(target.model.first_layers(_count(name, target)))
    if name != hub.DEFAULT_TARGET and Path(name).suffix.lower() != ".gguf" and not _is_model(name):
        return None
    folder = hub.resolve(name)
    size = model_config(read_json(folder / "config.json")).vocab_size
    if size != target.config.vocab_size:
        raise InputError(
            f"a draft model needs the target's vocabulary: {name!r} has vocab_size={size}, but "
            f"{target.name!r} has {target.config.vocab_size}; take a smaller model of the target's "
            "family"
        )
    return DraftModel(load_model(folder, target.dtype))


def _count(name: str, target: Target) -> int:
    text, have = name.removeprefix(LAYERS), target.config.num_layers
    if not text.isdecimal() or not 1 <= int(text) <= have:
        raise InputError(
            f"expected {LAYERS}N with N from 1 to the target's {have} layers, got {name!r}"
        )
    return int(text)


def _is_model(name: str) -> bool:
    """Whether a folder holds a whole model: a head names a family as well, but lacks the norm that
    a model ends with."""
    folder = Path(name)
    path = folder / "config.json"
    if not path.is_file() or read_json(path).get("model_type") not in FAMILIES:
        return False
    if not any((folder / file).is_file() for file in TensorFolder.FILES):
        return False
    names = TensorFolder(folder).files
    return any(name.endswith("model.norm.weight") for name in names) and not any(
        name.endswith("fc.weight") for name in names
    )
