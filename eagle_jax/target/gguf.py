"""Converts a GGUF file to a folder in Hugging Face layout.

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
from eagle_jax.target import gguf_families as families
from eagle_jax.target.gguf_families import (
    Expected,
    architecture,
    expected_tensors,
    llama3_scaling,
)
from eagle_jax.target.gguf_tokenizer import build_tokenizer

_REQUIRED = object()
_ROWS_AT_ONCE = 4096  # of a matrix, so that a large embedding is never held whole in float32


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
    kind, config = architecture(metadata), families.config(metadata)
    tensors = _without_factors(path, tensors, config)
    expected = expected_tensors(config, kind)
    _check_tensors(path, tensors, expected)
    config["tie_word_embeddings"] = all(t.name != "output.weight" for t in tensors)
    tokenizer, tokenizer_config = build_tokenizer(path, metadata.get, config)

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

    def blocks(tensor: Any) -> Iterator[np.ndarray]:
        part = tensor.name.split(".")[-2]
        for block in _float32_blocks(tensor, path, whole=kind.permuted and part in heads):
            if kind.permuted and part in heads:
                yield unpermute(block, heads[part])
            elif kind.shifted_norms and part.endswith("norm"):
                yield block - np.float32(1)
            else:
                yield block

    _write_safetensors(folder / "model.safetensors", tensors, expected, blocks, progress)


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


def _without_factors(path: Path, tensors: list[Any], config: dict[str, Any]) -> list[Any]:
    """The tensors but for factors of rotary frequencies, whose rule goes into `config`."""
    factors = [tensor for tensor in tensors if tensor.name == "rope_freqs.weight"]
    if factors:
        values = np.concatenate(list(_float32_blocks(factors[0], path, whole=True)))
        scaling = llama3_scaling(values, config.get("rope_theta"), config["head_dim"])
        if scaling is None:
            raise FormatError(
                f"{path}: rotary scaling by frequency (rope_freqs) other than Llama 3's is not "
                "supported"
            )
        config["rope_scaling"] = scaling
    return [tensor for tensor in tensors if tensor.name != "rope_freqs.weight"]


def _check_tensors(path: Path, tensors: list[Any], expected: Expected) -> None:
    found = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in tensors}
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
    blocks: Callable[[Any], Iterator[np.ndarray]],
    progress: Callable[[int, int], None],
) -> None:
    """Writes the float32 `blocks` of each tensor one after the other.

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
            for block in blocks(tensor):
                file.write(np.ascontiguousarray(block, "<f4"))
            progress(done, len(tensors))


def _float32_blocks(tensor: Any, source: Path, whole: bool) -> Iterator[np.ndarray]:
    """Dequantised rows of a tensor in order, in one block or in several."""
    from gguf import dequantize

    rows = tensor.data.shape[0]
    step = rows if whole else _ROWS_AT_ONCE
    for start in range(0, rows, step):
        try:
            yield dequantize(tensor.data[start : start + step], tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise FormatError(f"{source}: {tensor.name}: cannot dequantise {kind}") from error


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
