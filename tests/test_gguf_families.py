"""GGUF files of each architecture hold what their Hugging Face folders hold."""

from __future__ import annotations

import dataclasses
import json
import math

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_gguf import TOKENS, TYPES, interleave, write_gguf
from test_gguf_sentencepiece import vocabulary

from eagle_jax.nn.modules import parameters
from eagle_jax.target.gguf import convert
from eagle_jax.target.gguf_families import llama3_scaling
from eagle_jax.target.load import load_model
from eagle_jax.text import load_tokenizer

SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50_000.0,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA = {
    "query_pre_attn_scalar": 16,
    "sliding_window": 12,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": LINEAR,
    "hidden_activation": "gelu_pytorch_tanh",
}
CASES = {
    "llama": {"model_type": "llama", "rope_scaling": LINEAR},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {"model_type": "gemma3_text", **GEMMA, "vocab_size": len(vocabulary()[0])},
}


def hugging_face_tensors(config):
    """Random tensors of a model, by the names of transformers."""
    rng, kind = np.random.default_rng(0), config["model_type"]
    hidden, inner, vocab = (config[f"{k}_size"] for k in ("hidden", "intermediate", "vocab"))
    head = config["head_dim"]
    queries, keys = (head * config[f"num_{k}_heads"] for k in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if kind in ("llama", "qwen3"):
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (rows, hidden)
            if kind == "qwen2":
                shapes[f"{at}self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, queries)
        if kind in ("qwen3", "gemma3_text"):
            shapes[f"{at}self_attn.q_norm.weight"] = (head,)
            shapes[f"{at}self_attn.k_norm.weight"] = (head,)
        for part in ("gate", "up"):
            shapes[f"{at}mlp.{part}_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        norms = ["input", "post_attention"]
        norms += ["pre_feedforward", "post_feedforward"] if kind == "gemma3_text" else []
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in norms}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_as_llama_cpp(path, architecture, config, tensors):
    """Names come from the gguf package; order and norms are as llama.cpp's converter makes them."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "rope_scaling" in config:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "gemma3":
        tokens, scores, types = vocabulary()
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_add_space_prefix(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(TOKENS)
        writer.add_token_types(TYPES)
        writer.add_token_merges(["h e"])
    kind = gguf.MODEL_ARCH_NAMES
    number = next(arch for arch, name in kind.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            which = "attention" if "q_proj" in name else "key_value"
            tensor = interleave(tensor, config[f"num_{which}_heads"])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", CASES)
def test_both_formats_give_one_model(tmp_path, architecture):
    config = SIZES | CASES[architecture]
    tensors = hugging_face_tensors(config)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "folder" / "model.safetensors")
    write_as_llama_cpp(tmp_path / "m.gguf", architecture, config, tensors)
    convert(tmp_path / "m.gguf", tmp_path / "converted")
    one, other = (load_model(tmp_path / name, jnp.float32) for name in ("folder", "converted"))
    assert dataclasses.replace(one.config, tied=True) == dataclasses.replace(
        other.config, tied=True
    )
    assert (one.lm_head is None) == (other.lm_head is None)
    tokenizer = load_tokenizer(tmp_path / "converted")
    assert tokenizer.decode(tokenizer.encode("ab \n\n")) == "ab \n\n"
    assert (tokenizer.encode("ab")[0] == 1) is (architecture == "gemma3"), "BOS in front"
    one, other = parameters(one), parameters(other)
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], atol=3e-7, err_msg=name)


def llama3_factors(factor, theta, head_dim):
    """As llama.cpp's converter writes them."""
    found = []
    for index in range(0, head_dim, 2):
        wave = 2 * math.pi * theta ** (index / head_dim)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_frequencies_become_llama_3s_rule(factor):
    found = llama3_scaling(llama3_factors(factor, 5e5, 64), 5e5, 64)
    assert found == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert llama3_scaling(np.linspace(1, factor, 32, dtype=np.float32), 5e5, 64) is None


def test_a_llama_3_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", factors=llama3_factors(8.0, 50_000.0, 16))
    convert(tmp_path / "m.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"]["factor"] == 8.0
    assert load_model(tmp_path / "out").config.rope_scaling.bands == (1.0, 4.0, 8192)
