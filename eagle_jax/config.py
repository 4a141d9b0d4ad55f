"""Static settings: model and drafter sizes, tree shape, sampling; hashable and validated."""

from __future__ import annotations

import dataclasses
from typing import Literal

from eagle_jax.errors import InputError

LARGEST = 2**31  # of any size in a file; beyond it a shape is an accident or an attack


def check_types(config) -> None:
    """Refuses settings of another type than their dataclass states, as files may hold them.

    Raises:
      InputError: with the field, what was expected and what was found.
    """
    allowed = {"int": (int,), "float": (int, float), "bool": (bool,)}
    for field in dataclasses.fields(config):
        kinds, value = allowed.get(field.type), getattr(config, field.name)
        if kinds is None:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InputError(f"{field.name} should be of type {field.type}, got {value!r:.60}")
        if isinstance(value, (int, float)) and not abs(value) < LARGEST:
            raise InputError(f"{field.name} is out of range: {value!r:.60}")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts.

    Attributes:
      factor: frequencies are divided by it.
      bands: None divides all of them ("linear"). (low, high, context) is Llama 3's rule ("llama3"):
        waves that turn more than `high` times within `context` tokens stay as they are, waves that
        turn less than `low` times are divided, and those between are blended.
    """

    factor: float
    bands: tuple[float, float, int] | None = None


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A feed-forward block of routed experts.

    Attributes:
      count: experts of the layer.
      active: experts that a token is sent to.
      size: hidden units of an expert.
      normalised: the weights of a token's experts are scaled to sum to one.
    """

    count: int
    active: int
    size: int
    normalised: bool = True

    def __post_init__(self):
        if not 1 <= self.active <= self.count:
            raise InputError(f"a token goes to 1 to {self.count} experts, got {self.active}")


@dataclasses.dataclass(frozen=True)
class LayerSwitches:
    """What may set a decoder layer apart; the defaults are Llama's layer.

    Attributes:
      window: positions that a row sees at most, its own included; None sees all.
      rope: queries and keys are rotated by position.
      qkv_bias, out_bias: the projections before and after attention have a bias.
      qk_norm: queries and keys are normed before rotation: `head` norms each head, `whole` norms
        the whole projection.
      score_scale: factor of the attention scores; None is head_dim ** -0.5.
      score_cap: scores x become score_cap * tanh(x / score_cap).
      norms: where the norms of attention and feed-forward stand: `before` or `after` the block, or
        `around` it.
      shifted_norms: norms scale by one plus their weight.
      gelu: the feed-forward block's gate is GELU (tanh approximation) and not SiLU.
      experts: routed experts instead of one feed-forward block.
    """

    window: int | None = None
    rope: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "whole"] | None = None
    score_scale: float | None = None
    score_cap: float | None = None
    norms: Literal["before", "after", "around"] = "before"
    shifted_norms: bool = False
    gelu: bool = False
    experts: ExpertsConfig | None = None


LLAMA = LayerSwitches()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder-only target.

    Attributes:
      context: the longest sequence (prompt and answer together) that the model was made for.
      tied: the LM head is the embedding matrix.
      rope_scaling: of all layers, or where `window_rope_theta` is given, of those without a window.
      window_rope_theta: base of the rotary positions of layers with a window, if another.
      scaled_embedding: embeddings are multiplied by the root of the hidden size.
      logit_cap: logits x become logit_cap * tanh(x / logit_cap).
      layers: switches of each layer; () makes all of them Llama's.
      family: the `model_type` of its config.json, which decides how its tensors are named.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    context: int = 2048
    tied: bool = True
    rope_scaling: RopeScaling | None = None
    window_rope_theta: float | None = None
    scaled_embedding: bool = False
    logit_cap: float | None = None
    layers: tuple[LayerSwitches, ...] = ()
    family: str = "llama"

    def __post_init__(self):
        check_types(self)
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, field) < 1:
                raise InputError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.layers and len(self.layers) != self.num_layers:
            raise InputError(f"{self.num_layers} layers, but switches for {len(self.layers)}")
        for window in {layer.window for layer in self.layers} - {None}:
            if window < 1:
                raise InputError(f"a sliding window must span at least 1 position, got {window}")

    def layer(self, index: int) -> LayerSwitches:
        """The switches of one layer."""
        return self.layers[index] if self.layers else LLAMA

    def rope(self, index: int) -> tuple[float, RopeScaling | None] | None:
        """Base and scaling of a layer's rotary positions; None where it has none."""
        layer = self.layer(index)
        if not layer.rope:
            return None
        if layer.window is not None and self.window_rope_theta is not None:
            return self.window_rope_theta, None
        return self.rope_theta, self.rope_scaling


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 fuses: the inputs of layers 2, L // 2 and L - 3 (arXiv 2503.01840),
    nearer to one another where the target has few."""
    low = min(2, num_layers - 1)
    return low, max(low, num_layers // 2), max(low, num_layers // 2, num_layers - 3)


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Sizes and switches of an EAGLE head.

    Attributes:
      draft_vocab_size: rows of the target's LM head that the head scores; equal to the target's
        vocabulary when it is not reduced.
      rope_theta: base of the drafter's own rotary positions; it may differ from the target's.
      fc_bias: whether `fc` has a bias (released heads differ).
      taps: layers of the target whose input an EAGLE-3 head fuses; EAGLE-1 has none.
      own_lm_head: an EAGLE-3 head brings its own LM head instead of using rows of the target's.
      own_embed: the head brings its own embedding instead of using the target's.
      target_hidden_size: the target's hidden size; 0 where the head's is the same.
      qkv_bias: whether queries, keys and values have a bias.
      norm_before_residual: the residual of an EAGLE-3 layer is the normed feature.
      norm_before_fc: one norm over all taps before `fc`.
      fc_norm: a norm over each tap before `fc` (EAGLE-3.1).
      norm_output: the head feeds its normed output to the next step (EAGLE-3.1).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    fc_bias: bool = True
    taps: tuple[int, ...] = ()
    own_lm_head: bool = False
    own_embed: bool = False
    target_hidden_size: int = 0
    qkv_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self):
        check_types(self)
        for field in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise InputError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise InputError(
                "num_heads must be a multiple of num_kv_heads and head_dim even, got "
                f"{self.num_heads}, {self.num_kv_heads} and {self.head_dim}"
            )
        if not self.norm_eps >= 0 or not self.rope_theta > 0:
            raise InputError(
                "norm_eps must be 0 or more and rope_theta positive, got "
                f"{self.norm_eps} and {self.rope_theta}"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise InputError(
                f"draft_vocab_size must lie between 1 and vocab_size ({self.vocab_size}), "
                f"got {self.draft_vocab_size}"
            )
        if not isinstance(self.taps, tuple) or any(type(tap) is not int for tap in self.taps):
            raise InputError(f"taps should be whole numbers, got {self.taps!r:.60}")
        if self.feature_size != self.hidden_size and not (self.own_embed and self.own_lm_head):
            raise InputError(
                f"a head of hidden size {self.hidden_size} for a target of {self.feature_size} "
                "needs its own embedding and LM head"
            )

    @property
    def feature_size(self) -> int:
        """The target's hidden size."""
        return self.target_hidden_size or self.hidden_size

    @classmethod
    def like(
        cls, target: ModelConfig, draft_vocab_size: int, taps: tuple[int, ...] = ()
    ) -> DrafterConfig:
        """A head with one layer of the target's own sizes; EAGLE-3 where taps are given."""
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            norm_eps=target.norm_eps,
            rope_theta=target.rope_theta,
            fc_bias=not taps,
            taps=taps,
        )


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The size of a draft tree.

    Attributes:
      nodes: tokens that the target checks in one pass, the root included; 1 is plain decoding.
      depth: levels below the root, the longest run of drafts that one pass can accept.
      top_k: children that a node may have, and nodes that each level expands; 1 is a chain.
      gate: from 0 to 1. A cycle in which the drafter gives its best first draft no more than this
        probability decodes plainly instead, since a wide pass costs more than a narrow one. 0
        always drafts, 1 never.
    """

    nodes: int
    depth: int
    top_k: int = 1
    gate: float = 0.0

    def __post_init__(self):
        if not 0 <= self.gate <= 1:
            raise InputError(f"the gate must lie between 0 and 1, got {self.gate}")
        if self.nodes < 1 or self.depth < 0 or self.top_k < 1:
            raise InputError(
                "a tree needs nodes >= 1, depth >= 0 and top_k >= 1, "
                f"got nodes={self.nodes}, depth={self.depth}, top_k={self.top_k}"
            )
        if self.depth > self.nodes - 1:
            raise InputError(
                f"a tree of {self.nodes} nodes (root included) cannot be {self.depth} levels deep; "
                f"use depth <= {self.nodes - 1} or more nodes"
            )
        if self.nodes - 1 > self.pool:
            raise InputError(
                f"depth={self.depth} and top_k={self.top_k} propose {self.pool} drafts at most, "
                f"fewer than the {self.nodes - 1} that nodes={self.nodes} asks for; "
                "raise depth or top_k, or lower nodes"
            )

    @property
    def pool(self) -> int:
        """Candidates that growing a tree of this depth and top_k scores."""
        return self.top_k + (self.depth - 1) * self.top_k**2 if self.depth else 0


PLAIN = TreeShape(nodes=1, depth=0)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the target draws a token from its logits.

    The order is that of transformers: temperature, then top_k, then top_p.

    Attributes:
      temperature: 0 is greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be a number >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"top_k must be >= 0 (0 keeps every token), got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p must lie in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether top_k or top_p removes tokens from a draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)
