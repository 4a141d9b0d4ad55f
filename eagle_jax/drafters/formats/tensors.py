"""The tensors of a checkpoint folder: safetensors, in one file or in shards, or a .bin file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eagle_jax.drafters.formats.unpickle import read_bin
from eagle_jax.errors import FormatError
from eagle_jax.target.load import read_json

SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder by its name there.

    Safetensors come before `.bin`, an index before a single file.

    Raises:
      FormatError: no weights, a file that is corrupt or missing, or one outside the folder.
    """
    for single, index in zip(SINGLE, INDEX, strict=True):
        if (folder / index).is_file():
            return _sharded(folder, folder / index)
        if (folder / single).is_file():
            return _read(folder / single)
    raise FormatError(f"{folder} holds no weights; expected one of {', '.join(SINGLE + INDEX)}")


def _sharded(folder: Path, index: Path) -> dict[str, np.ndarray]:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise FormatError(f"{index}: expected `weight_map`, names and their files")
    for file in listed.values():
        if not isinstance(file, str) or Path(file).name != file or file in (".", ".."):
            raise FormatError(f"{index}: {file!r:.80} is not a file name in this folder")
    found: dict[str, np.ndarray] = {}
    for file in sorted(set(listed.values())):
        for name, array in _read(folder / file).items():
            if listed.get(name) != file:
                where = listed.get(name, "no file")
                raise FormatError(f"{index}: {name!r} should be in {where}, found in {file}")
            found[name] = array
    if missing := sorted(listed.keys() - found.keys()):
        raise FormatError(f"{index} lists tensors that no file holds: {missing[:4]}")
    return found


def _read(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".bin":
        return read_bin(path)
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise FormatError(f"{path} is missing") from error
    except (SafetensorError, OSError, TypeError, ValueError, KeyError, AttributeError) as error:
        # Some dtypes (8-bit floats) have no NumPy name, which shows in several ways.
        raise FormatError(f"{path} is not a readable safetensors file: {error}") from error
