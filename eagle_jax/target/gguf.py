"""Converts a GGUF file of the llama architecture to a folder in Hugging Face layout.

The folder holds `config.json`, `generation_config.json`, `model.safetensors` (float32),
`tokenizer.json` and `tokenizer_config.json`. Weights are dequantised and nothing else is changed,
so that the target computes what llama.cpp would compute in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.errors import FormatError
from eagle_jax.target.gguf_tokenizer import build_tokenizer

_REQUIRED = object()
_ROWS_AT_ONCE = 4096  # of a matrix, so that a large embedding is never held whole in float32

# GGUF names of a layer's tensors, and the module that carries the weight in Hugging Face's names.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Expected = dict[str, tuple[str, tuple[int, ...]]]


def convert(
    path: Path, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Writes the files of a model folder.

    Args:
      path: the GGUF file.
      folder: where to, made if absent. After an error it may hold some of the files: the caller
        is the one who makes the whole atomic.
      progress: called with the numbers of tensors written so far and in all.

    Raises:
      FormatError: the file is truncated or no GGUF file, its architecture or tokenizer is not
        supported, or metadata or tensors are missing.
      OSError: reading or writing failed.
    """
    metadata, tensors = _read(path)
    config = _config(metadata)
    expected = _expected_tensors(config)
    _check_tensors(path, tensors, expected)
    config["tie_word_embeddings"] = all(t.name != "output.weight" for t in tensors)
    tokenizer, tokenizer_config = build_tokenizer(path, metadata.get, config["vocab_size"])

    folder.mkdir(parents=True, exist_ok=True)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = {key: value for key, value in ids.items() if value is not None}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(folder / "tokenizer.json"))
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    _write_safetensors(folder / "model.safetensors", tensors, expected, heads, path, progress)


class _Metadata:
    """The key-value part of a GGUF file, with errors that name the file and the key."""

    def __init__(self, path: Path, fields: dict[str, Any]):
        self.path = path
        self._fields = fields

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        if key in self._fields:
            return self._fields[key].contents()
        if default is _REQUIRED:
            raise FormatError(f"{self.path}: the metadata lack {key!r}")
        return default

    def number(self, key: str, default: Any = _REQUIRED) -> int | float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FormatError(f"{self.path}: {key!r} should be one number, found {value!r:.60}")
        return value


def _read(path: Path) -> tuple[_Metadata, list[Any]]:
    from gguf import GGUFReader

    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise FormatError(f"{path} is no GGUF file: it starts with {magic!r}, expected b'GGUF'")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        # The reader slices a memory map and trips over whatever is missing.
        raise FormatError(
            f"{path} is truncated or corrupt ({path.stat().st_size} bytes; the reader says: "
            f"{error}); fetch it again"
        ) from error
    return _Metadata(path, reader.fields), list(reader.tensors)


def _config(metadata: _Metadata) -> dict[str, Any]:
    """The content of `config.json`, as transformers' LlamaConfig writes it."""
    path, number = metadata.path, metadata.number
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise FormatError(f"{path}: expected the architecture 'llama', found {architecture!r}")
    if number("split.count", 1) > 1:
        raise FormatError(f"{path} is one part of a split model; merge the parts into one file")
    if number("llama.expert_count", 0) > 0:
        raise FormatError(f"{path}: mixture-of-experts models are not supported")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise FormatError(f"{path}: rotary scaling {scaling!r} is not supported (only 'none')")

    hidden = int(number("llama.embedding_length"))
    heads = int(number("llama.attention.head_count"))
    head_dim = int(number("llama.attention.key_length", hidden // max(heads, 1)))
    rotary = int(number("llama.rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise FormatError(
            f"{path}: expected rotary angles over the whole head ({head_dim}), found {rotary}"
        )
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    vocab_size = number("llama.vocab_size", len(metadata.get("tokenizer.ggml.tokens")))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(vocab_size),
        "hidden_size": hidden,
        "intermediate_size": int(number("llama.feed_forward_length")),
        "num_hidden_layers": int(number("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(number("llama.attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": int(number("llama.context_length")),
        "rms_norm_eps": _shortest(number("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(number("llama.rope.freq_base", 10_000.0)),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": ends[0] if len(ends) == 1 else (ends or None),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", None),
        "torch_dtype": "float32",
    }


def _shortest(value: float) -> float:
    """The float32 value's shortest decimal: 1e-05 where Python would show 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _expected_tensors(config: dict[str, Any]) -> Expected:
    """GGUF name -> (Hugging Face name, shape) of every tensor that a llama may have."""
    hidden, inner, vocab = (config[f"{k}_size"] for k in ("hidden", "intermediate", "vocab"))
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    expected = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
        "output.weight": ("lm_head.weight", (vocab, hidden)),
    }
    for layer in range(config["num_hidden_layers"]):
        for part, module in _LAYER.items():
            name = f"model.layers.{layer}.{module}.weight"
            expected[f"blk.{layer}.{part}.weight"] = (name, shapes.get(part, (hidden,)))
    return expected


def _check_tensors(path: Path, tensors: list[Any], expected: Expected) -> None:
    found = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in tensors}
    if "rope_freqs.weight" in found:
        raise FormatError(f"{path}: rotary scaling by frequency (rope_freqs) is not supported")
    missing = [name for name in expected if name not in found and name != "output.weight"]
    unknown = [name for name in found if name not in expected]
    for what, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            raise FormatError(f"{path} {what} tensors ({len(names)}): {', '.join(names[:3])}")
    for name, shape in found.items():
        if shape != expected[name][1]:
            raise FormatError(f"{path}: {name} should have shape {expected[name][1]}, has {shape}")


def _write_safetensors(
    path: Path,
    tensors: list[Any],
    expected: Expected,
    heads: dict[str, int],
    source: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Writes float32 tensors one after the other.

    safetensors' own writer wants all arrays at once, four to eight times the size of the GGUF
    file. Sizes are known beforehand, so the header can be written first.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        name, shape = expected[tensor.name]
        end = offset + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for done, tensor in enumerate(tensors, 1):
            part = tensor.name.split(".")[-2]
            for block in _float32_blocks(tensor, heads.get(part), source):
                file.write(np.ascontiguousarray(block, "<f4"))
            progress(done, len(tensors))


def _float32_blocks(tensor: Any, heads: int | None, source: Path) -> Iterator[np.ndarray]:
    """Dequantised rows of a tensor in order; `heads` is given for q and k projections."""
    from gguf import dequantize

    rows = tensor.data.shape[0]
    step = rows if heads else _ROWS_AT_ONCE
    for start in range(0, rows, step):
        try:
            block = dequantize(tensor.data[start : start + step], tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise FormatError(f"{source}: {tensor.name}: cannot dequantise {kind}") from error
        yield unpermute(block, heads) if heads else block


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of rows in a q or k projection.

    llama.cpp rotates neighbouring rows of a head; Hugging Face rotates row i of a head with row
    i + head_dim / 2. The converter to GGUF interleaves the halves; this takes them apart again.

    Args:
      weight: [heads * head_dim, in].
      heads: number of heads of this projection.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
