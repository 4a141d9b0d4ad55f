"""The restricted reader of torch.save files: what it loads, and that it never runs anything."""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

from eagle_jax import FormatError
from eagle_jax.drafters.formats.unpickle import STORAGES, read_bin


class Stub:
    """Pickles as a call of a global that need not exist here."""

    def __init__(self, name, *arguments):
        self.name, self.arguments = name, arguments


class Pickler(pickle._Pickler):
    """Writes tensors as torch does: (dtype name, key, count) become storages."""

    def save(self, value, save_persistent_id=True):
        if isinstance(value, Stub):
            module, _, name = value.name.rpartition(".")
            self.write(b"c" + f"{module}\n{name}\n".encode())
            if value.arguments:
                self.save(tuple(value.arguments))
                self.write(b"R")
            return
        super().save(value, save_persistent_id)

    def persistent_id(self, value):
        return value.pid if isinstance(value, Storage) else None


class Storage:
    def __init__(self, kind, key, count):
        self.pid = ("storage", Stub(f"torch.{kind}"), key, "cpu", count)


def tensor(kind, key, count, offset, size, stride):
    arguments = (Storage(kind, key, count), offset, size, stride, False, collections.OrderedDict())
    return Stub("torch._utils._rebuild_tensor_v2", *arguments)


def write(path, content, storages=None, order=b"little", compress=zipfile.ZIP_STORED):
    if not isinstance(content, bytes):
        buffer = io.BytesIO()
        Pickler(buffer, protocol=2).dump(content)
        content = buffer.getvalue()
    with zipfile.ZipFile(path, "w", compress) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", order)
        for key, raw in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", raw)
    return path


VALUES = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize("kind", STORAGES)
def test_every_storage_type(tmp_path, kind):
    values = np.arange(6).astype(STORAGES[kind])
    shapes = {"a": (0, (2, 3), (3, 1)), "t": (1, (2, 2), (1, 2))}
    content = {name: tensor(kind, "0", 6, *shape) for name, shape in shapes.items()}
    found = read_bin(write(tmp_path / "x.bin", content, {"0": values.tobytes()}))
    assert found["a"].dtype == STORAGES[kind]
    np.testing.assert_array_equal(found["a"], values.reshape(2, 3))
    np.testing.assert_array_equal(found["t"], [[values[1], values[3]], [values[2], values[4]]])


BAD_TENSORS = {
    "beyond": (0, (2, 4), (4, 1)),
    "offset": (5, (2,), (1,)),
    "stride": (0, (2, 3), (100, 1)),
    "huge": (0, (2**40, 2**40), (0, 0)),
    "overlapping": (0, (7,), (0,)),
    "negative size": (0, (-2, 3), (3, 1)),
    "negative stride": (5, (6,), (-1,)),
    "negative offset": (-1, (2,), (1,)),
    "ranks": (0, (2, 3), (1,)),
    "a float": (0, (2.0, 3), (3, 1)),
    "a bool": (True, (2, 2), (2, 1)),
    "a string": (0, "ab", "cd"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_tensor_must_lie_in_its_storage(tmp_path, name):
    content = {"a": tensor("FloatStorage", "0", 6, *BAD_TENSORS[name])}
    with pytest.raises(FormatError):
        read_bin(write(tmp_path / "x.bin", content, {"0": VALUES.tobytes()}))


BAD_STORAGES = {
    "count": tensor("FloatStorage", "0", 7, 0, (1,), (1,)),
    "dtype": tensor("DoubleStorage", "0", 6, 0, (1,), (1,)),
    "missing": tensor("FloatStorage", "1", 6, 0, (1,), (1,)),
    "elsewhere": tensor("FloatStorage", "../data.pkl", 6, 0, (1,), (1,)),
    "unknown": tensor("QInt8Storage", "0", 24, 0, (1,), (1,)),
}


@pytest.mark.parametrize("name", BAD_STORAGES)
def test_a_storage_must_be_what_it_says(tmp_path, name):
    with pytest.raises(FormatError):
        read_bin(write(tmp_path / "x.bin", {"a": BAD_STORAGES[name]}, {"0": VALUES.tobytes()}))


class Evil:
    """What an attacker pickles: a call with side effects."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def malicious(marker):
    """Pickles that try to run code, each in another way."""
    import os
    import subprocess

    command = f"touch {marker}"
    instance = b"(S'" + command.encode() + b"'\nios\nsystem\n."
    stacked = pickle.dumps(Evil(os.system, command), protocol=4)
    return {
        "reduce": pickle.dumps({"a": Evil(os.system, command)}, protocol=2),
        "stack_global": stacked,
        "subprocess": pickle.dumps({"a": Evil(subprocess.call, ["touch", str(marker)])}),
        "eval": pickle.dumps(Evil(eval, f"open({str(marker)!r}, 'w')")),
        "getattr": pickle.dumps(Evil(getattr, "text", "upper")),
        "inst": instance,
        "torch.load": b"ctorch\nload\n(S'x'\ntR.",
        "dotted": b"\x80\x04\x8c\x0bcollections\x8c\x18OrderedDict.__init__.x.y\x93.",
        "build": b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'__call__'\nI1\nstb.",
        "storage called": b"ctorch\nFloatStorage\n(tR.",
        "extension": b"\x80\x02\x82\x01.",
        "deep": b"(" * 5000 + b"t" * 5000 + b".",
        "long": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".",
        "no stop": b"\x80\x02}",
        "empty": b"",
    }


@pytest.mark.parametrize("name", malicious("x"))
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path, name):
    marker = tmp_path / "ran"
    write(tmp_path / "x.bin", malicious(marker)[name])
    with pytest.raises(FormatError):
        read_bin(tmp_path / "x.bin")
    assert not marker.exists()


def test_the_attacks_are_real(tmp_path):
    """The same pickles do run under pickle.loads, so that their refusal means something."""
    for name in ("reduce", "stack_global", "subprocess", "eval", "inst"):
        marker = tmp_path / name
        pickle.loads(malicious(marker)[name])
        assert marker.exists(), name


def test_other_files_are_refused_by_name(tmp_path):
    good = write(tmp_path / "x.bin", {"a": tensor("FloatStorage", "0", 6, 0, (6,), (1,))},
                 {"0": VALUES.tobytes()})  # fmt: skip
    whole = good.read_bytes()
    for content, message in (
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "older layout"),
        (b"hello", "no file of torch.save"),
        (whole[:-30], "truncated"),
        (b"", "truncated"),
    ):
        (tmp_path / "y.bin").write_bytes(content)
        with pytest.raises(FormatError, match=message):
            read_bin(tmp_path / "y.bin")
    with pytest.raises(FormatError, match="missing"):
        read_bin(tmp_path / "z.bin")
    for content, options, message in (
        ({"a": 1}, {}, "expected tensors by name, found int"),
        ([1], {}, "found list"),
        ({}, {"order": b"big"}, "little-endian"),
        ({}, {"compress": zipfile.ZIP_DEFLATED}, "compressed"),
    ):
        with pytest.raises(FormatError, match=message):
            read_bin(write(tmp_path / "x.bin", content, **options))


@pytest.mark.parity
def test_reads_what_torch_saves(tmp_path):
    import torch

    weights = {
        "f32": torch.randn(3, 4),
        "f16": torch.randn(5).half(),
        "bf16": torch.randn(2, 3, 4).bfloat16(),
        "bool": torch.tensor([True, False]),
        "long": torch.arange(4),
        "transposed": torch.randn(3, 4).T,
        "slice": torch.randn(6, 6)[2:4, 1:],
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }
    shared = torch.randn(4)
    weights |= {"one": shared, "two": shared}
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    for content in (weights, module.state_dict()):
        torch.save(content, tmp_path / "x.bin")
        found = read_bin(tmp_path / "x.bin")
        assert list(found) == list(content)
        for name, expected in content.items():
            array = found[name]
            assert array.shape == tuple(expected.shape), name
            if expected.dtype == torch.bfloat16:
                assert array.dtype == ml_dtypes.bfloat16
                array, expected = array.astype(np.float32), expected.float()
            np.testing.assert_array_equal(array, expected.detach().numpy())
    torch.save(weights, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match="older layout"):
        read_bin(tmp_path / "old.bin")
    torch.save(module, tmp_path / "module.bin")
    with pytest.raises(FormatError, match="asks to run"):
        read_bin(tmp_path / "module.bin")
