"""Reads `pytorch_model.bin` without torch and without running anything that it contains.

`torch.save` writes a zip archive: `data.pkl`, a pickle that rebuilds tensors, and `data/N`, the raw
bytes of their storages. A pickle is a program; this one may only call the few names that a
dictionary of tensors needs, and gets objects of ours in their place.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eagle_jax.errors import FormatError

STORAGES = {
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "BoolStorage": np.dtype(np.bool_),
    "ByteStorage": np.dtype(np.uint8),
    "CharStorage": np.dtype(np.int8),
    "ShortStorage": np.dtype(np.int16),
    "IntStorage": np.dtype(np.int32),
    "LongStorage": np.dtype(np.int64),
}


def read_bin(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file of `torch.save` by name.

    Raises:
      FormatError: not such a file, of the layout before torch 1.6, a pickle that asks for anything
        but tensors, or a tensor that reaches beyond its storage.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path, archive)
    except FormatError:
        raise
    except FileNotFoundError as error:
        raise FormatError(f"{path} is missing") from error
    except zipfile.BadZipFile as error:
        raise FormatError(_not_a_zip(path)) from error
    except Exception as error:  # a pickle can make the interpreter of pickles raise anything
        raise FormatError(
            f"{path} is corrupt, or holds more than tensors: {type(error).__name__}: {error}"[:400]
        ) from error


def _not_a_zip(path: Path) -> str:
    with open(path, "rb") as file:
        begin = file.read(2)
    if begin == b"\x80\x02":
        return (
            f"{path}: expected the zip archive that torch.save writes since torch 1.6, found the "
            "older layout; load it with torch and save it again, best as safetensors"
        )
    return f"{path} is truncated or no file of torch.save (expected a zip archive); fetch it again"


def _read(path: Path, archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    entries = {entry.filename: entry for entry in archive.infolist()}
    roots = [name[: -len("data.pkl")] for name in entries if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise FormatError(f"{path}: expected one data.pkl in the archive, found {len(roots)}")
    for entry in entries.values():
        # torch stores; a compressed entry could unpack to any size.
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise FormatError(
                f"{path}: {entry.filename} is compressed, which torch.save never does"
            )
    order = roots[0] + "byteorder"
    if order in entries and archive.read(order) != b"little":
        raise FormatError(f"{path}: expected little-endian tensors, found {archive.read(order)!r}")
    program = io.BytesIO(archive.read(roots[0] + "data.pkl"))
    found = _Unpickler(program, path, archive, roots[0] + "data/", entries).load()
    if not isinstance(found, Mapping):
        raise FormatError(f"{path}: expected tensors by name, found {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, np.ndarray):
            raise FormatError(
                f"{path}: expected tensors by name, found {type(value).__name__} at {name!r:.80}"
            )
    return dict(found)


class _Storage:
    """The flat contents of one storage; an object that nothing can be set on."""

    __slots__ = ("values",)

    def __init__(self, values: np.ndarray):
        self.values = values


class _Rebuild:
    """Stands in for torch._utils._rebuild_tensor_v2. Without attributes, so that a pickle's BUILD
    cannot change it."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> np.ndarray:
        if not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("a tensor without a storage")
        numbers = (offset, *size, *stride)
        if any(type(n) is not int or n < 0 for n in numbers) or len(size) != len(stride):
            raise pickle.UnpicklingError(f"a tensor at {offset!r}, {size!r}, {stride!r}"[:200])
        values = storage.values
        if not math.prod(size):
            return np.zeros(size, values.dtype)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        # Overlapping views could be of any size, so the count of elements is bounded as well.
        if last >= len(values) or math.prod(size) > len(values):
            raise pickle.UnpicklingError(
                f"a tensor of shape {size} at {offset} reaches beyond its storage of {len(values)}"
            )
        steps = [step * values.itemsize for step in stride]
        view = np.lib.stride_tricks.as_strided(values[offset:], size, steps, writeable=False)
        return np.ascontiguousarray(view).reshape(size)


class _Unpickler(pickle.Unpickler):
    """Knows tensors, their storages and ordered dictionaries; refuses every other name."""

    def __init__(self, program, path: Path, archive, prefix: str, entries):
        super().__init__(program)
        self._path, self._archive = path, archive
        self._prefix, self._entries = prefix, entries
        self._storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild()
        if module in ("torch", "torch.storage") and name in STORAGES:
            return name
        raise FormatError(
            f"{self._path} asks to run {module}.{name}"[:200]
            + "; only tensors are loaded from a .bin file, so it is refused"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise pickle.UnpicklingError(f"an unknown persistent id {pid!r}"[:200])
        _, kind, key, _, count = pid
        if not isinstance(kind, str) or kind not in STORAGES or not isinstance(key, str):
            raise pickle.UnpicklingError(f"an unknown storage {pid!r}"[:200])
        entry = self._entries.get(self._prefix + key)
        dtype = STORAGES[kind]
        if entry is None or type(count) is not int or entry.file_size != count * dtype.itemsize:
            held = "is missing" if entry is None else f"has {entry.file_size} bytes"
            raise pickle.UnpicklingError(f"storage {key[:40]!r} of {count!r} {dtype} {held}")
        if key not in self._storages:
            raw = self._archive.read(entry)
            self._storages[key] = _Storage(np.frombuffer(raw, dtype))
        held = self._storages[key]
        if held.values.dtype != dtype:
            raise pickle.UnpicklingError(f"storage {key[:40]!r} is read as two dtypes")
        return held
