"""The target's forward pass: one function for prefill, plain decoding and tree verification."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx, struct

from eagle_jax.config import ModelConfig
from eagle_jax.nn.attention import LayerCache, Visible
from eagle_jax.nn.layer import DecoderLayer
from eagle_jax.nn.linear import matmul
from eagle_jax.nn.modules import module_list
from eagle_jax.nn.norm import RMSNorm
from eagle_jax.nn.rope import rotation


@struct.dataclass
class Earlier:
    """Rows of a tree that came before those of a pass and are not committed.

    Attributes:
      rows: M keys and values a layer.
      positions: `[B, M]` int32.
    """

    rows: tuple[LayerCache, ...]
    positions: jax.Array


class Transformer(nnx.Module):
    """A decoder-only transformer; `ModelConfig` says which family's.

    Layers are a Python list and unrolled when compiled: on CPU a scan over stacked weights copies
    every layer's weights and costs a plain step 1.4 times as much.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(jax.random.normal(rngs.params(), shape) * 0.02)
        self.layers = module_list(
            [
                DecoderLayer(
                    config.hidden_size,
                    config.intermediate_size,
                    config.num_heads,
                    config.num_kv_heads,
                    config.head_dim,
                    config.norm_eps,
                    switches=config.layer(index),
                    rngs=rngs,
                )
                for index in range(config.num_layers)
            ]
        )
        shifted = config.layer(config.num_layers - 1).shifted_norms
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, shifted=shifted)
        head = jax.random.normal(rngs.params(), shape) * config.hidden_size**-0.5
        self.lm_head = None if config.tied else nnx.Param(head)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        visible: Visible,
        caches: Sequence[LayerCache] | None,
        taps: Sequence[int] = (),
        earlier: Earlier | None = None,
    ) -> tuple[jax.Array, jax.Array, tuple[LayerCache, ...]]:
        """Runs the layers; the LM head is a separate call, so that callers choose the rows.

        Args:
          tokens: `[B, N]` int32 token ids.
          positions: `[B, N]` int32 absolute positions.
          visible: what each row sees.
          caches: one committed cache a layer, or None when nothing is committed.
          taps: layers whose input (the residual stream) is returned, as EAGLE-3 fuses them; the
            number of layers stands for the last layer's output.
          earlier: rows of the same tree that came before these, uncommitted.

        Returns:
          features `[B, N, hidden]` (after the final norm, the LM head's input), taps
          `[B, N, len(taps) * hidden]`, and the fresh keys and values of each layer, `earlier`'s
          included.
        """
        config, x = self.config, self.embed[...][tokens]
        if config.scaled_embedding:
            x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
        streams, fresh = [x], []
        columns = None if earlier is None else jnp.concatenate([earlier.positions, positions], 1)
        angles, seen = {None: None}, {None: visible}  # by kind of layer, made once a pass
        for index, layer in enumerate(self.layers):
            rope, window = config.rope(index), config.layer(index).window
            if rope not in angles:
                angles[rope] = rotation(positions, config.head_dim, *rope)
            if window not in seen:
                seen[window] = visible.within(window, positions, columns)
            cache = None if caches is None else caches[index]
            before = None if earlier is None else earlier.rows[index]
            x, rows = _layer(*nnx.split(layer), x, angles[rope], seen[window], cache, before)
            streams.append(x)
            fresh.append(rows)
        tapped = jnp.concatenate([x[..., :0], *(streams[tap] for tap in taps)], axis=-1)
        return self.norm(x), tapped, tuple(fresh)

    def first_layers(self, count: int) -> Transformer:
        """The model of the first `count` layers with this one's final norm and LM head.

        Weights are shared, not copied.
        """
        config = self.config
        config = dataclasses.replace(config, num_layers=count, layers=config.layers[:count])
        shallow = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        shallow.embed, shallow.norm, shallow.lm_head = self.embed, self.norm, self.lm_head
        shallow.layers = module_list(list(self.layers)[:count])
        return shallow

    @property
    def head_weight(self) -> jax.Array:
        """The LM head's matrix `[vocab, hidden]`."""
        return self.embed[...] if self.lm_head is None else self.lm_head[...]

    def head(self, features: jax.Array) -> jax.Array:
        """Logits `[..., vocab]` in float32 for features `[..., hidden]`, capped where the family
        caps them."""
        logits = matmul(features, self.head_weight).astype(jnp.float32)
        cap = self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


@functools.partial(jax.jit, static_argnums=0)
def _layer(graph, state, x, angles, visible, cache, earlier):
    """A decoder layer; as a function of its own it is traced once and not once a layer."""
    return nnx.merge(graph, state)(x, angles, visible, cache, earlier)
