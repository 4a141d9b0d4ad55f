"""The target's forward against transformers: stored fixtures, and live where torch is installed."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from make_fixtures import FIXTURES, FOLDER, reference
from safetensors.numpy import load_file, save_file

from eagle_jax import FormatError, InputError
from eagle_jax.nn.attention import Visible
from eagle_jax.nn.cache import commit_rows, empty_cache
from eagle_jax.target.families import model_config
from eagle_jax.target.load import load_model, read_json


def forward(model, ids, taps=()):
    rows = ids.shape[1]
    at = jnp.broadcast_to(jnp.arange(rows), ids.shape)
    causal = jnp.broadcast_to(jnp.tri(rows, dtype=bool), (len(ids), rows, rows))
    visible = Visible(jnp.zeros(len(ids), jnp.int32), causal)
    features, tapped, _ = model(jnp.asarray(ids), at, visible, None, taps)
    return model.head(features), tapped


@pytest.mark.parametrize("name", FIXTURES)
def test_prefill_against_stored_logits(name):
    expected = np.load(FOLDER / name / "expected.npz")
    logits, taps = forward(load_model(FOLDER / name), expected["ids"], taps=(1,))
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-3)
    np.testing.assert_allclose(taps, expected["stream_1"], atol=1e-3)
    assert np.std(expected["logits"]) > 0.5


@pytest.mark.parametrize("name", FIXTURES)
def test_cached_decoding_and_trees_equal_prefill(name):
    """Rows of different lengths; each tree path gives the logits of its own sequence."""
    model, ids = load_model(FOLDER / name), np.load(FOLDER / name / "expected.npz")["ids"]
    config, lengths = model.config, np.array([12, 7])
    at = jnp.broadcast_to(jnp.arange(12), (2, 12))
    causal = jnp.broadcast_to(jnp.tri(12, dtype=bool), (2, 12, 12))
    start, zero = empty_cache(config, 2, 24, jnp.float32), jnp.zeros(2, jnp.int32)
    _, _, fresh = model(jnp.asarray(ids[:, :12]), at, Visible(zero, causal), start)
    caches = [commit_rows(c, f, zero) for c, f in zip(start, fresh, strict=True)]
    # A fork: nodes 1 and 2 are children of the root, 3 is a child of 2.
    tree = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    paths = {1: [0, 1], 2: [0, 2], 3: [0, 2, 3]}
    ancestors = np.eye(4, dtype=bool)
    for node, path in paths.items():
        ancestors[node, path] = True
    positions = lengths[:, None] + np.array([0, 1, 1, 2])
    visible = Visible(jnp.asarray(lengths), jnp.asarray(np.stack([ancestors] * 2)))
    features, _, _ = model(jnp.asarray(tree), jnp.asarray(positions), visible, caches)
    logits = model.head(features)
    for row, length in enumerate(lengths):
        for node, path in paths.items():
            text = np.concatenate([ids[row, :length], tree[row, path]])[None]
            whole, _ = forward(model, text)
            np.testing.assert_allclose(logits[row, node], whole[0, -1], atol=1e-3)


@pytest.mark.parity
@pytest.mark.parametrize("name", FIXTURES)
def test_against_transformers_live(name, tmp_path):
    torch = pytest.importorskip("torch")
    model, ids = reference(name, tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    logits, _ = forward(load_model(tmp_path), ids)
    np.testing.assert_allclose(logits, expected, atol=1e-3)


def test_causality():
    """Changing a token changes no logits before it."""
    model = load_model(FOLDER / "llama-tied")
    ids = np.arange(10)[None] + 1
    changed = ids.copy()
    changed[0, 6] = 50
    one, two = (np.asarray(forward(model, x)[0]) for x in (ids, changed))
    np.testing.assert_array_equal(one[0, :6], two[0, :6])
    assert np.abs(one[0, 6:] - two[0, 6:]).max() > 1e-2


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(FOLDER / "llama-separate", tmp_path / "model")
    return tmp_path / "model"


def test_missing_and_misshapen_tensors_are_named(copy):
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, copy / "model.safetensors")
    with pytest.raises(FormatError, match="down_proj"):
        load_model(copy)
    save_file(tensors | {name: tensors[name].T.copy()}, copy / "model.safetensors")
    with pytest.raises(FormatError, match="layers.1.mlp.down.weight"):
        load_model(copy)


def test_broken_files_are_refused(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FormatError, match="safetensors"):
        load_model(copy)
    path.unlink()
    with pytest.raises(InputError, match="no model.safetensors"):
        load_model(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(FormatError, match="JSON"):
        load_model(copy)


def test_an_index_cannot_leave_its_folder(copy):
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="not a file name"):
        load_model(copy)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mamba"},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"hidden_act": "gelu"},
        {"num_attention_heads": 3},
    ],
)
def test_unsupported_models_are_refused(change):
    raw = read_json(FOLDER / "llama-tied" / "config.json")
    with pytest.raises(InputError):
        model_config({**raw, **change})
