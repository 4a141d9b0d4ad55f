"""EAGLE heads against NumPy versions written from the papers' equations, token by token."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import FormatError, InputError, TreeShape, load_drafter
from eagle_jax.config import ModelConfig
from eagle_jax.drafters.load import bind, save_head
from eagle_jax.nn.modules import parameters
from eagle_jax.sampling import Sampler
from eagle_jax.tiny import TINY, tiny_drafter, tiny_target

HEADS, KV, SIZE = TINY.num_heads, TINY.num_kv_heads, TINY.head_dim


class Oracle:
    """An EAGLE-1 head on one sequence, in float64; rows are appended one by one, never batched."""

    def __init__(self, drafter, target):
        weights = parameters(drafter.module.head)
        self.w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
        self.embed = np.asarray(target.model.embed[...], np.float64)
        ids = np.asarray(drafter.module.draft_ids[...])
        self.rows = np.asarray(target.model.head_weight, np.float64)[ids]

    def rotate(self, x, position):
        angles = position * 10_000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
        low, high = x[: SIZE // 2], x[SIZE // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin])

    def norm(self, x, name):
        return x / np.sqrt((x**2).mean() + 1e-5) * self.w[name]

    def fuse(self, feature):
        return feature

    def attend(self, x, position, past, weights):
        """Attention of one row over the rows in `past` and itself: (output, keys, values)."""
        qkv = (self.w[f"{weights}.qkv.weight"] @ x).reshape(-1, SIZE)
        q = [self.rotate(h, position) for h in qkv[:HEADS]]
        k = [self.rotate(h, position) for h in qkv[HEADS : HEADS + KV]]
        seen = [*past, (k, qkv[HEADS + KV :])]
        out = []
        for head in range(HEADS):
            group = head // (HEADS // KV)
            scores = np.array([q[head] @ keys[group] for keys, _ in seen]) / np.sqrt(SIZE)
            p = np.exp(scores - scores.max())
            p /= p.sum()
            out.append(sum(w * values[group] for w, (_, values) in zip(p, seen, strict=True)))
        return self.w[f"{weights}.out.weight"] @ np.concatenate(out), seen[-1]

    def mlp(self, x, weights):
        gate, up = np.split(self.w[f"{weights}.gate_up.weight"] @ x, 2)
        return self.w[f"{weights}.down.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def row(self, token, feature, position, past, swapped=False):
        """(next feature, (keys, values)) for one row that sees the rows in `past` and itself."""
        parts = [feature, self.embed[token]] if swapped else [self.embed[token], feature]
        x = self.w["fc.weight"] @ np.concatenate(parts) + self.w["fc.bias"]
        attended, kv = self.attend(x, position, past, "layer.attention")
        x = x + attended
        return x + self.mlp(self.norm(x, "layer.mlp_norm.weight"), "layer.mlp"), kv

    def run(self, tokens, features, shift=0, **options):
        past, out = [], []
        for position, (token, feature) in enumerate(zip(tokens, features, strict=True)):
            y, kv = self.row(token, self.fuse(feature), position + shift, past, **options)
            past.append(kv)
            out.append(y)
        return np.array(out), past

    def logits(self, feature):
        return self.rows @ feature

    def log_probs(self, feature):
        logits = self.logits(feature)
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


class Oracle3(Oracle):
    """An EAGLE-3 head with its own LM head, whose norms have weights of their own."""

    def fuse(self, taps):
        return self.w["fc.weight"] @ taps

    def row(self, token, feature, position, past, swapped=False):
        parts = [self.norm(self.embed[token], "embed_norm.weight")]
        parts.insert(0 if swapped else 1, self.norm(feature, "hidden_norm.weight"))
        attended, kv = self.attend(np.concatenate(parts), position, past, "attention")
        x = feature + attended
        return x + self.mlp(self.norm(x, "mlp_norm.weight"), "mlp"), kv

    def logits(self, feature):
        return self.w["lm_head"] @ self.norm(feature, "norm.weight")


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def pair(request):
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab_size=30, method=request.param)
    head = drafter.module.head
    for index, name in enumerate(["embed_norm", "hidden_norm", "mlp_norm", "norm"]):
        if hasattr(head, name):  # fresh norms have weights of one, which would hide a swap
            weight = getattr(head, name).weight
            weight[...] = weight[...] + 0.3 * jax.random.normal(jax.random.key(index), weight.shape)
    if head.lm_head is not None:
        head.lm_head[...] = head.lm_head[...] * 9.0  # sharper scores make deeper trees
    return drafter, (Oracle3 if request.param == "eagle3" else Oracle)(drafter, target)


@pytest.fixture(scope="module")
def text(pair):
    rng = np.random.default_rng(0)
    width = TINY.hidden_size * max(1, len(pair[0].module.taps))
    return rng.integers(0, 61, 12), rng.normal(size=(12, width)).astype(np.float32)


def observe(drafter, tokens, features, cuts):
    """Feeds the rows in the given portions, padded to 12 rows each."""
    module, state = drafter.module, drafter.module.init(1, 40)
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        t, f = np.zeros((1, 12), np.int32), np.full((1, 12, features.shape[1]), 7.0, np.float32)
        t[0, : end - begin], f[0, : end - begin] = tokens[begin:end], features[begin:end]
        state = module.observe(
            state, jnp.asarray(t), jnp.asarray(f), jnp.array([begin]), jnp.array([end - begin])
        )
    return state


@pytest.mark.parametrize("cuts", [[0, 12], [0, 5, 12], [0, 1, 2, 9, 12], [0, 12, 12]])
def test_prefill_and_extend(pair, text, cuts):
    drafter, oracle = pair
    tokens, features = text
    expected, _ = oracle.run(tokens, features)
    state = observe(drafter, tokens, features, cuts)
    np.testing.assert_allclose(state.feature[0], expected[-1], atol=2e-5)


def test_negative_controls(pair, text):
    """The comparison must notice shifted tokens, shifted positions and a swapped concatenation."""
    drafter, oracle = pair
    tokens, features = text
    found = np.asarray(observe(drafter, tokens, features, [0, 12]).feature[0])
    wrong = [
        oracle.run(np.roll(tokens, 1), features),
        oracle.run(tokens, np.roll(features, 1, axis=0)),
        oracle.run(tokens, features, swapped=True),
    ]
    for out, _ in wrong:
        assert np.abs(out[-1] - found).max() > 1e-2


def test_positions_are_those_of_the_features(pair, text):
    """All positions moved by one cancel in rotary attention; a tree level off by one does not."""
    drafter, oracle = pair
    tokens, features = text
    expected, past = oracle.run(tokens, features)
    right, _ = oracle.row(3, expected[-1], 12, past)
    off, _ = oracle.row(3, expected[-1], 13, past)
    assert np.abs(right - off).max() > 1e-3
    tree = propose(drafter, observe(drafter, tokens, features, [0, 12]), 12, TreeShape(3, 2, 1))
    first = int(tree.tokens[0, 1])
    y, _ = oracle.row(first, expected[-1], 12, past)
    ids = np.asarray(drafter.module.draft_ids[...])
    assert int(tree.tokens[0, 2]) == ids[np.argmax(oracle.log_probs(y))]


def propose(drafter, state, length, shape):
    sampler = Sampler(
        key=jnp.zeros((1, 2), jnp.uint32),
        temperature=jnp.zeros(1),
        top_k=jnp.zeros(1, jnp.int32),
        top_p=jnp.ones(1),
        sampled=False,
        filtered=False,
    )

    @jax.jit
    def run(state):
        draw = sampler.draw(jnp.array([length + 1]), shape.depth + 1, 61)
        return drafter.module.propose(state, jnp.array([9]), jnp.array([length]), draw, shape)

    return run(state)


def test_tree_of_several_levels(pair, text):
    """Tokens and parents equal those of an exhaustive expansion by the oracle."""
    drafter, oracle = pair
    tokens, features = text
    shape = TreeShape(nodes=12, depth=4, top_k=3)
    expected, past = oracle.run(tokens, features)
    ids = np.asarray(drafter.module.draft_ids[...])

    # A candidate: score, token, parent's number, feature that its children start from, rows seen.
    def children(feature, score, parent, seen):
        log_probs = oracle.log_probs(feature)
        best = sorted(range(len(ids)), key=lambda i: -log_probs[i])[: shape.top_k]
        return [(score + log_probs[i], int(ids[i]), parent, feature, seen) for i in best]

    pool = children(expected[-1], 0.0, None, past)
    frontier = list(range(len(pool)))
    for level in range(1, shape.depth):
        new = []
        for number in frontier:
            score, token, _, feature, seen = pool[number]
            y, kv = oracle.row(token, feature, 12 + level - 1, seen)
            new += children(y, score, number, [*seen, kv])
        order = sorted(range(len(new)), key=lambda i: -new[i][0])[: shape.top_k]
        frontier = [len(pool) + i for i in order]
        pool += new
    kept = sorted(sorted(range(len(pool)), key=lambda i: -pool[i][0])[: shape.nodes - 1])
    place = {None: 0} | {number: at + 1 for at, number in enumerate(kept)}

    tree = propose(drafter, observe(drafter, tokens, features, [0, 12]), 12, shape)
    assert tree.tokens[0].tolist() == [9] + [pool[i][1] for i in kept]
    assert tree.parents[0].tolist() == [0] + [place[pool[i][2]] for i in kept]
    assert tree.depth[0].max() >= 3


def test_a_head_that_taps_a_layer_too_many_is_refused():
    target = tiny_target()
    head = tiny_drafter(target, method="eagle3").module.head
    shallow = tiny_target(config=ModelConfig(**{**TINY.__dict__, "num_layers": 1}))
    head.config = dataclasses.replace(head.config, taps=(0, 1, 2))
    with pytest.raises(InputError, match="reads the layers"):
        bind(head, None, shallow)


def test_save_and_load_round_trip(pair, tmp_path):
    drafter, _ = pair
    target = tiny_target()
    ids = np.asarray(drafter.module.draft_ids[...])
    save_head(tmp_path / "head", drafter.module.head, ids, {"tau": [{"nodes": 4, "tau": 1.5}]})
    loaded = load_drafter(str(tmp_path / "head"), target)
    assert loaded.tau[0]["tau"] == 1.5
    np.testing.assert_array_equal(loaded.module.draft_ids[...], ids)
    before, after = parameters(drafter.module.head), parameters(loaded.module.head)
    assert before.keys() == after.keys()
    for name, array in before.items():
        rounded = array.astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(after[name], rounded)


def test_heads_that_do_not_fit_are_refused(pair, tmp_path):
    drafter, _ = pair
    ids = np.asarray(drafter.module.draft_ids[...])
    save_head(tmp_path / "head", drafter.module.head, ids, {})
    other = tiny_target(config=ModelConfig(**{**TINY.__dict__, "vocab_size": 64}))
    with pytest.raises(InputError, match="vocab_size=61"):
        load_drafter(str(tmp_path / "head"), other)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    for change, expected in (
        ({"method": "lookahead"}, "expected format"),
        ({"head": {**config["head"], "colour": 1}}, "bad field"),
    ):
        (tmp_path / "head" / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(FormatError, match=expected):
            load_drafter(str(tmp_path / "head"), tiny_target())
    save_head(tmp_path / "head", drafter.module.head, ids, {})
    path = tmp_path / "head" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(FormatError):
        load_drafter(str(tmp_path / "head"), tiny_target())
    save_head(tmp_path / "head", drafter.module.head, ids[::-1].copy(), {})
    with pytest.raises(FormatError, match="rise"):
        load_drafter(str(tmp_path / "head"), tiny_target())
    with pytest.raises(InputError, match="no drafter"):
        load_drafter(str(tmp_path / "nothing"), tiny_target())
    with pytest.raises(InputError, match="no head ships"):
        load_drafter("auto", tiny_target())


@pytest.mark.slow
def test_the_shipped_head_is_small_and_fits_the_default_target():
    from eagle_jax import generate, load_target
    from eagle_jax.drafters.load import shipped_folder

    files = list(shipped_folder("smollm2-135m").iterdir())
    assert sum(path.stat().st_size for path in files) <= 16e6
    target = load_target("smollm2-135m")
    drafter = load_drafter("auto", target)
    assert drafter.tau, "the head carries its tau by tree"
    run = generate(target, drafter, "What is rain?", max_new_tokens=48, tree=TreeShape(4, 3, 1))
    plain = generate(target, None, "What is rain?", max_new_tokens=48)
    assert run.tokens == plain.tokens
    assert run.stats.tau > 1.3
