"""Weights on disk: shards, types, what is refused, and the memory that loading takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from make_fixtures import FOLDER
from safetensors.numpy import load_file, save_file

from eagle_jax import FormatError
from eagle_jax.nn.modules import parameters
from eagle_jax.target.load import load_model


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(FOLDER / "llama-separate", tmp_path / "model")


def shard(folder, number):
    """Spreads a folder's tensors over `number` files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, where = sorted(tensors), {}
    for index in range(number):
        file = f"model-{index + 1:05}-of-{number:05}.safetensors"
        part = {name: tensors[name] for name in names[index::number]}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_shards_hold_what_one_file_holds(copy):
    whole = parameters(load_model(copy))
    shard(copy, 3)
    parts = parameters(load_model(copy))
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(array, parts[name], err_msg=name)


def test_a_shard_that_lacks_what_its_index_promises(copy):
    shard(copy, 2)
    path = copy / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    dropped = sorted(tensors)[0]
    save_file({name: t for name, t in tensors.items() if name != dropped}, path)
    with pytest.raises(FormatError, match=f"{dropped}.*index promises"):
        load_model(copy)
    path.unlink()
    with pytest.raises(FormatError, match="00002 is missing|00002.safetensors is missing"):
        load_model(copy)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_types(copy, stored, wanted):
    path = copy / "model.safetensors"
    tensors = {name: tensor.astype(stored) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    found = parameters(load_model(copy, wanted))
    assert {array.dtype for array in found.values()} == {jnp.dtype(wanted)}
    expected = tensors["model.embed_tokens.weight"].astype(np.float32).astype(wanted)
    np.testing.assert_array_equal(found["embed"], expected)


def test_integers_are_no_weights(copy):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": np.ones(32, np.int8)}, path)
    with pytest.raises(FormatError, match="model.norm.weight.*int8"):
        load_model(copy)


def test_without_a_head_of_its_own_the_embedding_is_the_head(copy):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path)
    assert load_model(copy).lm_head is None


BIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
MEASURE = """
import resource, sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from eagle_jax.nn.modules import parameters
from eagle_jax.target.load import load_model

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

jax.block_until_ready(jnp.ones(8) + 1)
before, begin = peak(), time.perf_counter()
arrays = parameters(load_model(Path(sys.argv[1]), "bfloat16"))
seconds = time.perf_counter() - begin
print(before, peak(), sum(x.nbytes for x in arrays.values()), sum(x.size for x in arrays.values()),
      seconds)
"""


def write_big(folder):
    """Writes a Llama of 1.1 billion random bfloat16 weights in five shards; their largest size."""
    hidden, inner, vocab = (BIG[f"{key}_size"] for key in ("hidden", "intermediate", "vocab"))
    kv = hidden // BIG["num_attention_heads"] * BIG["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for index in range(BIG["num_hidden_layers"]):
        at = f"model.layers.{index}."
        for part, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, hidden)
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)),
                            ("down", (hidden, inner))):  # fmt: skip
            shapes[f"{at}mlp.{part}_proj.weight"] = shape
        for norm in ("input", "post_attention"):
            shapes[f"{at}{norm}_layernorm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocab, hidden)
    noise = np.random.default_rng(0).standard_normal(vocab * hidden, np.float32)
    noise = noise.astype(ml_dtypes.bfloat16)
    total, sizes, where, part = sum(map(np.prod, shapes.values())), [], {}, {}
    for name, shape in shapes.items():
        part[name] = noise[: np.prod(shape)].reshape(shape)
        held = sum(tensor.size for tensor in part.values())
        if held > total / 5 or name == "lm_head.weight":
            file = f"model-{len(sizes)}.safetensors"
            save_file(part, folder / file)
            where |= dict.fromkeys(part, file)
            sizes.append((folder / file).stat().st_size)
            part = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(BIG))
    return max(sizes)


@pytest.mark.slow
def test_peak_memory_of_a_billion_weights(tmp_path):
    """Beside the weights themselves, loading holds less than 1.3 times the largest shard."""
    largest = write_big(tmp_path)
    try:
        out = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path)],
            check=True, capture_output=True, text=True,
        ).stdout.split()  # fmt: skip
    finally:
        shutil.rmtree(tmp_path)
    before, peak, weights, count = map(int, out[:4])
    extra = peak - before - weights
    print(
        f"\n{count / 1e9:.2f} billion weights, {weights / 1e9:.2f} GB in {float(out[4]):.1f} s; "
        f"peak {peak / 1e9:.2f} GB, {extra / 1e9:.2f} GB beyond weights and start; "
        f"largest shard {largest / 1e9:.2f} GB"
    )
    assert count > 1e9
    assert extra < 1.3 * largest
