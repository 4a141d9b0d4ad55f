"""Data-parallel training: eight devices reach the weights that one device reaches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent


def fit_here(folder: Path, batch: int) -> None:
    """One epoch on sixteen random conversations, on all devices that this process has."""
    from eagle_jax.config import DrafterConfig, default_taps
    from eagle_jax.nn.modules import parameters
    from eagle_jax.tiny import tiny_target
    from train.corpus import Corpus
    from train.data import Sample, pack
    from train.features import extract
    from train.fit import fit, lend
    from train.loss import Objective
    from train.plan import FitConfig
    from train.start import initial_head
    from train.store import lay_out

    target = tiny_target()
    taps = default_taps(target.config.num_layers)
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, 61, 24).astype(np.int32), 3) for _ in range(16)]
    store = lay_out(samples, extract(target.model, samples, folder / "features", taps))
    data = Corpus(pack(store.samples, 24, 0.5, ()), store, target.config.hidden_size)
    ids = np.arange(61, dtype=np.int32)
    head = initial_head(target.model, DrafterConfig.like(target.config, 61, taps), 0, ids)
    goal = Objective(noise=0.0)
    config = FitConfig(epochs=1, batch=batch, learning_rate=0.02, single=0.5, objective=goal)
    head = fit(head, lend(target.model, ids, data), data, data, config, folder / "fit")
    np.savez(folder / "head.npz", **parameters(head))


def run_with(devices: int, folder: Path, batch: int = 8) -> subprocess.CompletedProcess:
    folder.mkdir()
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(folder), str(batch)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_eight_devices_equal_one(tmp_path):
    for devices in (1, 8):
        done = run_with(devices, tmp_path / str(devices))
        assert done.returncode == 0, done.stderr
    one, eight = (np.load(tmp_path / name / "head.npz") for name in ("1", "8"))
    assert set(one) == set(eight)
    for name in one:
        np.testing.assert_allclose(eight[name], one[name], atol=1e-4, err_msg=name)
    # The rows of a batch do lie on different devices: an odd batch cannot.
    refused = run_with(8, tmp_path / "odd", batch=6)
    assert refused.returncode != 0
    assert "--batch a multiple of 8" in refused.stderr


if __name__ == "__main__":
    fit_here(Path(sys.argv[1]), int(sys.argv[2]))
