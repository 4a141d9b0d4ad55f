"""Features computed during the fit: those of the extraction, once a row where they are kept."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_jax import InputError
from eagle_jax.config import default_taps
from eagle_jax.tiny import TINY, tiny_target
from train.corpus import Corpus
from train.data import Sample, pack
from train.features import extract
from train.live import FirstEpochCorpus, LiveCorpus
from train.store import lay_out

TAPS = default_taps(TINY.num_layers)


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """A target, and a corpus with several documents a row whose features lie on disk."""
    target, rng = tiny_target(), np.random.default_rng(0)
    samples = [Sample(rng.integers(0, 61, n).astype(np.int32), 2) for n in (9, 30, 14, 21, 7, 25)]
    features = extract(target.model, samples, tmp_path_factory.mktemp("features"), TAPS)
    store = lay_out(samples, features)
    packed = pack(store.samples, 40, 0.5, ())
    assert len(packed) > 2 and packed.document.max() > 0 and (packed.document < 0).any()
    return target, store, Corpus(packed, store, TINY.hidden_size)


def test_live_features_are_those_on_disk(cached):
    target, store, disk = cached
    live = LiveCorpus(disk.packed, store, target.model, TAPS)
    rows = np.arange(len(disk))
    for name in ("features", "taps"):
        found, wanted = (np.asarray(getattr(c.batch(rows), name)) for c in (live, disk))
        np.testing.assert_allclose(found, wanted, atol=2e-2, err_msg=name)
        assert (found[disk.packed.document < 0] == 0).all()
    np.testing.assert_allclose(live.tap_scale(), disk.tap_scale(), rtol=1e-2)


def test_each_row_is_computed_once_and_outlives_the_process(cached, tmp_path, monkeypatch):
    target, store, disk = cached
    computed = []
    compute = LiveCorpus.signals
    monkeypatch.setattr(
        LiveCorpus, "signals", lambda self, rows: computed.extend(rows) or compute(self, rows)
    )

    def open_again(packed=disk.packed, taps=TAPS):
        return FirstEpochCorpus(packed, store, target.model, taps, tmp_path / "rows")

    corpus = open_again()
    first = corpus.batch(np.array([1, 0]))
    again = corpus.batch(np.array([0, 1]))
    np.testing.assert_allclose(first.features[::-1], again.features, atol=1e-2)
    later = open_again()
    later.batch(np.arange(len(disk)))
    np.testing.assert_array_equal(later.batch(np.array([0, 1])).taps, again.taps)
    assert sorted(computed) == list(range(len(disk)))
    for other in ({"packed": pack(store.samples, 50, 0.5, ())}, {"taps": (0,)}):
        with pytest.raises(InputError, match="other rows"):
            open_again(**other)
