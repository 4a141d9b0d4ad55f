"""Every family against transformers: prefill, cached decoding, trees, greedy text."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from families import CASES, SIZES, make
from safetensors.numpy import load_file, save_file
from test_target import forward

from eagle_jax import generate
from eagle_jax.nn.attention import Visible
from eagle_jax.nn.cache import commit_rows, empty_cache
from eagle_jax.target.load import Target, load_model
from eagle_jax.tree import link

pytestmark = pytest.mark.parity
LENGTH, TOLERANCE = 17, 1e-3


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """transformers' model and ours, loaded from what it saved."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp(request.param)
    return make(request.param, folder), Target("tiny", load_model(folder), None, ())


def theirs(model, ids) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(np.asarray(ids))).logits.numpy()


def draw_ids(seed=0):
    return np.random.default_rng(seed).integers(0, 97, (2, LENGTH))


def test_prefill(pair):
    model, target = pair
    ids = draw_ids()
    expected = theirs(model, ids)
    assert expected.std() > 0.3
    np.testing.assert_allclose(forward(target.model, ids)[0], expected, atol=TOLERANCE)


def decode(target, ids, chunks):
    """Logits `[B, N, vocab]` of ids run in chunks over a cache, and the cache."""
    caches = empty_cache(target.config, len(ids), 32, jnp.float32)
    at, logits = 0, []
    for size in chunks:
        causal = jnp.broadcast_to(jnp.tri(size, dtype=bool), (len(ids), size, size))
        length = jnp.full(len(ids), at)
        positions = jnp.broadcast_to(at + jnp.arange(size), (len(ids), size))
        chunk = jnp.asarray(ids[:, at : at + size])
        features, _, fresh = target.model(chunk, positions, Visible(length, causal), caches)
        caches = [commit_rows(c, f, length) for c, f in zip(caches, fresh, strict=True)]
        logits.append(target.model.head(features))
        at += size
    return np.concatenate(logits, axis=1), caches


def test_cached_decoding_in_chunks(pair):
    model, target = pair
    ids = draw_ids(1)
    logits, _ = decode(target, ids, [7, 1, 1, 7, 1])
    np.testing.assert_allclose(logits, theirs(model, ids), atol=TOLERANCE)


def test_each_node_of_a_tree_equals_its_own_text(pair):
    model, target = pair
    ids, rng, nodes = draw_ids(2)[:, :7], np.random.default_rng(3), 10
    # Chains deeper than every window, and branches off them.
    parents = np.array([[0, 0, 1, 2, 3, 4, 5, 1, 0, 6], [0, 0, 0, 2, 3, 2, 4, 6, 7, 8]])
    tokens = rng.integers(0, 97, (2, nodes))
    tree = link(jnp.asarray(tokens), jnp.asarray(parents), nodes)
    _, caches = decode(target, ids, [7])
    visible = Visible(jnp.full(2, 7), tree.ancestors)
    features, _, _ = target.model(tree.tokens, 7 + tree.depth, visible, caches)
    logits = target.model.head(features)
    for row in range(2):
        for node in range(nodes):
            path = [node]
            while path[0]:
                path.insert(0, parents[row, path[0]])
            text = np.concatenate([ids[row], tokens[row, path]])[None]
            expected = theirs(model, text)[0, -1]
            np.testing.assert_allclose(logits[row, node], expected, atol=TOLERANCE)


def test_greedy_text_equals_generate(pair):
    import torch

    model, target = pair
    prompt = draw_ids(4)[:1, :7]
    with torch.no_grad():
        out = model.generate(
            torch.tensor(prompt), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
    ids = prompt[0].tolist()
    assert generate(target, None, ids, max_new_tokens=24).tokens == [out[0, 7:].tolist()]


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def test_the_text_part_of_a_gemma_3_that_sees_images(tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    config = transformers.Gemma3Config(
        text_config={**SIZES, **CASES["gemma3"][1]},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval().float()
    model.save_pretrained(tmp_path)
    ids = draw_ids() % 90
    expected = theirs(model, ids)
    np.testing.assert_allclose(forward(load_model(tmp_path), ids)[0], expected, atol=TOLERANCE)
    # Some writers put the network's name first.
    path = tmp_path / "model.safetensors"
    old, new = "language_model.model.", "model.language_model."
    save_file({name.replace(old, new): x for name, x in load_file(path).items()}, path)
    np.testing.assert_allclose(forward(load_model(tmp_path), ids)[0], expected, atol=TOLERANCE)
