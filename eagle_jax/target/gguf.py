"""Converts a GGUF file of the llama architecture to a folder in Hugging Face layout, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.errors import FormatError, InputError

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Llama 3 differs from Qwen 2 only in keeping up to three digits together.
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def convert(path: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors and the tokenizer of a GGUF file into `folder`.

    Raises:
      FormatError: the file is truncated, or lacks metadata or tensors.
      InputError: the architecture, the tokenizer or a quantisation is not supported.
    """
    from safetensors.numpy import save_file

    reader = _read(path)
    fields = reader.fields

    def get(name: str, default: Any = None) -> Any:
        if name in fields:
            return fields[name].contents()
        if default is not None:
            return default
        raise FormatError(f"{path} lacks the metadata field {name!r}")

    architecture = get("general.architecture")
    if architecture != "llama":
        raise InputError(
            f"{path}: supported GGUF architectures: llama; this file's is {architecture!r}"
        )
    tensors = _tensors(reader, path, get("llama.attention.head_count"), get)
    embedding = tensors["model.embed_tokens.weight"]
    hidden, heads = get("llama.embedding_length"), get("llama.attention.head_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": int(embedding.shape[0]),
        "hidden_size": hidden,
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv", heads),
        "head_dim": get("llama.rope.dimension_count", hidden // heads),
        # GGUF keeps float32; 9.99999974e-06 stands for 1e-05.
        "rms_norm_eps": float(f"{get('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(get("llama.rope.freq_base", 10_000.0)),
        "max_position_embeddings": get("llama.context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": get("tokenizer.ggml.bos_token_id", -1),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }
    if config["bos_token_id"] < 0:
        del config["bos_token_id"]
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(get, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _read(path: Path):
    import gguf

    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the reader raises whatever a broken header makes it trip over
        raise FormatError(
            f"{path} is not a readable GGUF file (truncated or corrupt): "
            f"{type(error).__name__}: {error}"
        ) from error


def _tensors(reader, path: Path, heads: int, get) -> dict[str, np.ndarray]:
    import gguf

    kv_heads = get("llama.attention.head_count_kv", heads)
    out: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        try:
            array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except (NotImplementedError, ValueError) as error:
            raise InputError(f"{path}: cannot dequantise {tensor.name}: {error}") from error
        name = OUTER_NAMES.get(tensor.name)
        part = tensor.name.split(".")
        if name is None and len(part) == 4 and part[0] == "blk" and part[2] in LAYER_NAMES:
            name = f"model.layers.{part[1]}.{LAYER_NAMES[part[2]]}.weight"
            if part[2] in ("attn_q", "attn_k"):
                array = interleaved_to_halves(array, heads if part[2] == "attn_q" else kv_heads)
        if name is None:
            if tensor.name == "rope_freqs.weight":
                raise InputError(f"{path}: rotary frequency factors are not supported")
            raise FormatError(f"{path}: unknown tensor {tensor.name!r}")
        out[name] = np.ascontiguousarray(array)
    layers = get("llama.block_count")
    wanted = {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"model.layers.{i}.{n}.weight" for i in range(layers) for n in LAYER_NAMES.values()
    }
    if missing := sorted(wanted - out.keys()):
        raise FormatError(f"{path} lacks {len(missing)} tensors, such as {missing[0]}")
    return out


def interleaved_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of query and key rows.

    llama.cpp rotates neighbouring rows of a head as a pair; Hugging Face checkpoints pair row i of a
    head's first half with row i of its second half.

    Args:
      weight: `[heads * head_dim, hidden]`.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, hidden)


def _write_tokenizer(get, folder: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    model = get("tokenizer.ggml.model")
    if model != "gpt2":
        raise InputError(f"supported GGUF tokenizers: gpt2 (byte-level BPE); this one is {model!r}")
    tokens = get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in get("tokenizer.ggml.merges")]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    after_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern: str):
        return [pre_tokenizers.Split(Regex(pattern), "isolated"), after_split]

    known = {
        "gpt-2": [plain],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), plain],
        "llama-bpe": split(LLAMA3_SPLIT),
        "llama3": split(LLAMA3_SPLIT),
        "qwen2": split(QWEN2_SPLIT),
    }
    pre = get("tokenizer.ggml.pre", "gpt-2")
    if pre not in known:
        raise InputError(f"supported GGUF pre-tokenizers: {', '.join(known)}; this one is {pre!r}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(known[pre])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = get("tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": get("llama.context_length"),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = get(f"tokenizer.ggml.{theirs}_token_id", -1)
        if 0 <= index < len(tokens):
            config[f"{ours}_token"] = tokens[index]
    if template := get("tokenizer.chat_template", ""):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
