"""Heads, trees and whole runs of the library against the NumPy reference in `reference`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference.checkpoints import library_head, published_target, random_head
from reference.decode import Draw, plain, speculative
from reference.head_eagle1 import Eagle1
from reference.head_eagle3 import Eagle3, Switches
from reference.layer import Sizes, log_softmax
from reference.target import Target
from reference.tree import continuations, propose

from eagle_jax import Sampling, TreeShape, generate
from eagle_jax.config import DrafterConfig, default_taps
from eagle_jax.drafters import feature
from eagle_jax.drafters.load import HEADS, LoadedDrafter, bind
from eagle_jax.nn.attention import Visible
from eagle_jax.nn.modules import fill, parameters
from eagle_jax.sampling import Sampler, gumbel
from eagle_jax.tiny import TINY, tiny_target
from eagle_jax.tree import grow

WIDER = {"hidden_size": 48, "target_hidden_size": TINY.hidden_size, "own_embed": True}
# A method, and fields of `DrafterConfig` that differ from a head like the target.
VARIANTS = {
    "eagle": ("eagle", {}),
    "eagle, no bias": ("eagle", {"fc_bias": False}),
    "eagle, head_dim": ("eagle", {"head_dim": 12, "num_kv_heads": 1}),
    "eagle, rope": ("eagle", {"rope_theta": 500.0, "norm_eps": 1e-2}),
    "eagle, qkv bias": ("eagle", {"qkv_bias": True}),
    "eagle, own embedding": ("eagle", {"own_embed": True}),
    "eagle3": ("eagle3", {}),
    "eagle3, bias": ("eagle3", {"fc_bias": True}),
    "eagle3, target's LM head": ("eagle3", {"own_lm_head": False}),
    "eagle3, head_dim": ("eagle3", {"head_dim": 12, "num_kv_heads": 4}),
    "eagle3, rope": ("eagle3", {"rope_theta": 500.0, "norm_eps": 1e-2}),
    "eagle3, two taps": ("eagle3", {"taps": (0, 2)}),
    "eagle3, qkv bias": ("eagle3", {"qkv_bias": True}),
    "eagle3, normed residual": ("eagle3", {"norm_before_residual": True}),
    "eagle3, one norm of taps": ("eagle3", {"norm_before_fc": True}),
    "eagle3, norm of each tap": ("eagle3", {"fc_norm": True}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3, wider than the target": ("eagle3", WIDER),
}
LENGTHS = (12, 7)
SLOTS = 48
released = pytest.mark.parametrize("pair", ["eagle", "eagle3"], indirect=True)


def sizes_of(config) -> Sizes:
    return Sizes(**{f.name: getattr(config, f.name) for f in dataclasses.fields(Sizes)})


def make_pair(method: str, changes: dict, target, draft_vocab_size: int, seed: int):
    """A random head twice: the reference's and the library's."""
    rng = np.random.default_rng(seed)
    config = DrafterConfig.like(target.config, draft_vocab_size)
    if method == "eagle3":
        taps = default_taps(target.config.num_layers)
        config = dataclasses.replace(config, taps=taps, own_lm_head=True, fc_bias=False)
    config = dataclasses.replace(config, **changes)
    weights = random_head(method, config, rng)
    ids = np.sort(rng.permutation(config.vocab_size)[:draft_vocab_size])
    theirs = published_target(parameters(target.model), target.config)
    shared = (theirs["model.embed_tokens.weight"], theirs["lm_head.weight"], ids)
    if method == "eagle3":
        names = {f.name for f in dataclasses.fields(Switches)}
        switches = Switches(**{name: on for name, on in changes.items() if name in names})
        ours = Eagle3(weights, sizes_of(config), *shared, len(config.taps), switches)
    else:
        ours = Eagle1(weights, sizes_of(config), *shared)
    arrays = {name: jnp.asarray(a) for name, a in library_head(method, weights).items()}
    head = fill(lambda: HEADS[method](config, rngs=nnx.Rngs(0)), arrays)
    return ours, LoadedDrafter("random", bind(head, ids, target))


def loud_target(config=TINY):
    """Its embedding is as large as its features, and its logits are not far apart."""
    target = tiny_target(config=config)
    target.model.embed[...] = target.model.embed[...] * 50.0
    target.model.lm_head[...] = target.model.lm_head[...] / 4.0
    return target


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request):
    method, changes = VARIANTS[request.param]
    ours, drafter = make_pair(method, changes, loud_target(), draft_vocab_size=40, seed=3)
    return ours, Compiled(drafter.module)


@pytest.fixture(scope="module")
def text(pair):
    """Tokens x_{t+1} and true features f_t of two batch rows; what lies past a row is garbage."""
    rng = np.random.default_rng(0)
    width = TINY.hidden_size * max(1, len(pair[1].module.taps))
    return rng.integers(0, 61, (2, 12)), rng.normal(size=(2, 12, width)).astype(np.float32)


class Compiled:
    """A drafter's passes over two rows as compiled programs."""

    def __init__(self, module):
        self.module = module
        self.observe = jax.jit(module.observe)
        self.propose = jax.jit(self._propose, static_argnums=3)

    @functools.partial(jax.jit, static_argnums=0)
    def rows(self, tokens, features):
        """What the head gives for every row of a prompt `[2, T]` without a cache."""
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        visible = Visible(jnp.zeros(2, jnp.int32), at[:, :, None] >= at[:, None])
        head = self.module.head
        return head(self.module._table[tokens], head.fuse(features), at, visible, None)[0]

    def extend(self, state, tokens, features, begin, end):
        """Feeds row i from begin[i] to end[i]; what pads the shorter one is garbage."""
        begin, end = np.array(begin, np.int32), np.array(end, np.int32)
        take = np.minimum(begin[:, None] + np.arange(12), 11)
        given = np.take_along_axis(tokens, take, 1)
        true = np.take_along_axis(features, take[..., None], 1)
        return self.observe(state, given, true, begin, end - begin)

    def _propose(self, state, root, length, shape):
        levels = []

        def recording(root, first, deepen, shape):
            def record(level, frontier, carried):
                expansion, carried = deepen(level, frontier, carried)
                levels.append((frontier, expansion, carried[0]))
                return expansion, carried

            return grow(root, first, record, shape)

        sampler = Sampler(
            key=jnp.zeros((2, 2), jnp.uint32),
            temperature=jnp.zeros(2),
            top_k=jnp.zeros(2, jnp.int32),
            top_p=jnp.ones(2),
            sampled=False,
            filtered=False,
        )
        draw = sampler.draw(length + 1, shape.depth + 1, TINY.vocab_size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feature, "grow", recording)
            return self.module.propose(state, root, length, draw, shape), levels


@released
def test_every_row_of_a_pass_without_a_cache(pair, text):
    ours, drafter = pair
    tokens, features = text
    found = drafter.rows(tokens, features)
    for row in range(2):
        expected, _ = ours.forward(ours.fuse(features[row]), tokens[row])
        np.testing.assert_allclose(found[row], expected, atol=1e-4)


@pytest.mark.parametrize(
    "ends", [[(12, 7)], [(4, 7), (5, 7), (12, 7)], [(i, min(i, 7)) for i in range(1, 13)]]
)
def test_prefill_and_extending_after_a_cache(pair, text, ends):
    """At once, in unequal pieces (none for the second row among them), and row by row."""
    ours, drafter = pair
    tokens, features = text
    expected = [ours.forward(ours.fuse(features[row]), tokens[row]) for row in range(2)]
    state, begin = drafter.module.init(2, SLOTS), (0, 0)
    for end in ends:
        state = drafter.extend(state, tokens, features, begin, end)
        for row, length in enumerate(end):
            outputs, logits = expected[row]
            np.testing.assert_allclose(state.feature[row], outputs[length - 1], atol=1e-4)
            np.testing.assert_allclose(state.logits[row], logits[length - 1], atol=1e-4)
        begin = end


def test_trees(pair, text):
    check_tree(pair, text, (16, 4, 3))


@released
@pytest.mark.parametrize("sizes", [(4, 3, 1), (9, 2, 4)])
def test_trees_of_other_shapes(pair, text, sizes):
    check_tree(pair, text, sizes)


def check_tree(pair, text, sizes):
    """What the head gives for each node that a level expands, by the node's own path; the tree."""
    ours, drafter = pair
    tokens, features = text
    roots, length = tokens[np.arange(2), np.array(LENGTHS) - 1], np.array(LENGTHS, np.int32)
    state = drafter.extend(drafter.module.init(2, SLOTS), tokens, features, (0, 0), LENGTHS)
    tree, levels = drafter.propose(state, roots, length, TreeShape(*sizes))
    assert len(levels) == sizes[1] - 1
    for row, size in enumerate(LENGTHS):
        after = continuations(ours, features[row, :size], tokens[row, :size].tolist())
        paths = [()] * sizes[2]
        for frontier, expansion, predicted in levels:
            parents, drafts = frontier.parents[row].tolist(), frontier.tokens[row].tolist()
            paths = [(*paths[p], t) for p, t in zip(parents, drafts, strict=True)]
            for node, path in enumerate(paths):
                outputs, logits = after(path)
                np.testing.assert_allclose(predicted[row, node], outputs[-1], atol=1e-4)
                np.testing.assert_allclose(
                    expansion.log_probs[row, node], log_softmax(logits), atol=1e-4
                )

        expected = propose(ours, features[row, :size], tokens[row, :size].tolist(), *sizes)
        assert expected.margin > 2e-5, "too near a tie for a comparison: choose another seed"
        assert tree.tokens[row].tolist() == expected.tokens
        assert tree.parents[row].tolist() == expected.parents
        assert tree.depth[row].tolist() == expected.depth
        np.testing.assert_array_equal(tree.ancestors[row], expected.ancestors)


# Few tokens, so that random heads are right often enough for runs of every length.
SMALL = dataclasses.replace(TINY, vocab_size=8, num_layers=3)
PROMPTS = [[1, 2, 3, 1, 5, 0, 7, 2, 4, 6, 3], [4], [5, 5, 6]]
NEW_TOKENS, SEED = 14, 1
# Sampling, tree, tokens that end an answer.
RUNS = {
    "greedy": (Sampling(), (12, 3, 3), ()),
    "filtered": (Sampling(temperature=1.2, top_k=5, top_p=0.9), (9, 4, 2), (6,)),
    "chain": (Sampling(), (4, 3, 1), ()),
    "sampled": (Sampling(temperature=0.8), (10, 2, 3), (3,)),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("chain", "sampled")]


@pytest.fixture(scope="module")
def small():
    return loud_target(SMALL)


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def small_pair(request, small):
    changes = {"taps": (0, 1, 2)} if request.param == "eagle3" else {}
    ours, drafter = make_pair(request.param, changes, small, draft_vocab_size=7, seed=2)
    weights = published_target(parameters(small.model), SMALL)
    return Target(weights, sizes_of(SMALL), SMALL.num_layers, drafter.module.taps), ours, drafter


def reference_draw(sampling: Sampling) -> Draw:
    if sampling.greedy:
        return Draw()
    key = jax.random.key_data(jax.random.key(SEED, impl="threefry2x32"))
    noise = jax.vmap(lambda p: gumbel(key, p, SMALL.vocab_size))(jnp.arange(SMALL.context))
    return Draw(np.asarray(noise), sampling.temperature, sampling.top_k, sampling.top_p)


@pytest.mark.parametrize("run", ["greedy", "filtered", *SLOW])
def test_whole_runs(small, small_pair, run):
    """Tokens, passes and tau of rows of different length in one batch."""
    target, ours, drafter = small_pair
    sampling, sizes, stops = RUNS[run]
    found = generate(
        small,
        drafter,
        PROMPTS,
        max_new_tokens=NEW_TOKENS,
        sampling=sampling,
        seed=SEED,
        tree=TreeShape(*sizes),
        stop_tokens=stops,
    )
    draw = reference_draw(sampling)
    answers = [speculative(target, ours, p, sizes, NEW_TOKENS, draw, stops) for p in PROMPTS]
    margins = [tree.margin for answer in answers for tree in answer.trees]
    assert min(draw.margin, *margins) > 1e-5, "too near a tie for a comparison: choose another seed"

    assert found.tokens == [answer.tokens for answer in answers]
    assert found.tokens == [plain(target, p, NEW_TOKENS, draw, stops) for p in PROMPTS]
    assert found.stats.row_passes == tuple(len(answer.runs) for answer in answers)
    runs = np.array([run for answer in answers for run in answer.runs])
    assert found.stats.passes == len(runs)
    assert found.stats.tau == sum(sum(answer.kept) for answer in answers) / len(runs)
    for depth, share in enumerate(found.stats.acceptance_by_depth):
        assert share == pytest.approx(np.mean(runs - 1 > depth))
    for answer, flags in zip(answers, found.stats.drafted, strict=True):
        expected = [False]
        for run_length, kept in zip(answer.runs, answer.kept, strict=True):
            expected += [i < run_length - 1 for i in range(kept)]
        assert list(flags) == expected
    assert runs.min() == 1 and runs.max() > min(2, sizes[2]), "too few kinds of runs to tell"
