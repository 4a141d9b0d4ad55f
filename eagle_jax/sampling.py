"""The position-keyed draw.

The target's token at a position is `argmax(processed logits + Gumbel noise)`, where the noise is a
function of the seed and the position alone. That is an exact draw from the processed distribution
(the Gumbel-max trick, Gumbel 1954), and it does not depend on what was drafted: plain and
speculative decoding draw the same token. A drafter that adds the same noise to its own logits
before it ranks its candidates agrees with the target far more often (a Gumbel coupling).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.random import threefry_2x32


@struct.dataclass
class Sampler:
    """Sampling settings of each batch row.

    Attributes:
      key: `[B, 2]` uint32 PRNG key data.
      temperature: `[B]` float32; 0 is greedy.
      top_k: `[B]` int32; 0 keeps all.
      top_p: `[B]` float32.
      sampled: whether any row has a temperature above 0; otherwise no noise is made.
      filtered: whether any row uses top_k or top_p.
    """

    key: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    sampled: bool = struct.field(pytree_node=False)
    filtered: bool = struct.field(pytree_node=False)

    def draw(self, position: jax.Array, depths: int, vocab_size: int) -> Draw:
        """Prepares the draws of tokens at positions position, ..., position + depths - 1.

        Args:
          position: `[B]` int32 position of the first token to be drawn.
          depths: how many positions.
          vocab_size: of the target.
        """
        noise = None
        if self.sampled:
            at = position[:, None] + jnp.arange(depths)
            keys = jnp.broadcast_to(self.key[:, None], (*at.shape, 2)).reshape(-1, 2)
            noise = jax.vmap(lambda k, p: gumbel(k, p, vocab_size))(keys, at.reshape(-1))
            noise = noise.reshape(*at.shape, vocab_size)
            noise = jnp.where(self.temperature[:, None, None] > 0, noise, 0.0)
        return Draw(sampler=self, noise=noise)


@struct.dataclass
class Draw:
    """Noise and settings for the tokens of one cycle.

    Attributes:
      sampler: the rows' settings.
      noise: `[B, depths, vocab]` float32, or None when every row is greedy.
    """

    sampler: Sampler
    noise: jax.Array | None

    def perturb(
        self, logits: jax.Array, depth: int | jax.Array, ids: jax.Array | None = None
    ) -> jax.Array:
        """Processed logits plus the noise of their position; the draw is the argmax.

        Args:
          logits: `[B, N, V]` float32.
          depth: one depth for all N rows, or `[B, N]` int32 depth of each.
          ids: `[V]` target ids of the columns where the vocabulary is reduced.

        Returns:
          `[B, N, V]` float32.
        """
        if self.noise is None:
            return logits
        if isinstance(depth, int):
            noise = self.noise[:, depth, None]
        else:
            noise = jnp.take_along_axis(self.noise, depth[..., None], axis=1)
        return self.process(logits) + (noise if ids is None else noise[..., ids])

    def process(self, logits: jax.Array) -> jax.Array:
        """Logits `[B, N, V]` float32 after temperature, top_k and top_p; greedy rows unchanged."""
        if self.noise is None:
            return logits
        sampler = self.sampler
        temperature = sampler.temperature[:, None, None]
        logits = logits / jnp.where(temperature > 0, temperature, 1.0)
        if sampler.filtered:
            greedy = temperature[..., 0] <= 0
            logits = keep_top_k(logits, jnp.where(greedy, 0, sampler.top_k[:, None]))
            logits = keep_top_p(logits, jnp.where(greedy, 1.0, sampler.top_p[:, None]))
        return logits

    def choose(self, logits: jax.Array, depth: int | jax.Array) -> jax.Array:
        """The token drawn at each node: `[B, N]` int32 for logits `[B, N, V]`; see `perturb`."""
        return jnp.argmax(self.perturb(logits, depth), axis=-1).astype(jnp.int32)


def gumbel(key: jax.Array, position: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise `[size]` float32 for a key `[2]` uint32 and a position.

    Threefry is called directly: it makes two words a call, of which `jax.random.bits` would use
    one half.
    """
    at = jnp.asarray(position, jnp.uint32)
    position_key = threefry_2x32((key[0], key[1]), jnp.stack([at, jnp.zeros_like(at)]))
    counts = jnp.arange(size + size % 2, dtype=jnp.uint32)
    bits = threefry_2x32((position_key[0], position_key[1]), counts)[:size]
    # Uniform on the midpoints of 2^23 cells, so that neither end is ever reached; float32 holds
    # the small values, which become the large noise, with full precision.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log1p(-uniform))


def keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Sets all but the k largest logits of each row to -inf; ties at the edge stay; 0 keeps all.

    Args:
      logits: `[B, N, V]` float32.
      k: `[B, 1]` int32.
    """
    size = logits.shape[-1]
    wanted = jnp.where(k > 0, jnp.minimum(k, size), size).astype(jnp.float32)
    edge = _threshold(logits, jnp.ones_like(logits), wanted)
    return jnp.where((logits >= edge) | (k[..., None] == 0), logits, -jnp.inf)


def keep_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keeps the smallest set of largest logits whose probability reaches p; ties stay.

    Args:
      logits: `[B, N, V]` float32.
      p: `[B, 1]` float32 in (0, 1]; 1 keeps all.
    """
    edge = _threshold(logits, jax.nn.softmax(logits, axis=-1), p)
    return jnp.where((logits >= edge) | (p[..., None] >= 1.0), logits, -jnp.inf)


def _threshold(values: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest t for which the weights of `values >= t` sum to `wanted` or more.

    A bisection over the 32-bit patterns of float32, which order as integers once negative numbers
    are flipped: exact in 32 rounds, without sorting the vocabulary.

    Args:
      values: `[B, N, V]` float32.
      weights: `[B, N, V]` float32, not negative.
      wanted: `[B, 1]` float32.

    Returns:
      `[B, N, 1]` float32.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order = jnp.where(bits >= sign, ~bits, bits | sign)

    def narrow(step, low):
        trial = low | (sign >> step.astype(jnp.uint32))
        mass = jnp.where(order >= trial[..., None], weights, 0.0).sum(axis=-1)
        return jnp.where(mass >= wanted, trial, low)

    low = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(values.shape[:2], jnp.uint32))
    back = jnp.where(low >= sign, low & ~sign, ~low)
    return jax.lax.bitcast_convert_type(back, jnp.float32)[..., None]
