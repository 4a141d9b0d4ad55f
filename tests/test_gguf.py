"""Conversion of a small random GGUF file: weights, configuration, tokenizer, and broken files."""

import json
import math

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from eagle_jax import hub
from eagle_jax.errors import FormatError
from eagle_jax.target.gguf import convert
from eagle_jax.text import load_tokenizer

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "Ċ Ċ"]
SPECIAL = ["<|end|>", "<|user|>"]
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
TYPES = [3] * len(SPECIAL) + [1] * (len(ALPHABET) + len(MERGES)) + [4]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"

LAYER = {
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN), "Q8_0"),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN), "Q4_1"),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN), "Q8_0"),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM), "F32"),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN), "Q4_0"),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN), "F16"),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER), "Q8_0"),
    "attn_norm": ("input_layernorm", (HIDDEN,), "F32"),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,), "F32"),
}


def interleave(weight, heads):
    """Row order of llama.cpp, written out: halves (i, i + d/2) of a head become neighbours."""
    out = np.empty_like(weight)
    half = weight.shape[0] // heads // 2
    for head in range(heads):
        start = head * 2 * half
        for i in range(half):
            out[start + 2 * i] = weight[start + i]
            out[start + 2 * i + 1] = weight[start + half + i]
    return out


def write_gguf(path, *, head=False, skip=(), extra=(), factors=None, **metadata):
    """Writes a llama; returns the weights that a converter should find, by Hugging Face name.

    Args:
      head: whether to write an output matrix of its own.
      skip: names of tensors or metadata to leave out.
      extra: names of further tensors.
      factors: of the rotary frequencies.
      metadata: values instead of the usual ones, by the last part of the key.
    """
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    values = {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD_DIM,
    }
    for key, value in values.items():
        if key not in skip:
            writer.add_uint32(key, metadata.pop(key.split(".")[-1], value))
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 50_000.0)
    writer.add_tokenizer_model(metadata.pop("model", "gpt2"))
    writer.add_tokenizer_pre(metadata.pop("pre", "smollm"))
    writer.add_token_list(metadata.pop("tokens", TOKENS))
    writer.add_token_types(TYPES)
    writer.add_token_merges(metadata.pop("merges", MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(metadata.pop("add_bos", False))
    writer.add_chat_template(TEMPLATE)
    assert not metadata

    expected = {}

    def add(name, hf_name, shape, kind, heads=None):
        weight = rng.standard_normal(shape, np.float32)
        kind = gguf.GGMLQuantizationType[kind]
        stored = gguf.quantize(interleave(weight, heads) if heads else weight, kind)
        if name not in skip:
            raw = None if stored.dtype != np.uint8 else kind
            writer.add_tensor(name, stored, raw_dtype=raw)
        # Rows are quantised one by one, so their order does not matter for the values.
        expected[hf_name] = gguf.dequantize(gguf.quantize(weight, kind), kind)

    add("token_embd.weight", "model.embed_tokens.weight", (len(TOKENS), HIDDEN), "Q8_0")
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), "F32")
    if head:
        add("output.weight", "lm_head.weight", (len(TOKENS), HIDDEN), "F16")
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for layer in range(LAYERS):
        for part, (module, shape, kind) in LAYER.items():
            name = f"model.layers.{layer}.{module}.weight"
            add(f"blk.{layer}.{part}.weight", name, shape, kind, heads.get(part))
    for name in extra:
        writer.add_tensor(name, np.arange(1, 1 + HEAD_DIM // 2, dtype=np.float32))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("head", [False, True])
def test_weights_are_dequantised_in_hugging_face_order(tmp_path, head):
    expected = write_gguf(tmp_path / "m.gguf", head=head)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is not head


def test_a_matrix_in_several_blocks_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle_jax.target.gguf._ROWS_AT_ONCE", 7)
    expected = write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_the_order_undone_is_the_one_that_rotation_needs(tmp_path):
    """Attention scores agree: pairs (2i, 2i+1) on stored rows, (i, i + d/2) on converted rows."""
    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    converted = load_file(tmp_path / "out" / "model.safetensors")
    rng = np.random.default_rng(1)
    half = HEAD_DIM // 2
    frequencies = 50_000.0 ** (-np.arange(half) / half)

    def rotated(vectors, position, pairs):
        turn = np.exp(1j * position * frequencies)
        heads = vectors.reshape(-1, HEAD_DIM)
        first, second = (heads[:, 0::2], heads[:, 1::2]) if pairs else np.split(heads, 2, axis=1)
        return (first + 1j * second) * turn

    scores = []
    for pairs in (True, False):
        weights = []
        for part in "qk":
            tensor = stored[f"blk.0.attn_{part}.weight"]
            ours = converted[f"model.layers.0.self_attn.{part}_proj.weight"]
            theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
            weights.append(theirs if pairs else ours)
        rng = np.random.default_rng(1)
        query, key = (w @ rng.standard_normal(HIDDEN) for w in weights)
        q, k = rotated(query, 9, pairs), np.repeat(rotated(key, 4, pairs), HEADS // KV_HEADS, 0)
        scores.append((q * k.conj()).real.sum(1))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)


def test_config(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50_000.0,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 0}


def words(tokenizer, text):
    return [tokenizer.backend.id_to_token(index) for index in tokenizer.encode(text)]


def test_tokenizer(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert words(tokenizer, "hello hello") == ["hello", "Ġhello"]
    # Digits come one by one, and are no neighbours of white space before them.
    assert words(tokenizer, "h\n\n12") == ["h", "ĊĊ", "1", "2"]
    assert words(tokenizer, "<|user|>hello<tool>") == ["<|user|>", "hello", "<tool>"]
    text = "naïve 😀 12 hello\t<tool>"
    assert tokenizer.decode(tokenizer.encode(text + "<|end|>")) == text
    assert words(tokenizer, tokenizer.render_chat("hello")) == ["<|user|>", "hello", "<|end|>"]


def test_pre_tokenizers_differ_in_digits_and_white_space(tmp_path):
    found = {}
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2"):
        write_gguf(tmp_path / f"{pre}.gguf", pre=pre)
        convert(tmp_path / f"{pre}.gguf", tmp_path / pre)
        found[pre] = words(load_tokenizer(tmp_path / pre), "h\n\n12")
    assert found == {
        "gpt-2": ["h", "Ċ", "Ċ", "12"],
        "smollm": ["h", "ĊĊ", "1", "2"],
        "llama-bpe": ["h", "ĊĊ", "12"],
        "qwen2": ["h", "ĊĊ", "1", "2"],
    }


def test_bos_is_put_in_front_where_the_metadata_say_so(tmp_path):
    write_gguf(tmp_path / "m.gguf", add_bos=True)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert words(tokenizer, "hello") == ["<|user|>", "hello"]
    assert tokenizer.encode_chat("h")[:2] != [1, 1], "a template brings its own"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma"}, "'gemma3', found 'gemma'"),
        ({"skip": ["llama.block_count"]}, "llama.block_count"),
        ({"skip": ["blk.1.ffn_up.weight"]}, "blk.1.ffn_up.weight"),
        ({"extra": ["blk.0.attn_q.bias"]}, "blk.0.attn_q.bias"),
        ({"extra": ["rope_freqs.weight"]}, "rotary"),
        ({"feed_forward_length": INNER + 32}, "shape"),
        ({"dimension_count": HEAD_DIM // 2}, "rotary"),
        ({"model": "bert"}, "'gpt2'"),
        ({"pre": "chameleon"}, "'chameleon'"),
        ({"merges": ["h e", "absent pair"]}, "merges"),
    ],
)
def test_what_is_refused(tmp_path, change, message):
    write_gguf(tmp_path / "m.gguf", **change)
    with pytest.raises(FormatError, match=message) as error:
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert "m.gguf" in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 0.999])
def test_truncated_files(tmp_path, share):
    path = tmp_path / "m.gguf"
    write_gguf(path)
    content = path.read_bytes()
    path.write_bytes(content[: math.floor(len(content) * share)])
    with pytest.raises(FormatError, match="m.gguf"):
        convert(path, tmp_path / "out")


def test_another_kind_of_file(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(FormatError, match="GGUF"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_a_gguf_file_as_a_target(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "cache"))
    expected = write_gguf(tmp_path / "m.gguf")
    folder = hub.resolve(str(tmp_path / "m.gguf"))
    assert load_file(folder / "model.safetensors").keys() == expected.keys()
    (tmp_path / "m.gguf").rename(tmp_path / "other.gguf")
    assert hub.resolve(str(tmp_path / "other.gguf")) == folder, "the content is what counts"


def test_transformers_reads_the_folder_alike(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(tmp_path / "out")
    for text in ("hello  hello\n\n12", "naïve 😀", "<|user|>hello<tool>", " a . b , c"):
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    config = transformers.LlamaConfig.from_pretrained(tmp_path / "out")
    assert (config.hidden_size, config.head_dim, config.rms_norm_eps) == (HIDDEN, HEAD_DIM, 1e-5)
